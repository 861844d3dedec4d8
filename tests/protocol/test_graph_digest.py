"""One meaning, one digest."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from cudnn_actor.protocol import (
    Activation,
    ConvolutionForward,
    ConvSpec,
    DType,
    Epilogue,
    GraphTensor,
    Node,
    Numerics,
    OperationGraph,
    Pointwise,
    PointwiseMode,
    TensorRole,
)
from cudnn_actor.protocol.messages.lowering import lower

from ..whole import few
from .lowering_fixtures import forward, ref

GOLDEN = "19c3271cd13f7bbba09e05bdb39ed82f2b9b0bbc0c159503f9e5a326408a6051"
MESSAGE = forward(
    alpha=2.0,
    beta=0.5,
    bias=ref((6,)),
    epilogue=Epilogue(activation=Activation.LEAKY_RELU, parameter=0.125),
    numerics=Numerics(tf32=True),
)
GRAPH = lower(MESSAGE).graph


def replace(graph: OperationGraph, **changes: object) -> OperationGraph:
    fields = {"tensors": graph.tensors, "operations": graph.operations, "numerics": graph.numerics}
    return OperationGraph(**{**fields, **changes})  # type: ignore[arg-type]


def renumbered(operation: Node, uids: dict[int, int]) -> Node:
    operands = dict(operation.named())
    return operation.with_operands(lambda name: uids[operands[name]])


def shuffled(graph: OperationGraph, seed: int) -> OperationGraph:
    """The same graph, written down differently: other uids and names, and the tensors in another order."""
    rng = random.Random(seed)
    fresh = rng.sample(range(-1_000, 1_000), len(graph.tensors))
    uids = {t.uid: new for t, new in zip(graph.tensors, fresh, strict=True)}
    tensors = [
        msgspec.structs.replace(
            t,
            uid=uids[t.uid],
            overwrites=None if t.overwrites is None else uids[t.overwrites],
            name=f"t{rng.random()}",
        )
        for t in graph.tensors
    ]
    operations = [renumbered(operation, uids) for operation in graph.operations]
    rng.shuffle(tensors)
    return replace(graph, tensors=tuple(tensors), operations=tuple(operations))


def test_the_canonical_form_is_pinned() -> None:
    """A new digest orphans every stored plan: if the form must change, change "graph/4" with it."""
    assert GRAPH.digest() == GOLDEN


@pytest.mark.parametrize("seed", few(["1", "0", "random"], 1))
def test_the_digest_is_the_same_in_every_process(seed: str) -> None:
    frame = msgspec.msgpack.encode(GRAPH).hex()
    code = (
        "import msgspec; from cudnn_actor.protocol import OperationGraph as G;"
        f"print(msgspec.msgpack.decode(bytes.fromhex('{frame}'), type=G).digest())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == GRAPH.digest()


@given(st.integers(0, 2**32))
def test_uids_names_and_the_order_of_tensors_do_not_count(seed: int) -> None:
    other = shuffled(GRAPH, seed)
    assert other.digest() == GRAPH.digest()
    names = {t.uid: t for t in other.tensors}
    places = [(names[uid].dims, names[uid].strides) for uid in other.bound]
    assert places == [(GRAPH.tensor(uid).dims, GRAPH.tensor(uid).strides) for uid in GRAPH.bound]


def sums(*operands: tuple[int, int]) -> OperationGraph:
    """Additions of two inputs, 0 and 1, and of earlier sums, 2, 3, ...; all tensors look the same."""
    operations = tuple(
        Pointwise(mode=PointwiseMode.ADD, operands=pair, result=2 + number)
        for number, pair in enumerate(operands)
    )
    tensors = tuple(
        GraphTensor(uid=u, dims=(1,), strides=(1,), dtype=DType.FLOAT32) for u in range(2 + len(operands))
    )
    return OperationGraph(tensors=tensors, operations=operations)


def test_wiring_counts() -> None:
    graphs = [
        sums((0, 1), (0, 1)),
        sums((0, 1), (1, 0)),
        sums((0, 1), (2, 1)),
        sums((0, 1), (2, 0)),
        sums((0, 1), (2, 2)),
    ]
    assert len({graph.digest() for graph in graphs}) == len(graphs)


def test_the_order_of_the_operations_counts_although_the_result_is_the_same() -> None:
    graph = sums((0, 0), (1, 1), (2, 3))
    first, second, last = graph.operations
    other = replace(graph, operations=(second, first, last))
    assert other.digest() != graph.digest()


@given(st.data())
def test_any_change_of_a_tensor_changes_the_digest(data: st.DataObject) -> None:
    overwritten = {tensor.overwrites for tensor in GRAPH.tensors}  # a result must be like what it overwrites
    others = [n for n, t in enumerate(GRAPH.tensors) if t.overwrites is None and t.uid not in overwritten]
    at = data.draw(st.sampled_from(others))
    tensor = GRAPH.tensors[at]
    field = data.draw(st.sampled_from(["dims", "strides", "dtype", "alignment"]))
    old = getattr(tensor, field)
    if isinstance(old, tuple):
        axis = data.draw(st.integers(0, len(old) - 1))
        new: object = (*old[:axis], old[axis] + data.draw(st.integers(1, 100)), *old[axis + 1 :])
    else:
        choices: list[object] = list(DType) if field == "dtype" else [16, 32, 64, 128, 256]
        new = data.draw(st.sampled_from([choice for choice in choices if choice != old]))
    changed = msgspec.structs.replace(tensor, **{field: new})
    tensors = (*GRAPH.tensors[:at], changed, *GRAPH.tensors[at + 1 :])
    assert replace(GRAPH, tensors=tensors).digest() != GRAPH.digest()


def test_a_tensors_role_counts() -> None:
    at, tensor = next((i, t) for i, t in enumerate(GRAPH.tensors) if t.role is TensorRole.SCALAR)
    bound = msgspec.structs.replace(tensor, role=TensorRole.BOUND)
    tensors = (*GRAPH.tensors[:at], bound, *GRAPH.tensors[at + 1 :])
    assert replace(GRAPH, tensors=tensors).digest() != GRAPH.digest()


@pytest.mark.parametrize(
    "numerics", [Numerics(), Numerics(deterministic=True), Numerics(tf32=True, prefer=("eng1",))]
)
def test_numerics_count(numerics: Numerics) -> None:
    assert replace(GRAPH, numerics=numerics).digest() != GRAPH.digest()


CONVS = [
    ConvSpec.symmetric(2, pad=1),
    ConvSpec.symmetric(2, pad=2),
    ConvSpec.symmetric(2, pad=(1, 2)),
    ConvSpec.symmetric(2, pad=(2, 1)),
    ConvSpec.symmetric(2, pad=1, stride=2),
    ConvSpec.symmetric(2, pad=1, dilation=2),
    ConvSpec.symmetric(2, pad=1, groups=2),
    ConvSpec(pre_padding=(1, 1), post_padding=(2, 1), stride=(1, 1), dilation=(1, 1)),
    ConvSpec(pre_padding=(2, 1), post_padding=(1, 1), stride=(1, 1), dilation=(1, 1)),
]


def one_conv(conv: ConvSpec, x: int = 0, w: int = 1) -> str:
    tensors = tuple(GraphTensor(uid=u, dims=(1,), strides=(1,), dtype=DType.FLOAT32) for u in range(3))
    operation = ConvolutionForward(x=x, w=w, y=2, conv=conv)
    return OperationGraph(tensors=tensors, operations=(operation,)).digest()


def test_every_parameter_of_a_convolution_counts() -> None:
    digests = [one_conv(conv) for conv in CONVS]
    assert len(set(digests)) == len(digests)


def test_which_operand_is_which_counts() -> None:
    small, large = (
        GraphTensor(uid=u, dims=(n,), strides=(1,), dtype=DType.INT8) for u, n in ((0, 1), (1, 2))
    )
    result = GraphTensor(uid=2, dims=(1,), strides=(1,), dtype=DType.INT8)
    digests = {
        OperationGraph(
            tensors=(small, large, result),
            operations=(ConvolutionForward(x=x, w=w, y=2, conv=CONVS[0]),),
        ).digest()
        for x, w in ((0, 1), (1, 0))
    }
    assert len(digests) == 2


def elu(parameter: float | None, mode: PointwiseMode = PointwiseMode.ELU) -> str:
    tensors = tuple(GraphTensor(uid=u, dims=(1,), strides=(1,), dtype=DType.FLOAT32) for u in range(2))
    operation = Pointwise(mode=mode, operands=(0,), result=1, parameter=parameter)
    return OperationGraph(tensors=tensors, operations=(operation,)).digest()


@given(st.floats(), st.floats())
def test_a_parameter_counts_by_its_bits(one: float, other: float) -> None:
    same_bits = struct.pack("<d", one) == struct.pack("<d", other)
    assert (elu(one) == elu(other)) is same_bits


def test_zero_and_minus_zero_nothing_and_nan_all_differ() -> None:
    digests = {elu(parameter) for parameter in (0.0, -0.0, None, float("nan"), 1.0)}
    assert len(digests) == 5
    assert elu(float("nan")) == elu(float("nan"))
    assert elu(None) != elu(None, PointwiseMode.RELU)


def test_attributes_and_dims_that_are_equal_have_the_digests_of_what_they_are() -> None:
    """Their encodings are kept: what compares equal must not find another's."""

    def digest(**of: object) -> str:
        clip = Pointwise(mode=PointwiseMode.CLIP, operands=(0,), result=1, **of)  # type: ignore[arg-type]
        tensors = tuple(
            GraphTensor(uid=uid, dims=(1, 2), strides=(2, 1), dtype=DType.FLOAT32) for uid in (0, 1)
        )
        return OperationGraph(tensors=tensors, operations=(clip,)).digest()

    found = [digest(lower=lower, upper=4.0) for lower in (0.0, -0.0, 1.0, 1, True)]
    assert len({*found}) == len(found)
    assert found == [digest(lower=lower, upper=4.0) for lower in (0.0, -0.0, 1.0, 1, True)]


def test_tensors_that_are_equal_have_the_digests_of_what_they_are() -> None:
    """Their encodings are kept, too."""

    def digest(**of: object) -> str:
        fields = {"dims": (1, 2), "strides": (2, 1), "dtype": DType.FLOAT32, "alignment": 1, **of}
        tensors = tuple(GraphTensor(uid=uid, **fields) for uid in (0, 1))  # type: ignore[arg-type]
        identity = Pointwise(mode=PointwiseMode.IDENTITY, operands=(0,), result=1)
        return OperationGraph(tensors=tensors, operations=(identity,)).digest()

    changes: list[dict[str, object]] = [{"alignment": 1}, {"alignment": True}, {"alignment": 1.0}]
    changes += [{"dims": (True, 2)}, {"dims": (1.0, 2)}, {"strides": (2, True)}, {"strides": (2.0, 1)}]
    found = [digest(**of) for of in changes]
    assert len({*found}) == len(found)
    assert found == [digest(**of) for of in changes]


@pytest.mark.parametrize("wrong", [{"role": ["virtual"]}, {"alignment": [16]}, {"dtype": ["float32"]}])
def test_a_tensor_with_a_field_of_a_wrong_type_has_a_digest(wrong: dict[str, object]) -> None:
    """Whoever runs the graph says what is wrong with it."""
    tensors = (msgspec.structs.replace(GRAPH.tensors[0], **wrong), *GRAPH.tensors[1:])
    assert replace(GRAPH, tensors=tensors).digest() != GRAPH.digest()
