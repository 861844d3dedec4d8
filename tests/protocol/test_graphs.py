"""Operation graphs: order, and what is malformed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from cudnn_actor.protocol import (
    DType,
    GraphBuilder,
    GraphTensor,
    InvalidRequest,
    MatMul,
    Node,
    Numerics,
    OperationGraph,
    Pointwise,
    PointwiseMode,
    TensorRole,
    TensorSpec,
)


def tensor(uid: int, role: TensorRole = TensorRole.BOUND) -> GraphTensor:
    return GraphTensor(uid=uid, dims=(1,), strides=(1,), dtype=DType.FLOAT32, role=role)


def add(result: int, *operands: int) -> Pointwise[int]:
    return Pointwise(mode=PointwiseMode.ADD, operands=operands, result=result)


def graph(tensors: list[GraphTensor], operations: Sequence[Node]) -> OperationGraph:
    return OperationGraph(tensors=tuple(tensors), operations=tuple(operations))


MALFORMED = {
    "a cycle": ([tensor(0), tensor(1)], [add(0, 1), add(1, 0)], "operations", "is read before it is written"),
    "an operation on its own output": (
        [tensor(0)],
        [add(0, 0)],
        "operations",
        "is read before it is written",
    ),
    "a cycle beside good ones": (
        [tensor(n) for n in range(4)],
        [add(1, 0), add(2, 3), add(3, 2)],
        "operations",
        "is read before it is written",
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
    tensors: list[GraphTensor], operations: list[Pointwise[int]], field: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match="correct the graph") as caught:
        graph(tensors, operations)
    assert caught.value.field == field
    assert problem in caught.value.problem


@given(st.permutations(range(1, 6)))
def test_a_graph_is_declared_in_the_order_in_which_it_runs(order: list[int]) -> None:
    operations = [add(n, n - 1) for n in order]  # a chain
    if order == sorted(order):
        assert graph([tensor(n) for n in range(6)], operations).operations == tuple(operations)
        return
    with pytest.raises(InvalidRequest, match="read before it is written"):
        graph([tensor(n) for n in range(6)], operations)


def overwriting(uid: int, before: int, **changes: Any) -> GraphTensor:
    return msgspec.structs.replace(tensor(uid), overwrites=before, **changes)


def test_a_graph_that_overwrites_what_it_reads_is_not_pure() -> None:
    assert graph([tensor(0), tensor(1)], [add(1, 0)]).pure
    overwrites = graph([tensor(0), overwriting(1, 0)], [add(1, 0)])
    assert not overwrites.pure
    assert overwrites.digest() != graph([tensor(0), tensor(1)], [add(1, 0)]).digest()


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ([tensor(0), overwriting(1, 7)], "must be a result and overwrite an input"),
        ([tensor(0), overwriting(1, 1)], "must be a result and overwrite an input"),
        ([overwriting(0, 1), tensor(1)], "must be a result and overwrite an input"),
        ([tensor(0, TensorRole.SCALAR), overwriting(1, 0)], "another spec"),
        ([tensor(0), overwriting(1, 0, dtype=DType.FLOAT64)], "another spec"),
    ],
)
def test_a_result_overwrites_an_input_of_its_own_spec_only(tensors: list[GraphTensor], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        graph(tensors, [add(1, 0)])


def test_only_functions_of_each_element_and_new_statistics_overwrite_an_input() -> None:
    """A sum of products would read elements that it has overwritten; cut into pieces, others would too."""
    tensors = [msgspec.structs.replace(tensor(uid), dims=(3, 3), strides=(3, 1)) for uid in range(4)]
    for before in (0, 1, 2):
        over = msgspec.structs.replace(tensors[3], overwrites=before)
        with pytest.raises(
            InvalidRequest, match="'matmul': overwrites an input, which only functions of each"
        ):
            graph([*tensors[:3], over, tensor(4)], [add(4, 2), MatMul(a=0, b=1, y=3)])


def test_what_is_overwritten_is_not_read_after_that() -> None:
    tensors = [tensor(0), overwriting(1, 0), tensor(2)]
    graph(tensors, [add(2, 0), add(1, 0)])
    with pytest.raises(InvalidRequest, match="reads what an operation before it overwrites"):
        graph(tensors, [add(1, 0), add(2, 0)])


def test_numerics_belong_to_the_graph() -> None:
    operation = msgspec.structs.replace(add(1, 0), numerics=Numerics())
    with pytest.raises(InvalidRequest, match="not to the graph"):
        graph([tensor(0), tensor(1)], [operation])


def test_bound_and_scalar_tensors_are_listed_in_canonical_order() -> None:
    tensors = [tensor(9), tensor(5, TensorRole.SCALAR), tensor(7, TensorRole.VIRTUAL), tensor(3)]
    made = graph(tensors, [add(7, 9, 5), add(3, 7, 9)])
    assert (made.bound, made.scalars) == ((9, 3), (5,))
    assert made.canonical_uids == {9: 0, 5: 1, 7: 2, 3: 3}
    assert made.tensor(7).role is TensorRole.VIRTUAL
    with pytest.raises(KeyError):
        made.tensor(4)


def test_a_graph_travels_as_bytes() -> None:
    made = graph([tensor(0), tensor(1)], [add(1, 0, 0)])
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=OperationGraph)
    assert again == made
    assert again.digest() == made.digest()


def test_numbers_are_drawn_only_for_operations_that_read_inputs() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 3), "float32")
    body = g.build(y=g.log(g.exp(g.log(x)))).body
    drawn: list[tuple[int, ...]] = []

    def draw(spec: TensorSpec) -> np.ndarray:
        drawn.append(spec.dims)
        return np.ones(spec.dims)

    assert [*body.samples(np, draw)] == [body.bound[0]]
    assert drawn == [(2, 3)]


def test_samples_without_dims_are_arrays() -> None:
    """NumPy's functions of such an array give a scalar, which cannot be rounded in place."""
    g = GraphBuilder()
    body = g.build(y=g.arccosh(g.input("x", (), "int64"))).body
    (values,) = body.samples(np, lambda spec: np.ones(spec.dims)).values()
    assert isinstance(values, np.ndarray)


@pytest.mark.parametrize("dims", [(True, 2), (1.0, 2), [1, 2]])
def test_a_spec_is_checked_also_after_one_that_is_equal_to_it(dims: Any) -> None:
    good = GraphTensor(uid=0, dims=(1, 2), strides=(2, 1), dtype=DType.FLOAT32)
    assert good.spec == TensorSpec.packed((1, 2))
    with pytest.raises(InvalidRequest):
        _ = msgspec.structs.replace(good, dims=dims).spec
    with pytest.raises(InvalidRequest):
        _ = msgspec.structs.replace(good, dtype="float32").spec
