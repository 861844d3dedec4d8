"""Operation graphs: order, and what is malformed."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from cudnn_actor.protocol import (
    DType,
    GraphTensor,
    InvalidRequest,
    OperationGraph,
    Pointwise,
    PointwiseMode,
    TensorRole,
)


def tensor(uid: int, role: TensorRole = TensorRole.BOUND) -> GraphTensor:
    return GraphTensor(uid=uid, dims=(1,), strides=(1,), dtype=DType.FLOAT32, role=role)


def add(result: int, *operands: int) -> Pointwise:
    return Pointwise(mode=PointwiseMode.ADD, operands=operands, result=result, compute=DType.FLOAT32)


def graph(tensors: list[GraphTensor], operations: list[Pointwise]) -> OperationGraph:
    return OperationGraph(tensors=tuple(tensors), operations=tuple(operations))


MALFORMED = {
    "a cycle": ([tensor(0), tensor(1)], [add(0, 1), add(1, 0)], "operations", "depend on themselves"),
    "an operation on its own output": ([tensor(0)], [add(0, 0)], "operations", "depend on themselves"),
    "a cycle beside good ones": (
        [tensor(n) for n in range(4)],
        [add(1, 0), add(2, 3), add(3, 2)],
        "operations",
        "depend on themselves",
    ),
    "two writers": ([tensor(0), tensor(1)], [add(1, 0), add(1, 0)], "operations", "written twice"),
    "an unknown operand": ([tensor(0), tensor(1)], [add(1, 7)], "operations", "does not hold"),
    "an unknown result": ([tensor(0), tensor(1)], [add(7, 0)], "operations", "does not hold"),
    "a repeated uid": ([tensor(0), tensor(1), tensor(0)], [add(1, 0)], "tensors", "repeats a uid"),
    "an unwritten virtual": (
        [tensor(0, TensorRole.VIRTUAL), tensor(1)],
        [add(1, 0)],
        "tensors",
        "nothing writes it",
    ),
    "no operations": ([tensor(0)], [], "operations", "is empty"),
}


@pytest.mark.parametrize(
    ("tensors", "operations", "field", "problem"), MALFORMED.values(), ids=MALFORMED.keys()
)
def test_a_malformed_graph_is_refused(
    tensors: list[GraphTensor], operations: list[Pointwise], field: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match="correct the graph") as caught:
        graph(tensors, operations)
    assert caught.value.field == field
    assert problem in caught.value.problem


@given(st.integers(1, 8), st.randoms(use_true_random=False))
def test_each_operation_comes_after_those_it_reads(count: int, rng: random.Random) -> None:
    operations = [add(n, *(rng.randrange(n) for _ in range(2))) for n in range(1, count + 1)]
    rng.shuffle(operations)
    tensors = [tensor(n) for n in range(count + 1)]
    ordered = graph(tensors, operations).in_order()
    assert sorted(op.output for op in ordered) == list(range(1, count + 1))
    done = {0}
    for operation in ordered:
        assert done.issuperset(operation.inputs)
        done.add(operation.output)


def test_bound_and_scalar_tensors_are_listed_in_canonical_order() -> None:
    tensors = [tensor(9), tensor(5, TensorRole.SCALAR), tensor(7, TensorRole.VIRTUAL), tensor(3)]
    made = graph(tensors, [add(3, 7, 9), add(7, 9, 5)])
    assert (made.bound, made.scalars) == ((9, 3), (5,))
    assert made.canonical_uids() == {9: 0, 5: 1, 7: 2, 3: 3}
    assert made.tensor(7).role is TensorRole.VIRTUAL
    with pytest.raises(KeyError):
        made.tensor(4)


def test_a_graph_travels_as_bytes() -> None:
    made = graph([tensor(0), tensor(1)], [add(1, 0, 0)])
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=OperationGraph)
    assert again == made
    assert again.digest() == made.digest()
