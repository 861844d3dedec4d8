"""Concatenation against NumPy's; how its kernels on CUDA copy; where pieces write their part themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_actor.engines.cuda.kernels.joined_kernels import Joined, joined_source
from cudnn_actor.engines.cuda.kernels.kernel import compile_run
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running.recipe import Buffer, KernelStep
from cudnn_actor.protocol import Concat, DType, Graph, GraphBuilder, InvalidRequest, Tensor, TensorSpec

from ...in_one_test import cases_in_one_test
from ...whole import some
from .. import host_cuda
from ..cuda.planning.test_partition import array_in, check, evaluated, filled
from ..differences import check_gradients, computed
from ..moved_graphs import CONCATENATED as GRAPHS
from ..workbench import Workbench, spread


def integers(dims: tuple[int, ...], dtype: DType, start: int = 0) -> np.ndarray:
    return (np.arange(np.prod(dims, dtype=int)) + start).reshape(dims).astype(dtype.numpy)


@cases_in_one_test
@pytest.mark.parametrize("dtype", DType)
def test_every_dtype_is_numpys(bench: Workbench, dtype: DType) -> None:
    arrays = [integers((2, size, 3), dtype, size) for size in (2, 1, 4)]
    y = bench.empty(TensorSpec.packed((2, 7, 3), dtype))
    operands = tuple(bench.place(array, spread(array.shape, dtype)) for array in arrays)
    operation = Concat(operands=operands, y=y, axis=-2)
    np.testing.assert_array_equal(bench.run(operation), np.concatenate(arrays, 1))


@given(st.data())
def test_any_dims(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 8))
    dims = data.draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank))
    axis = data.draw(st.integers(-rank, rank - 1))
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    arrays = {}
    for number, size in enumerate(sizes):
        dims[axis] = size
        arrays[f"x{number}"] = integers(tuple(dims), DType.INT16, number * 100)
    g = GraphBuilder()
    tensors = [g.input(name, array.shape, "int16") for name, array in arrays.items()]
    found = computed(g.build(y=g.concatenate(tensors, axis)), arrays)["y"]
    np.testing.assert_array_equal(found, np.concatenate([*arrays.values()], axis))


@pytest.mark.parametrize(
    ("dims", "dtypes", "axis", "field"),
    [
        ([(2, 3), (2, 4)], ("float32", "float32"), 0, "tensors[1]"),
        ([(2, 3), (3,)], ("float32", "float32"), 0, "tensors[1]"),
        ([(2, 3), (2, 3)], ("float32", "float16"), 0, "tensors[1]"),
        ([(2, 3)], ("float32",), 2, "axis"),
        ([()], ("float32",), 0, "axis"),
        ([], (), 0, "tensors"),
    ],
)
def test_what_does_not_fit_is_refused(dims: Any, dtypes: Any, axis: int, field: str) -> None:
    g = GraphBuilder()
    tensors = [g.input(f"x{n}", *each) for n, each in enumerate(zip(dims, dtypes, strict=True))]
    with pytest.raises(InvalidRequest) as caught:
        g.concatenate(tensors, axis)
    assert caught.value.field == field


def test_gradients() -> None:
    values = {
        name: np.random.default_rng(len(name)).uniform(-1, 1, (2, size)) for name, size in SIZES.items()
    }
    check_gradients(lambda g, a, b, c: g.concatenate((a, b * b, a, c), 1), values)
    check_gradients(lambda g, a, b, c: g.square(g.stack((a[:, 0], b[:, 1], c[:, 0]), 1)), values)


SIZES = {"a": 3, "b": 2, "c": 1}


# The kernels.


def steps_of(graph: Graph) -> list[KernelStep[Joined]]:
    found = []
    for step in compile_split(graph.body, None, None).recipe.steps:
        assert isinstance(step, KernelStep)
        assert isinstance(step.kernel, Joined)
        found.append(KernelStep(step.kernel, step.sources))
    return found


@pytest.fixture(scope="module")
def together() -> None:
    host_cuda.compile_together(
        joined_source(step.kernel.kernels) for graph in GRAPHS.values() for step in steps_of(graph)
    )


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.usefixtures("together")
def test_the_kernels_of_cuda_copy_every_element(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host_cuda.use(monkeypatch)
    graph = GRAPHS[name]
    wanted, memories = filled(graph), filled(graph)
    tensors = [graph.body.tensor(uid) for uid in graph.body.bound]
    evaluated(graph.body, [array_in(memory, tensor) for memory, tensor in zip(wanted, tensors, strict=True)])
    steps = steps_of(graph)
    assert len(steps) == 1 or name == "many", "one launch"
    for step in steps:
        pointers = []
        for source in step.sources:
            assert isinstance(source, Buffer)
            pointers.append(memories[source.number].ctypes.data + source.offset)
        compile_run(step.kernel.launches())(pointers, ())
    for expected, found in zip(wanted, memories, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_copies_are_vectorised_and_their_arguments_fit() -> None:
    together = {
        name: [
            kernel.together * kernel.results[0].dtype.itemsize for kernel in steps_of(graph)[0].kernel.kernels
        ]
        for name, graph in GRAPHS.items()
    }
    assert together["rows"] == [16, 16, 16]
    assert together["channels last"] == [16, 16]
    for step in steps_of(GRAPHS["many"]):
        count = sum(1 + len(kernel.strides) + len(kernel.numbers) for kernel in step.kernel.kernels)
        assert 8 * count <= 4096


# Pieces.

Build = Callable[[GraphBuilder, Tensor, Tensor], Any]
PIECES: dict[str, tuple[Build, list[str]]] = {
    "all are written": (lambda g, a, b: g.concatenate((a * 2.0, b + 1.0)), ["pointwise", "pointwise"]),
    "one is copied": (lambda g, a, b: g.concatenate((g.relu(a), b)), ["pointwise", "concat"]),
    "neighbours are copied together": (
        lambda g, a, b: g.concatenate((a, b, g.relu(a), b)),
        ["pointwise", "concat", "concat"],
    ),
    "of one twice": (lambda g, a, b: g.concatenate([a * 2.0] * 2), ["pointwise", "concat"]),
    "columns": (lambda g, a, b: g.concatenate((a * 2.0, b + 1.0), 1), ["pointwise", "pointwise"]),
    "misaligned": (
        lambda g, a, b: g.concatenate((a[:, :3] * 2.0, b + 1.0), 1),
        ["pointwise", "pointwise", "concat"],
    ),
    "product": (lambda g, a, b: g.concatenate((a @ b, b), 1), ["matmul", "concat"]),
    "read twice": (
        lambda g, a, b: (g.concatenate((s := g.relu(a), b), 1), g.cumsum(s, 0)),
        ["pointwise", "concat", "cumulative"],
    ),
    "read behind it": (
        lambda g, a, b: g.cumsum(g.concatenate((a * 2.0, b + 1.0)), 0) * 2.0,
        ["pointwise", "pointwise", "cumulative", "pointwise"],
    ),
    "a part of another": (
        lambda g, a, b: g.concatenate((g.concatenate((a * 2.0, b)), b * 3.0)),
        ["pointwise", "concat", "pointwise", "concat"],
    ),
    "seen from elsewhere": (
        lambda g, a, b: g.cumsum(g.concatenate((a * 2.0, b)).T, 0),
        ["pointwise", "concat", "cumulative"],
    ),
}


@cases_in_one_test
@pytest.mark.parametrize("name", PIECES)
def test_pieces_write_their_part_of_the_result_where_they_can(name: str) -> None:
    build, kinds = PIECES[name]
    g = GraphBuilder()
    made = build(g, g.input("a", (4, 4)), g.input("b", (4, 4)))
    outputs = made if isinstance(made, tuple) else (made,)
    parts = check(g.build({f"y{number}": y for number, y in enumerate(outputs)}))
    assert [piece.graph.operations[0].kind for piece in parts.pieces] == kinds


@given(st.data())
@settings(max_examples=some(40))
def test_any_concatenations_in_pieces(data: st.DataObject) -> None:
    g = GraphBuilder()
    known = [g.input("a", (4, 4)), g.input("b", (4, 8))]
    for _ in range(data.draw(st.integers(1, 5))):
        x, y = (data.draw(st.sampled_from(known)) for _ in range(2))
        match data.draw(st.sampled_from(("relu", "turn", "sum", "rows", "columns"))):
            case "relu":
                known.append(g.relu(x))
            case "turn":
                known.append(x.T[:4, :4])
            case "sum":
                known.append(g.cumsum(x, 1))
            case "rows" if x.dims[1] == y.dims[1]:
                known.append(g.concatenate((x, y))[:: data.draw(st.integers(1, 2))][:4])
            case _ if x.dims[0] == y.dims[0]:
                known.append(g.concatenate((x, y), 1)[:, : data.draw(st.sampled_from((4, 8)))])
    outputs = {f"y{number}": x for number, x in enumerate(known[2:])} or {"y": g.relu(known[0])}
    graph = g.build(outputs)
    if cut(graph.body) is not None:
        check(graph)


def test_a_result_that_overwrites_is_only_written_by_its_own_copy() -> None:
    g = GraphBuilder()
    a, b = g.input("a", (4, 4)), g.input("b", (2, 4))
    check(g.build(updates={"a": g.concatenate((b * 2.0, a[:2]))}, y=g.cumsum(a, 0)))


def test_parts_lie_in_the_order_of_the_operands() -> None:
    """Of every order: the starts follow from the sizes before."""
    for sizes in itertools.permutations((1, 2, 4)):
        operation = Concat(operands=(0, 1, 2), y=3, axis=0)
        assert operation.starts([(size, 8) for size in sizes]) == [0, sizes[0], sizes[0] + sizes[1]]
