"""From messages to graphs: what is computed, and which field binds where."""

from __future__ import annotations

import pytest

from cudnn_actor.protocol import (
    Activation,
    Compute,
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    ConvSpec,
    DType,
    Epilogue,
    Numerics,
    Pointwise,
    TensorRole,
)
from cudnn_actor.protocol.messages.lowering import lower, signature
from cudnn_actor.protocol.types.dtypes import DTypeName

from ..in_one_test import cases_in_one_test
from .lowering_fixtures import CONV, backward_data, backward_filter, forward, ref

RELU = Epilogue(activation=Activation.RELU)


def steps(message: Compute) -> list[str]:
    """The graph's operations in order: pointwise modes by name, convolutions by class."""
    order = lower(message).graph.operations
    return [op.mode.value if isinstance(op, Pointwise) else type(op).__name__ for op in order]


@pytest.mark.parametrize(
    ("message", "operation", "fields"),
    [
        (forward(), ConvolutionForward, ("x", "w", "y")),
        (backward_data(), ConvolutionBackwardData, ("dy", "w", "dx")),
        (backward_filter(), ConvolutionBackwardFilter, ("x", "dy", "dw")),
    ],
    ids=["forward", "backward data", "backward filter"],
)
def test_a_plain_convolution_is_one_operation(
    message: Compute, operation: type, fields: tuple[str, ...]
) -> None:
    lowered = lower(message)
    assert [type(op) for op in lowered.graph.operations] == [operation]
    assert (lowered.buffers, lowered.scalars) == (fields, ())
    assert (lowered.outputs, lowered.views, lowered.graph.pure) == (fields[-1:], (), True)


@pytest.mark.parametrize(
    "message", [forward(alpha=2.0), backward_data(alpha=2.0), backward_filter(alpha=2.0)]
)
def test_alpha_is_a_scalar_given_at_each_run(message: Compute) -> None:
    lowered = lower(message)
    assert steps(message)[1:] == ["mul"]
    assert lowered.scalars == ("alpha",)
    assert lowered.graph.pure


@pytest.mark.parametrize("message", [forward(beta=1.0), backward_data(beta=1.0), backward_filter(beta=1.0)])
def test_with_beta_the_output_is_read_and_the_request_is_not_pure(message: Compute) -> None:
    lowered = lower(message)
    assert lowered.buffers.count(lowered.outputs[0]) == 2
    assert lowered.buffers[-1] == lowered.outputs[0]
    assert lowered.scalars == ("beta",)
    assert not lowered.graph.pure


def test_everything_at_once_is_done_in_the_promised_order() -> None:
    message = forward(alpha=2.0, beta=3.0, bias=ref((6,)), epilogue=RELU)
    lowered = lower(message)
    last = lowered.graph.operations[-1]
    assert sorted(steps(message)) == sorted(["ConvolutionForward", "mul", "mul", "add", "add", "relu"])
    assert steps(message)[-3:] == ["add", "add", "relu"]
    assert sorted(lowered.scalars) == ["alpha", "beta"]
    assert sorted(lowered.buffers) == ["bias", "w", "x", "y", "y"]
    assert lowered.graph.tensor(last.writes[0]).name == "y"


def test_bound_fields_have_the_specs_of_their_tensors() -> None:
    message = forward(alpha=2.0, beta=3.0, bias=ref((6,)), w=ref((6, 4, 3, 3), layout="NHWC"))
    lowered = lower(message)
    for uid, name in zip(lowered.graph.bound, lowered.buffers, strict=True):
        tensor = lowered.graph.tensor(uid)
        spec = getattr(message, name).spec
        assert tensor.role is TensorRole.BOUND
        assert tensor.dims == (spec.dims if name != "bias" else (1, 6, 1, 1))
        assert name == "bias" or tensor.strides == spec.strides


@pytest.mark.parametrize(
    ("operands", "result", "compute"),
    [
        ("float64", "float64", DType.FLOAT64),
        ("float32", "float32", DType.FLOAT32),
        ("float16", "float16", DType.FLOAT32),
        ("float16", "float32", DType.FLOAT32),
        ("bfloat16", "bfloat16", DType.FLOAT32),
        ("int8", "int32", DType.INT32),
        ("int8", "int8", DType.INT32),
        ("int8", "float32", DType.INT32),
    ],
)
def test_products_are_accumulated_in_a_wide_enough_type(
    operands: DTypeName, result: DTypeName, compute: DType
) -> None:
    message = forward(
        x=ref((2, 4, 8, 8), operands), w=ref((6, 4, 3, 3), operands), y=ref((2, 6, 8, 8), result)
    )
    graph = lower(message).graph
    (operation,) = graph.operations
    assert graph.compute(operation) is compute


def test_a_bias_may_have_one_dim_or_be_broadcastable() -> None:
    flat, shaped = forward(bias=ref((6,))), forward(bias=ref((1, 6, 1, 1)))
    assert lower(flat).graph.digest() == lower(shaped).graph.digest()
    assert lower(shaped).views == ()
    ((place, view),) = lower(flat).views
    assert lower(flat).buffers[place] == "bias"
    assert (view.dims, view.strides) == ((1, 6, 1, 1), (6, 1, 1, 1))


def test_the_default_parameter_is_the_same_as_giving_it() -> None:
    implied = Epilogue(activation=Activation.LEAKY_RELU)
    given = Epilogue(activation=Activation.LEAKY_RELU, parameter=0.01)
    assert lower(forward(epilogue=implied)).graph.digest() == lower(forward(epilogue=given)).graph.digest()


def test_equal_epilogues_lower_to_the_same_graph() -> None:
    plus, minus = (Epilogue(activation=Activation.ELU, parameter=zero) for zero in (0.0, -0.0))
    assert plus == minus
    assert lower(forward(epilogue=plus)).graph.digest() == lower(forward(epilogue=minus)).graph.digest()


Convolved = ConvFwd | ConvBwdData | ConvBwdFilter
VARIANTS: dict[str, Convolved] = {
    "as it is": forward(),
    "another layout": forward(x=ref((2, 4, 8, 8), layout="NHWC")),
    "another batch": forward(x=ref((1, 4, 8, 8)), y=ref((1, 6, 8, 8))),
    "a bias": forward(bias=ref((6,))),
    "an activation": forward(epilogue=RELU),
    "tf32": forward(numerics=Numerics(tf32=True)),
    "deterministic": forward(numerics=Numerics(deterministic=True)),
    "alpha": forward(alpha=0.5),
    "beta": forward(beta=0.5),
    "dilation": forward(conv=ConvSpec.symmetric(2, pad=2, dilation=2)),
    "backward data": backward_data(),
    "backward filter": backward_filter(),
}


def test_each_meaning_has_its_own_digest_and_signature() -> None:
    assert len({lower(message).graph.digest() for message in VARIANTS.values()}) == len(VARIANTS)
    assert len({signature(message) for message in VARIANTS.values()}) == len(VARIANTS)


@cases_in_one_test
@pytest.mark.parametrize("message", VARIANTS.values(), ids=VARIANTS.keys())
def test_other_buffers_and_scalar_values_share_a_signature_and_a_graph(message: Convolved) -> None:
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    moved = {
        name: ref(value.spec.dims, value.spec.dtype, value.spec.layout, slot=99)
        for name, value in fields.items()
        if hasattr(value, "slot")
    }
    scalars = {
        "alpha": 7.5 if message.alpha != 1.0 else 1,
        "beta": -7.5 if message.beta != 0.0 else -0.0,
    }
    other = type(message)(**{**fields, **moved, **scalars})
    assert signature(other) == signature(message)
    assert lower(other).graph.digest() == lower(message).graph.digest()
    assert lower(other)[1:] == lower(message)[1:]


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_every_number_of_spatial_dims_lowers(spatial: int) -> None:
    x, w, y = ((2, 4, *[5] * spatial), (6, 2, *[3] * spatial), (2, 6, *[3] * spatial))
    message = forward(
        x=ref(x), w=ref(w), y=ref(y), conv=ConvSpec.symmetric(spatial, groups=2), bias=ref((6,))
    )
    assert steps(message) == ["ConvolutionForward", "add"]
    assert CONV.spatial_dims == 2
