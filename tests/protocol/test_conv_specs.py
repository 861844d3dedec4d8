"""Convolution parameters, and the dims that follow from them."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given

from cudnn_actor.protocol import Activation, ConvSpec, Epilogue, InvalidRequest, Numerics

from ..in_one_test import cases_in_one_test

Axis = tuple[int, int, int, int, int, int]
"""Size, taps, pre-padding, post-padding, stride, dilation."""


def positions(axis: Axis) -> int:
    """How many windows fit, counted one by one."""
    size, taps, pre, post, stride, dilation = axis
    end = size + post
    return sum(start + dilation * (taps - 1) < end for start in range(-pre, end, stride))


AXES = st.lists(
    st.tuples(
        st.integers(1, 14),
        st.integers(1, 4),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(1, 4),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=3,
)
Axes = list[Axis]


def conv_of(axes: Axes, groups: int = 1) -> ConvSpec:
    _, _, pre, post, stride, dilation = zip(*axes, strict=True)
    return ConvSpec(pre_padding=pre, post_padding=post, stride=stride, dilation=dilation, groups=groups)


@given(AXES, st.integers(1, 3), st.integers(1, 3))
def test_output_dims_count_the_window_positions(axes: Axes, groups: int, per_group: int) -> None:
    conv = conv_of(axes, groups)
    x = (2, groups * per_group, *(a[0] for a in axes))
    w = (groups * 2, per_group, *(a[1] for a in axes))
    wanted = [positions(axis) for axis in axes]
    if 0 in wanted:
        with pytest.raises(InvalidRequest, match="the padded input has") as caught:
            conv.output_dims(x, w)
        assert caught.value.field == "w"
    else:
        assert conv.output_dims(x, w) == (2, groups * 2, *wanted)


@given(AXES, st.integers(1, 3))
def test_input_dims_are_the_smallest_that_give_the_output(axes: Axes, groups: int) -> None:
    conv = conv_of(axes, groups)
    dy = (2, groups * 2, *(a[0] for a in axes))
    w = (groups * 2, 3, *(a[1] for a in axes))
    sizes = [*range(1, 14 * 4 + 14), 0]  # of nothing but padding, if there is no other
    fitting = [[n for n in sizes if positions((n, *axis[1:])) == axis[0]] for axis in axes]
    if not all(fitting):
        with pytest.raises(InvalidRequest, match="use less padding") as caught:
            conv.input_dims(dy, w)
        assert caught.value.field == "dy"
        return
    x = conv.input_dims(dy, w)
    assert x == (2, groups * 3, *(found[0] for found in fitting))
    assert conv.output_dims(x, w) == dy


@given(AXES)
def test_input_dims_undo_output_dims_up_to_the_stride(axes: Axes) -> None:
    conv = conv_of(axes)
    assume(all(positions(axis) for axis in axes))
    x = (1, 1, *(a[0] for a in axes))
    w = (1, 1, *(a[1] for a in axes))
    back = conv.input_dims(conv.output_dims(x, w), w)
    assert all(b <= a < b + s for a, b, s in zip(x[2:], back[2:], conv.stride, strict=True))


def test_symmetric_spreads_one_number_over_every_spatial_dim() -> None:
    assert ConvSpec.symmetric(3, pad=1, stride=(1, 2, 3), dilation=[2, 2, 2], groups=4) == ConvSpec(
        pre_padding=(1, 1, 1), post_padding=(1, 1, 1), stride=(1, 2, 3), dilation=(2, 2, 2), groups=4
    )
    assert ConvSpec.symmetric(1).spatial_dims == 1


def test_symmetric_takes_numpys_integers() -> None:
    conv = ConvSpec.symmetric(2, pad=np.int64(1), stride=np.array([1, 2]))  # type: ignore[arg-type]
    assert conv == ConvSpec.symmetric(2, pad=1, stride=(1, 2))


@cases_in_one_test
@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("spatial_dims", {"spatial_dims": 0}),
        ("spatial_dims", {"spatial_dims": 4}),
        ("spatial_dims", {"spatial_dims": 2.0}),
        ("pad", {"pad": (1,)}),
        ("pad", {"pad": 1.5}),
        ("pad", {"pad": "11"}),
        ("pad", {"pad": None}),
        ("stride", {"stride": True}),
        ("dilation", {"dilation": (1, 1, 1)}),
        ("pad", {"pad": -1}),
        ("stride", {"stride": 0}),
        ("dilation", {"dilation": 0}),
        ("stride", {"stride": 2**31}),
        ("pad", {"pad": 10**5000}),
        ("groups", {"groups": 0}),
        ("groups", {"groups": 10**30}),
        ("groups", {"groups": -2}),
        ("groups", {"groups": 1.0}),
        ("groups", {"groups": True}),
    ],
)
def test_symmetric_refuses_by_field_with_a_fix(field: str, options: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ConvSpec.symmetric(**{"spatial_dims": 2, **options})
    assert caught.value.field == field
    assert caught.value.fix in str(caught.value)
    assert caught.value.value in str(caught.value)


@pytest.mark.parametrize(("pad", "bound"), [(-1, "at least 0"), (2**40, "at most 2147483647")])
def test_a_value_out_of_range_is_told_the_bound_that_it_breaks(pad: int, bound: str) -> None:
    with pytest.raises(InvalidRequest, match=f"make every value {bound}"):
        ConvSpec.symmetric(2, pad=pad)


@cases_in_one_test
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pre_padding", (-1, 0)),
        ("pre_padding", 1),
        ("pre_padding", [0, 0]),
        ("pre_padding", ()),
        ("pre_padding", (0, 0, 0, 0)),
        ("post_padding", (0, -3)),
        ("post_padding", (0,)),
        ("stride", (1, 0)),
        ("stride", (1.0, 1)),
        ("dilation", (0, 1)),
        ("dilation", (1, 1, 1)),
    ],
)
def test_a_spec_refuses_by_field_and_shows_the_value(field: str, value: object) -> None:
    good: dict[str, object] = {
        "pre_padding": (0, 0),
        "post_padding": (0, 0),
        "stride": (1, 1),
        "dilation": (1, 1),
    }
    with pytest.raises(InvalidRequest) as caught:
        ConvSpec(**{**good, field: value})  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.value) == (field, repr(value))


@pytest.mark.parametrize(
    ("x", "w", "groups", "field", "fix"),
    [
        ((1, 3, 8), (4, 3, 3, 3), 1, "x", "N, C, spatial"),
        ((1, 3, 8, 8), (4, 3, 3), 1, "w", "N, C, spatial"),
        ((1, 3, 8, 8), (4, 1, 3, 3), 2, "groups", "common divisor"),
        ((1, 4, 8, 8), (3, 2, 3, 3), 2, "groups", "common divisor"),
        ((1, 4, 8, 8), (4, 4, 3, 3), 2, "w", "give w 2 channels"),
        ((1, 4, 8, 8), (4, 3, 3, 3), 1, "w", "give w 4 channels"),
        ((1, 4, 2, 8), (4, 4, 3, 3), 1, "w", "pad more"),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    x: tuple[int, ...], w: tuple[int, ...], groups: int, field: str, fix: str
) -> None:
    with pytest.raises(InvalidRequest, match=fix) as caught:
        ConvSpec.symmetric(2, groups=groups).output_dims(x, w)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("dy", "w", "groups", "field"),
    [
        ((1, 4, 8), (4, 3, 3, 3), 1, "dy"),
        ((1, 4, 8, 8), (4, 3, 3), 1, "w"),
        ((1, 4, 8, 8), (5, 3, 3, 3), 1, "dy"),
        ((1, 3, 8, 8), (3, 1, 3, 3), 2, "groups"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(
    dy: tuple[int, ...], w: tuple[int, ...], groups: int, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ConvSpec.symmetric(2, groups=groups).input_dims(dy, w)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("activation", "parameter"),
    [
        (Activation.RELU, 1.0),
        (Activation.IDENTITY, 0.0),
        (Activation.ELU, float("nan")),
        (Activation.ELU, float("inf")),
        (Activation.ELU, 10**400),
        (Activation.ELU, "1"),
        (Activation.ELU, True),
        (Activation.SOFTPLUS, 0.0),
        (Activation.SOFTPLUS, -1.0),
    ],
)
def test_an_epilogue_refuses_parameters_that_mean_nothing(activation: Activation, parameter: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Epilogue(activation=activation, parameter=parameter)
    assert caught.value.field == "parameter"


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="leaky_relu") as caught:
        Epilogue(activation="relu6")  # type: ignore[arg-type]
    assert caught.value.field == "activation"


def test_defaults_stand_for_parameters_left_out() -> None:
    assert Epilogue(activation=Activation.LEAKY_RELU).effective_parameter == 0.01
    assert Epilogue(activation=Activation.SWISH, parameter=2).effective_parameter == 2.0
    assert Epilogue(activation=Activation.RELU).effective_parameter is None


@pytest.mark.parametrize("field", ["tf32", "deterministic"])
def test_numerics_are_bools(field: str) -> None:
    with pytest.raises(InvalidRequest, match="True or False") as caught:
        Numerics(**{field: 1})  # type: ignore[arg-type]
    assert caught.value.field == field


@cases_in_one_test
@pytest.mark.parametrize("field", ["prefer", "exclude"])
@pytest.mark.parametrize("value", ["eng45", ["eng45"], (45,), ("",), None])
def test_names_of_plans_are_in_a_tuple(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match="names of plans") as caught:
        Numerics(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_part_of_a_name_stands_for_all_plans_that_have_it() -> None:
    numerics = Numerics(prefer=("eng4_k2=5", "eng45"), exclude=("k24=3",))
    names = ["eng1_k24=3", "eng45_k2=5", "eng4_k2=5_k24=3", "eng4_k2=6"]
    assert [numerics.preference(name) for name in names] == [2, 1, 0, 2]
    assert [numerics.excludes(name) for name in names] == [True, False, True, False]
