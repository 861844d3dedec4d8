"""One meaning, one digest."""

from __future__ import annotations

import itertools
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
    Numerics,
    Operation,
    OperationGraph,
    Pointwise,
    PointwiseMode,
    TensorRole,
)
from cudnn_actor.protocol.lowering import lower

from .lowering_fixtures import forward, ref

GOLDEN = "e7eb331deffae0089fe75eff8f48d92f6ed8356d8b562ff9f361ab23965b65b6"
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


def renumbered(operation: Operation, uids: dict[int, int]) -> Operation:
    changes: dict[str, object] = {operation.writes: uids[operation.output]}
    for name in operation.reads:
        value = getattr(operation, name)
        changes[name] = tuple(uids[u] for u in value) if isinstance(value, tuple) else uids[value]
    return msgspec.structs.replace(operation, **changes)


def shuffled(graph: OperationGraph, seed: int) -> OperationGraph:
    """The same graph, written down differently: other uids, names and orders."""
    rng = random.Random(seed)
    fresh = rng.sample(range(-1_000, 1_000), len(graph.tensors))
    uids = {t.uid: new for t, new in zip(graph.tensors, fresh, strict=True)}
    tensors = [msgspec.structs.replace(t, uid=uids[t.uid], name=f"t{rng.random()}") for t in graph.tensors]
    operations = [renumbered(op, uids) for op in graph.operations]
    rng.shuffle(tensors)
    rng.shuffle(operations)
    return replace(graph, tensors=tuple(tensors), operations=tuple(operations))


def test_the_canonical_form_is_pinned() -> None:
    """A new digest orphans every stored plan: if the form must change, change "graph/1" with it."""
    assert GRAPH.digest() == GOLDEN


@pytest.mark.parametrize("seed", ["0", "1", "random"])
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
def test_uids_names_and_orders_do_not_count(seed: int) -> None:
    other = shuffled(GRAPH, seed)
    assert other.digest() == GRAPH.digest()
    names = {t.uid: t for t in other.tensors}
    places = [(names[uid].dims, names[uid].strides) for uid in other.bound]
    assert places == [(GRAPH.tensor(uid).dims, GRAPH.tensor(uid).strides) for uid in GRAPH.bound]


@st.composite
def look_alikes(draw: st.DrawFn, most: int = 5) -> OperationGraph:
    """Graphs of pointwise operations on tensors that all look the same, so that only wiring tells."""
    given_count = draw(st.integers(1, min(3, most)))
    operations: list[Operation] = []
    for result in range(given_count, given_count + draw(st.integers(1, most))):
        operands = draw(st.lists(st.integers(0, result - 1), min_size=1, max_size=2).map(tuple))
        mode = draw(st.sampled_from([PointwiseMode.ADD, PointwiseMode.MUL]))
        operations.append(Pointwise(mode=mode, operands=operands, result=result, compute=DType.FLOAT32))
    touched = {uid for op in operations for uid in (*op.inputs, op.output)}
    tensors = tuple(GraphTensor(uid=u, dims=(1,), strides=(1,), dtype=DType.FLOAT32) for u in sorted(touched))
    return OperationGraph(tensors=tensors, operations=tuple(operations))


@given(look_alikes(), st.integers(0, 2**32))
def test_tensors_that_look_alike_are_told_apart_by_their_place(graph: OperationGraph, seed: int) -> None:
    assert shuffled(graph, seed).digest() == graph.digest()


def rings(*sizes: int) -> OperationGraph:
    """Rings of look-alike tensors: each is added to the next, into a result of its own."""
    operations: list[Operation] = []
    for size in sizes:
        base = 2 * len(operations)
        for n in range(size):
            operands = (base + n, base + (n + 1) % size)
            operations.append(
                Pointwise(
                    mode=PointwiseMode.ADD, operands=operands, result=base + size + n, compute=DType.FLOAT32
                )
            )
    tensors = tuple(
        GraphTensor(uid=u, dims=(1,), strides=(1,), dtype=DType.FLOAT32) for u in range(2 * len(operations))
    )
    return OperationGraph(tensors=tensors, operations=tuple(operations))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sizes", [(3,), (2, 2), (6, 3, 3)], ids=str)
def test_mirror_images_do_not_let_the_written_order_through(sizes: tuple[int, ...], seed: int) -> None:
    assert shuffled(rings(*sizes), seed).digest() == rings(*sizes).digest()


def test_rings_of_the_same_parts_differ_by_how_they_close() -> None:
    assert rings(6).digest() != rings(3, 3).digest()


@given(look_alikes(most=2), look_alikes(most=2))
def test_equal_digests_mean_the_same_wiring(one: OperationGraph, other: OperationGraph) -> None:
    assert (one.digest() == other.digest()) is is_isomorphic(one, other)


def is_isomorphic(one: OperationGraph, other: OperationGraph) -> bool:
    """By trying every renumbering of tensors that all look the same."""
    if (len(one.tensors), len(one.operations)) != (len(other.tensors), len(other.operations)):
        return False
    olds, wanted = [t.uid for t in one.tensors], set(other.operations)
    return any(
        {renumbered(op, dict(zip(olds, news, strict=True))) for op in one.operations} == wanted
        for news in itertools.permutations(t.uid for t in other.tensors)
    )


@given(st.data())
def test_any_change_of_a_tensor_changes_the_digest(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(GRAPH.tensors) - 1))
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
    "numerics", [Numerics(), Numerics(deterministic=True), Numerics(tf32=True, deterministic=True)]
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


def one_conv(conv: ConvSpec, compute: DType = DType.FLOAT32, x: int = 0, w: int = 1) -> str:
    tensors = tuple(GraphTensor(uid=u, dims=(1,), strides=(1,), dtype=DType.FLOAT32) for u in range(3))
    operation = ConvolutionForward(x=x, w=w, y=2, conv=conv, compute=compute)
    return OperationGraph(tensors=tensors, operations=(operation,)).digest()


def test_every_parameter_of_a_convolution_counts() -> None:
    digests = [one_conv(conv) for conv in CONVS] + [one_conv(CONVS[0], DType.FLOAT64)]
    assert len(set(digests)) == len(digests)


def test_which_operand_is_which_counts() -> None:
    small, large = (
        GraphTensor(uid=u, dims=(n,), strides=(1,), dtype=DType.INT8) for u, n in ((0, 1), (1, 2))
    )
    result = GraphTensor(uid=2, dims=(1,), strides=(1,), dtype=DType.INT8)
    digests = {
        OperationGraph(
            tensors=(small, large, result),
            operations=(ConvolutionForward(x=x, w=w, y=2, conv=CONVS[0], compute=DType.INT32),),
        ).digest()
        for x, w in ((0, 1), (1, 0))
    }
    assert len(digests) == 2


def elu(parameter: float | None, mode: PointwiseMode = PointwiseMode.ELU) -> str:
    tensors = tuple(GraphTensor(uid=u, dims=(1,), strides=(1,), dtype=DType.FLOAT32) for u in range(2))
    operation = Pointwise(mode=mode, operands=(0,), result=1, compute=DType.FLOAT32, parameter=parameter)
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
