"""What a plan of the CUDA engine says about itself: put together here, as far as that needs no device."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.base import EngineFailure, blame, blamed_operations
from cudnn_actor.engines.cuda.kernels.elementwise import Elementwise
from cudnn_actor.engines.cuda.library.failures import translate_failures
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS
from cudnn_actor.engines.cuda.planning.compiler import in_pieces, possible_plans
from cudnn_actor.engines.cuda.planning.composition import compose, scratch_bytes
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.partition import Cut, cut
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.planning.steps import finish
from cudnn_actor.engines.cuda.running import explaining
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.recipe import (
    Buffer,
    GraphStep,
    KernelStep,
    OperationStep,
    Scratch,
    Tuning,
)
from cudnn_actor.protocol import DType, Explanation, Graph, GraphBuilder, OperationGraph, OutOfMemory, Tuned
from cudnn_actor.protocol.errors import UnsupportedGraph
from cudnn_actor.protocol.operations import OPERATIONS, Cumulative, MatMul, Movement, Pointwise

REASON = "cuDNN has no engine for it"


def layers() -> Graph:
    """A product with a function behind it, equal running sums, a view, and functions alone."""
    g = GraphBuilder()
    x, w = g.input("x", (8, 16)), g.input("w", (16, 16))
    h = g.relu(x @ w)
    h = g.cumsum(h, 1)
    h = g.cumsum(h, 1)
    h = h.reshape(8, 4, 4)
    return g.build(y=g.exp(h) * 2.0)


def pieces_of(graph: Graph) -> Cut:
    parts = cut(graph.body)
    assert parts is not None
    return parts


def made(piece: OperationGraph) -> CudaPlan:
    """A plan of that shape: a graph of cuDNN's, a kernel of an operation's own, or generated kernels."""
    first = piece.operations[0]
    if isinstance(first, Pointwise | Movement):
        return compile_split(piece, None, None).instead_of([REASON, REASON])
    sources = tuple(Buffer(number) for number in range(len(piece.bound)))
    if isinstance(first, MatMul):
        return finish(piece, [GraphStep("eng7_k24=21", 512, (1, 2, 3), sources)], [], 0, None)
    step = OperationStep(first, tuple(map(piece.tensor, piece.bound)), (*sources, Scratch(0, 4096)), "kernel")
    return finish(piece, [step], [], 4096, None)


def explained(graph: Graph) -> Explanation:
    return compose(graph.body, pieces_of(graph), made).explain(graph.body)


def test_every_operation_is_in_one_piece_or_a_view() -> None:
    graph, found = layers(), explained(layers())
    inside = [number for piece in found.pieces for number in piece.operations]
    views = [n for n in range(len(graph.body.operations)) if n not in inside]
    assert len(inside) == len(set(inside))
    assert [graph.body.operations[number].kind for number in views] == ["reshape"]
    assert [view.split()[0] for view in found.views] == ["reshape"]


def test_a_piece_says_what_runs_what_is_fused_and_why() -> None:
    product, total, again, functions = explained(layers()).pieces
    assert [label.split()[0] for label in product.labels] == ["matmul", "relu"]
    assert (product.steps, product.why, product.workspace) == (("cuDNN eng7_k24=21",), (), 512)
    assert (total.steps, total.workspace) == (("kernel of cumulative",), 4096)
    assert total.plan == again.plan
    assert total.labels != again.labels
    assert (functions.steps, functions.why) == (("generated kernel",), (REASON,))
    assert [label.split()[0] for label in functions.labels] == ["exp", "mul"]
    assert "test_explaining.py:" in functions.labels[0]


def test_what_lies_between_pieces_is_told_with_the_memory_that_it_shares() -> None:
    graph = layers()
    plan = compose(graph.body, pieces_of(graph), made)
    found = plan.explain(graph.body)
    assert [(one.first, one.last, one.label.split()[0]) for one in found.scratch] == [
        (0, 1, "relu"),
        (1, 2, "sum"),
        (2, 3, "sum"),
    ]
    assert found.scratch[0].offset == found.scratch[2].offset != found.scratch[1].offset
    assert found.scratch_bytes == 2 * found.scratch[0].nbytes == scratch_bytes(pieces_of(graph))
    assert found.workspace == plan.workspace >= found.scratch_bytes + 4096 + 512
    for words in (
        "matmul at ",
        "kernel of cumulative",
        f"because {REASON}",
        "views: reshape",
        "pieces 0 to 1: relu at ",
    ):
        assert words in str(found)


def test_a_stored_plan_explains_itself_as_the_one_that_was_built() -> None:
    graph = layers()
    plan = compose(graph.body, pieces_of(graph), made)
    steps = tuple(step for step in plan.recipe.steps if not isinstance(step, GraphStep))
    parts = tuple(
        msgspec.structs.replace(part, steps=part.steps * bool(n)) for n, part in enumerate(plan.recipe.parts)
    )
    alone = CudaPlan(msgspec.structs.replace(plan.recipe, steps=steps, parts=parts), ())  # without cuDNN's
    data = CudaBuilder(0).export(alone)
    assert data is not None
    assert CudaBuilder(0).restore(graph.body, data).explain(graph.body) == alone.explain(graph.body)


def test_an_equal_graph_of_other_lines_has_its_own_labels() -> None:
    first, second = (
        layers(),
        msgspec.msgpack.decode(layers().encoded.replace(b"relu at", b"relu AT"), type=Graph),
    )
    plan = compose(first.body, pieces_of(first), made)
    assert first.body.digest() == second.body.digest()
    assert plan.explain(first.body).pieces[0].labels[1].startswith("relu at ")
    assert plan.explain(second.body).pieces[0].labels[1] == "relu"


def test_a_tuned_or_unchecked_piece_says_so() -> None:
    graph = layers()

    def tuned(piece: OperationGraph) -> CudaPlan:
        plan = made(piece)
        changes = (
            {"tuning": Tuning(20.0, 10.0, 5, (), instead_of="eng7")}
            if isinstance(piece.operations[0], Cumulative)
            else {"checked": False}
        )
        return CudaPlan(msgspec.structs.replace(plan.recipe, **changes), ())

    found = compose(graph.body, pieces_of(graph), tuned).explain(graph.body)
    assert [piece.checked for piece in found.pieces] == [False, True, True, False]
    assert not found.checked
    assert [piece.measured is not None for piece in found.pieces] == [False, True, True, False]
    for words in (
        "NOT CHECKED",
        "no room for the self-check",
        "tuned: 10.0 us, the first choice 20.0 us, of 5; it was eng7",
    ):
        assert words in str(found)


def test_what_tuning_has_gained_in_all_and_how_long_it_took_is_told() -> None:
    graph = layers()
    plan = compose(graph.body, pieces_of(graph), made)
    whole = Tuning(340.0, 300.0, 60, (), took_s=41.5)
    found = CudaPlan(msgspec.structs.replace(plan.recipe, tuning=whole), ()).explain(graph.body)
    assert found.tuned == Tuned(heuristic_us=340.0, tuned_us=300.0, took_s=41.5)
    assert "tuned in 41.5 s: 300.0 us a run, 340.0 us by the first choices; 0 pieces changed" in str(found)
    assert plan.explain(graph.body).tuned is None


def test_a_plan_in_one_piece_is_explained_too() -> None:
    g = GraphBuilder()
    graph = g.build(y=g.input("x", (4, 4)) * g.input("z", (4, 4)))
    assert cut(graph.body) is None
    plan = compile_split(graph.body, None, None)
    found = CudaPlan(msgspec.structs.replace(plan.recipe, checked=False), ()).explain(graph.body)
    (piece,) = found.pieces
    assert (piece.operations, piece.steps, piece.checked, found.views) == (
        (0,),
        ("generated kernel",),
        False,
        (),
    )


def test_every_operation_says_how_cuda_runs_it() -> None:
    assert set(OPERATIONS) - set(IMPLEMENTATIONS) == set(), "see cudnn_actor/engines/cuda/operations"


def test_every_launcher_has_a_name() -> None:
    launchers = {name for one in IMPLEMENTATIONS.values() for name in one.launchers}
    assert launchers == explaining.LAUNCHERS.keys()


def test_a_gather_in_a_kernel_is_not_told_what_others_are_for() -> None:
    g = GraphBuilder()
    rows = g.take(g.input("table", (9, 4)), g.input("n", (5,), "int64"), 0)
    refused: list[str] = []
    plan = next(possible_plans(g.build(y=g.relu(rows)).body, None, None, refused))
    assert isinstance(plan.recipe.steps[0], KernelStep)
    assert refused == []


def test_a_copy_is_no_kernel_of_functions() -> None:
    g = GraphBuilder()
    graph = g.build(y=g.input("x", (4, 6))[:, ::-1])
    (piece,) = compile_split(graph.body, None, None).explain(graph.body).pieces
    assert piece.steps == ("generated copy",)


def test_a_reshape_that_no_view_can_be_is_one_copy() -> None:
    """Of attention's heads, for example, which are side by side afterwards."""
    g = GraphBuilder()
    heads = g.input("x", (2, 4, 8, 16), "float16")
    graph = g.build(y=heads.transpose(0, 2, 1, 3).reshape(2, 8, 64))
    parts = pieces_of(graph)
    (piece,) = parts.pieces
    (step,) = compile_split(piece.graph, None, None).recipe.steps
    assert isinstance(step, KernelStep)
    assert step.sources == (Buffer(1), Buffer(0))
    kernel = step.kernel
    assert isinstance(kernel, Elementwise)
    assert kernel.results[0].dtype is DType.UINT64, "four elements at a time"
    x, y = np.arange(256), np.full(256, -1)
    for index in np.ndindex(kernel.dims):
        to, of = (sum(i * s for i, s in zip(index, steps, strict=True)) for steps in kernel.strides)
        y[to] = x[of]
    wanted = x.reshape(2, 4, 8, 4).transpose(0, 2, 1, 3).ravel()
    np.testing.assert_array_equal(y, wanted)


# Errors.


@pytest.mark.parametrize(
    "error", [EngineFailure("A", "b"), MemoryError("c"), RuntimeError("of a library")], ids=repr
)
def test_a_failure_while_a_piece_is_built_is_about_its_operations(error: Exception) -> None:
    graph = layers()

    def fails(piece: OperationGraph) -> CudaPlan:
        if isinstance(piece.operations[0], Cumulative):
            raise error
        return made(piece)

    with pytest.raises(type(error)) as caught:
        compose(graph.body, pieces_of(graph), fails)
    (number,) = blamed_operations(caught.value)
    assert graph.body.operations[number].kind == "cumulative"


@pytest.mark.parametrize(("own", "wanted"), [((), {"matmul", "relu"}), ((1,), {"relu"})])
def test_a_refusal_of_a_piece_is_about_the_operations_of_the_whole(own: Any, wanted: set[str]) -> None:
    graph = layers()

    def refuses(piece: OperationGraph) -> CudaPlan:
        raise UnsupportedGraph(engine="cuda", digest=piece.digest(), detail="no", operations=own)

    with pytest.raises(UnsupportedGraph) as caught:
        compose(graph.body, pieces_of(graph), refuses)
    assert {graph.body.label(number).split()[0] for number in caught.value.operations} == wanted


def test_scratch_over_the_limit_is_refused_before_any_piece_is_built() -> None:
    graph = layers()
    parts = pieces_of(graph)

    def never(_: OperationGraph) -> CudaPlan:
        raise AssertionError("a piece was built")

    with pytest.raises(OutOfMemory) as caught:
        in_pieces(graph.body, parts, scratch_bytes(parts) - 1, never)
    assert caught.value.limit == scratch_bytes(parts) - 1
    assert "sum at test_explaining.py:" in graph.body.where(caught.value.operations)


def test_workspace_over_the_limit_names_the_piece_that_needs_most() -> None:
    graph = layers()
    with pytest.raises(OutOfMemory) as caught:
        in_pieces(graph.body, pieces_of(graph), 4096, made)
    assert graph.body.where(caught.value.operations).startswith("sum at ")


class FailingGraph:
    """As far as a program wants one of the frontend's: its run fails."""

    def execute(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")


def test_a_step_that_fails_is_about_the_operations_of_its_piece() -> None:
    g = GraphBuilder()
    x, w = g.input("x", (8, 16)), g.input("w", (16, 16))
    graph = g.build(y=g.abs(x) @ w, z=g.relu(x @ w))
    plan = compose(graph.body, pieces_of(graph), made)
    steps = tuple(step for step in plan.recipe.steps if not isinstance(step, KernelStep))
    parts = tuple(part for part in plan.recipe.parts if len(part.operations) > 1 or part.workspace)
    recipe = msgspec.structs.replace(plan.recipe, steps=steps, parts=parts)
    good = type("Good", (), {"execute": lambda *_, **__: None})()
    program = Program(CudaPlan(recipe, (good, FailingGraph())), None, None, fast=False)
    with pytest.raises(RuntimeError) as caught:
        program.run((1, 2, 3, 4), (1, 2, 3, 4), (), 0)
    assert blamed_operations(caught.value) == parts[1].operations
    assert {graph.body.label(number).split()[0] for number in parts[1].operations} == {"matmul", "relu"}


def test_a_library_s_exception_keeps_its_operations_when_it_is_translated() -> None:
    class OfTheDriver(Exception):
        status = 2  # out of memory

    @translate_failures
    def runs() -> None:
        error = OfTheDriver()
        blame(error, (3, 4))
        raise error

    with pytest.raises(MemoryError) as caught:
        runs()
    assert blamed_operations(caught.value) == (3, 4)
