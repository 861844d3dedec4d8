"""Dims, strides, dtype, alignment."""

from __future__ import annotations

import re
from itertools import product
from typing import Any, cast

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from cudnn_actor.protocol import DType, InvalidRequest, Layout, TensorSpec, packed_strides
from cudnn_actor.protocol.types.tensor import LayoutName

from ..in_one_test import cases_in_one_test

DIMS = st.lists(st.integers(0, 7), min_size=3, max_size=5).map(tuple)
OF_ANY_RANK = st.lists(st.integers(0, 4), max_size=8).map(tuple)


def channels_last(dims: tuple[int, ...]) -> np.ndarray:
    """An array of `dims` in N, C, spatial order that lies in memory as N, spatial, C."""
    stored: np.ndarray = np.zeros((dims[0], *dims[2:], dims[1]), np.int8)
    return np.moveaxis(stored, -1, 1)


@given(DIMS)
def test_packed_strides_are_those_that_numpy_gives(dims: tuple[int, ...]) -> None:
    filled = tuple(max(size, 1) for size in dims)
    assert packed_strides(dims, Layout.NCHW) == np.zeros(filled, np.int8).strides
    assert packed_strides(dims, "NHWC") == channels_last(filled).strides


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_strides_of_ints_are_ints_also_after_those_of_numpys_numbers(layout: LayoutName) -> None:
    """They are kept, and both kinds of dims are equal."""
    dims = 11, 13, 17
    numbers: Any = tuple(np.int64(size) for size in dims)
    packed_strides(numbers, layout)
    assert {*map(type, packed_strides(dims, layout))} == {int}


@given(OF_ANY_RANK, st.sampled_from(DType))
def test_a_tensor_has_none_to_eight_dims_of_any_size(dims: tuple[int, ...], dtype: DType) -> None:
    array = np.zeros(dims, dtype.numpy)
    spec = TensorSpec.packed(dims, dtype)
    assert (spec.rank, spec.size, spec.nbytes) == (array.ndim, array.size, array.nbytes)
    assert spec.layout is Layout.NCHW
    assert TensorSpec.like(array) == spec
    assert np.dtype(dtype.numpy) == array.dtype


def test_a_tensor_without_dims_has_one_element() -> None:
    spec = TensorSpec.packed(())
    assert (spec.dims, spec.strides, spec.size, spec.nbytes) == ((), (), 1, 4)
    assert str(spec) == "float32[] NCHW"
    assert TensorSpec.like(np.zeros((), np.float32)) == spec


@pytest.mark.parametrize("array", [np.zeros((0, 4)), np.zeros((4, 0)).T[:, ::-1], np.zeros((3, 8, 2))[:, 8:]])
def test_an_array_without_elements_has_the_strides_of_a_packed_one(array: np.ndarray) -> None:
    assert TensorSpec.like(array) == TensorSpec.packed(array.shape, "float64")


def test_elements_that_are_not_there_do_not_overlap() -> None:
    assert TensorSpec.strided((0, 5), (1, 1)).nbytes == 0
    with pytest.raises(InvalidRequest, match="would overlap"):
        TensorSpec.strided((1, 5, 5), (1, 1, 1))


@given(DIMS, st.sampled_from([Layout.NCHW, Layout.NHWC]), st.sampled_from(DType))
def test_a_packed_spec_has_no_gaps(dims: tuple[int, ...], layout: Layout, dtype: DType) -> None:
    spec = TensorSpec.packed(dims, dtype, layout)
    assert spec.nbytes == spec.size * dtype.itemsize == np.zeros(dims, dtype.numpy).nbytes
    assert TensorSpec.packed(dims, np.dtype(dtype.numpy), cast(LayoutName, layout.value)) == spec


def test_the_layout_is_told_from_the_strides() -> None:
    assert TensorSpec.packed((2, 3, 4, 5)).layout is Layout.NCHW
    assert TensorSpec.packed((2, 3, 4, 5), layout="NHWC").layout is Layout.NHWC
    assert TensorSpec.packed((2, 1, 4, 5), layout="NHWC").layout is Layout.NHWC
    assert TensorSpec.packed((1, 1, 1, 1), layout="NHWC").layout is Layout.NCHW
    assert TensorSpec.strided((2, 3), (10, 1)).layout is Layout.STRIDED


def test_a_spec_prints_what_it_is() -> None:
    assert str(TensorSpec.packed((1, 3, 8, 8), "float16", "NHWC")) == "float16[1x3x8x8] NHWC"


@given(DIMS, st.booleans())
def test_like_describes_an_array_as_it_lies(dims: tuple[int, ...], last: bool) -> None:
    array = channels_last(dims) if last else np.zeros(dims, np.int8)
    spec = TensorSpec.like(array)
    assert spec.dims == dims
    if spec.size:
        assert all(d == 1 or s == t for d, s, t in zip(dims, spec.strides, array.strides, strict=True))


def test_like_takes_sliced_and_transposed_arrays() -> None:
    array = np.zeros((6, 8), np.float32)
    assert TensorSpec.like(array[::2, ::4]).strides == (16, 4)
    assert TensorSpec.like(array.T).strides == (1, 8)


def test_like_settles_the_strides_of_dims_of_size_one() -> None:
    image = np.zeros((3, 8, 8), np.float32)
    assert TensorSpec.like(image[None]) == TensorSpec.packed((1, 3, 8, 8))
    assert TensorSpec.like(image[:1][::-1]) == TensorSpec.packed((1, 8, 8))
    assert TensorSpec.like(image[None, :, ::2]).strides == (1, 64, 16, 1)


@pytest.mark.parametrize(
    ("array", "field", "text"),
    [
        (np.zeros((4, 4))[::-1], "strides", "below 1"),
        (np.broadcast_to(np.zeros((1, 4)), (4, 4)), "strides", "below 1"),
        (np.zeros(4, np.dtype([("a", "i1"), ("b", "<i4")]))["b"], "strides", "ascontiguousarray"),
        (np.zeros((1,) * 9), "dims", "0 to 8"),
        (np.array(["a", "b"]), "dtype", "convert to one of"),
        (np.array([object()]), "dtype", "convert to one of"),
        (np.zeros(3, np.complex64), "dtype", "convert to one of"),
        (np.zeros(3, ">f4"), "dtype", "convert to one of"),
    ],
)
def test_like_refuses_what_no_spec_describes(array: np.ndarray, field: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as caught:
        TensorSpec.like(array)
    assert caught.value.field == field


def test_numpys_integers_are_welcome() -> None:
    dims = np.array([2, 3, 4])
    spec = TensorSpec.packed(dims)  # type: ignore[arg-type]
    mixed: list[int] = [np.int64(2), np.uint8(3), 4]  # type: ignore[list-item]
    assert spec == TensorSpec.packed(mixed) == TensorSpec.packed([2, 3, 4])
    assert all(type(n) is int for n in (*spec.dims, *spec.strides))
    assert TensorSpec.strided(dims, np.array([12, 4, 1], np.int32)) == spec  # type: ignore[arg-type]


@cases_in_one_test
@pytest.mark.parametrize(
    "dims",
    [(1.0, 2), (True, 2), (np.True_, 2), (np.float64(2), 2), "12", ("1",), 5, None, (1,) * 9, [[1]]],
)
def test_dims_that_are_no_whole_numbers_are_refused(dims: object) -> None:
    with pytest.raises(InvalidRequest, match=r"N, C, spatial|give a tuple") as caught:
        TensorSpec.packed(dims)  # type: ignore[arg-type]
    assert caught.value.field == "dims"
    with pytest.raises(InvalidRequest):
        TensorSpec(dims=dims, strides=(1, 1), dtype=DType.INT8)  # type: ignore[arg-type]


@pytest.mark.parametrize("dims", [(-1, 3), (0, -1)])
def test_a_dim_below_zero_is_refused(dims: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="at least 0") as caught:
        TensorSpec.packed(dims)
    assert (caught.value.field, caught.value.value) == ("dims", repr(dims))


@pytest.mark.parametrize("strides", [(1,), (4, 1, 1), (4, 1.0), (True, 4), (0, 1), (4, -1), "41", None])
def test_strides_must_be_one_whole_number_from_one_per_dim(strides: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TensorSpec.strided((4, 4), strides)  # type: ignore[arg-type]
    assert caught.value.field == "strides"


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30)), min_size=1, max_size=4),
)
def test_no_accepted_strides_make_elements_overlap(pairs: list[tuple[int, int]]) -> None:
    dims, strides = zip(*pairs, strict=True)
    try:
        spec = TensorSpec.strided(dims, strides)
    except InvalidRequest:
        return
    places = [sum(i * s for i, s in zip(at, strides, strict=True)) for at in product(*map(range, dims))]
    assert len(set(places)) == spec.size
    assert spec.nbytes == (max(places) + 1) * 4


@pytest.mark.parametrize(("dims", "strides"), [((4, 4), (1, 1)), ((4, 4), (3, 1)), ((2, 3), (2, 1))])
def test_overlapping_strides_are_refused_with_the_fix(
    dims: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidRequest, match="make each stride larger") as caught:
        TensorSpec.strided(dims, strides)
    assert (caught.value.field, caught.value.value) == ("strides", repr(strides))


@cases_in_one_test
@pytest.mark.parametrize("alignment", [0, 8, 15, 24, 48, 512, -16, 16.0, True, None])
def test_an_alignment_is_a_power_of_two_from_16_to_256(alignment: int) -> None:
    with pytest.raises(InvalidRequest, match="leave it at 16") as caught:
        TensorSpec(dims=(1,), strides=(1,), dtype=DType.INT8, alignment=alignment)
    assert caught.value.field == "alignment"


@pytest.mark.parametrize("alignment", [16, 32, 64, 128, 256])
def test_every_such_alignment_is_accepted(alignment: int) -> None:
    assert TensorSpec(dims=(1,), strides=(1,), dtype=DType.INT8, alignment=alignment).alignment == alignment


@pytest.mark.parametrize(
    ("dims", "strides", "field"),
    [
        ((2**48 + 1,), (1,), "dims"),
        ((2**30, 2**30), (2**30, 1), "dims"),
        ((2**47, 1), (1, 1), "dims"),
        ((0, 2**30, 2**30), (1, 1, 1), "dims"),
        ((2, 1), (2**48, 1), "dims"),
        ((1, 2), (2**63, 1), "strides"),
    ],
)
def test_sizes_that_overflow_are_refused(dims: tuple[int, ...], strides: tuple[int, ...], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TensorSpec.strided(dims, strides)
    assert caught.value.field == field


def test_packing_names_the_dims_that_overflow() -> None:
    with pytest.raises(InvalidRequest, match="split the tensor") as caught:
        TensorSpec.packed((2, 2**40, 2**40))
    assert caught.value.field == "dims"


def test_the_largest_extent_is_accepted() -> None:
    assert TensorSpec.packed((2**48,), "int8").nbytes == 2**48
    assert TensorSpec.strided((1, 2), (2**63 - 1, 1)).nbytes == 8


@pytest.mark.parametrize("layout", ["STRIDED", "NCWH", 3, None])
def test_a_layout_without_strides_is_refused(layout: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        packed_strides((1, 2, 3), layout)
    assert caught.value.field == "layout"


@pytest.mark.parametrize(
    ("given", "meant"),
    [("NCWH", "NCHW"), ("nhwc", "NHWC"), ("NHCW", "NHWC"), ("strided", None), ("rows", None)],
)
def test_a_misspelt_layout_is_told_which_was_meant(given: Any, meant: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TensorSpec.packed((1, 2, 3), "float32", given)
    assert f"layout={given!r}: " in str(caught.value)
    assert (f'did you mean "{meant}"?' in str(caught.value)) is (meant is not None)
    assert ("did you mean" in str(caught.value)) is (meant is not None)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("flaot32", "float32"),
        ("Float16", "float16"),
        ("bf16", "bfloat16"),
        ("longdouble", None),  # NumPy has it, tensors have not
        ("unit16", "uint16"),
        ("complex64", None),
        ("number", None),
    ],
)
def test_a_misspelt_dtype_is_told_which_was_meant(given: Any, meant: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TensorSpec.packed((1, 2, 3), given)
    assert f"dtype={given!r}: " in str(caught.value)
    told = re.search(r'did you mean "(\w+)"\?|pass "(\w+)", or', str(caught.value))
    assert (told and (told[1] or told[2])) == meant


def test_a_name_where_only_a_member_will_do_is_told_so() -> None:
    name: Any = "float32"
    with pytest.raises(InvalidRequest, match=r"dtype='float32': is not a DType; use one of DType\.FLOAT64"):
        TensorSpec(dims=(1,), strides=(1,), dtype=name)


@pytest.mark.parametrize("dims", [(2, 3), (1, 2, 3, 4, 5, 6)])
def test_channels_last_needs_three_to_five_dims(dims: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="use NCHW"):
        packed_strides(dims, "NHWC")


@pytest.mark.parametrize("dtype", ["float8", "complex64", object, None, 3])
def test_a_dtype_that_tensors_cannot_have_is_refused(dtype: Any) -> None:
    with pytest.raises(InvalidRequest, match="convert to one of") as caught:
        TensorSpec.packed((1,), dtype)
    assert caught.value.field == "dtype"
    with pytest.raises(InvalidRequest, match="use one of"):
        TensorSpec(dims=(1,), strides=(1,), dtype=dtype)
