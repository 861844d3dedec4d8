"""Plans of deployed models on CUDA: what is prepared of weights is prepared once, and again after a write."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cuda import engine as cuda
from cudnn_actor.engines.cuda.device.place import Place
from cudnn_actor.engines.cuda.operations.recurrent import Layers, LayerWeights
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.recurrent_layers import layered
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running import program
from cudnn_actor.engines.cuda.running.divided import divided
from cudnn_actor.engines.cuda.running.kept_values import KeptValues
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.recipe import Buffer, GraphStep, OperationStep, Part, Recipe, Scratch
from cudnn_actor.protocol import DType, Graph, GraphBuilder, OperationGraph, TensorSpec
from cudnn_actor.protocol.operations import GraphTensor, Pad

from . import host_cuda
from .test_recurrent_calls import Computing, library
from .test_recurrent_networks import Call, Network

__all__ = ["library"]

PAD = Pad[int](x=0, y=1, before=(0, 0), after=(0, 2), steps=(1, 1))
NARROW, WIDE = (
    GraphTensor(uid=uid, dims=dims, strides=(dims[1], 1), dtype=DType.FLOAT32)
    for uid, dims in ((0, (3, 6)), (1, (3, 8)))
)


def padding(source: Any, target: Any, *, prepares: bool = True) -> OperationStep:
    """A step that pads a tensor."""
    return OperationStep(PAD, (NARROW, WIDE), (source, target), "kernel", prepares)


def reading(*sources: Any) -> GraphStep:
    return GraphStep("eng", 0, tuple(range(len(sources))), sources)


# A recipe in two.


def test_steps_that_prepare_weights_alone_run_once() -> None:
    steps = (
        padding(Buffer(1), Scratch(0)),
        padding(Buffer(0), Scratch(256)),
        reading(Scratch(256), Scratch(0), Buffer(2)),
        padding(Buffer(1, 512), Scratch(0)),
        reading(Scratch(0), Buffer(2)),
        reading(Scratch(0), Buffer(2)),
    )
    parts = tuple(Part((n,), count, "tag", 0) for n, count in enumerate((3, 2, 1)))
    recipe = Recipe("tag", steps, 512, buffers=3, scalars=1, parts=parts)
    found = divided(recipe, {1})
    assert found is not None
    assert [(each.reads, each.nbytes) for each in found.kept] == [((1,), 96), ((1,), 96)]
    assert found.once.steps == (padding(Buffer(1), Buffer(3)), padding(Buffer(1, 512), Buffer(4)))
    assert found.each.steps == (
        padding(Buffer(0), Scratch(256)),
        reading(Scratch(256), Buffer(3), Buffer(2)),
        reading(Buffer(4), Buffer(2)),
        reading(Scratch(0), Buffer(2)),  # of another part, in which the place has another tensor
    )
    assert [part.steps for part in found.each.parts] == [2, 1, 1]
    assert (found.once.buffers, found.each.buffers) == (5, 5)
    assert [part.steps for part in found.once.parts] == [1, 1, 0]
    assert (found.once.scalars, found.each.scalars, found.each.workspace) == (1, 1, recipe.workspace)


def test_other_steps_run_each_time() -> None:
    steps = (
        padding(Buffer(1), Scratch(0), prepares=False),
        padding(Scratch(0), Scratch(256)),
        reading(Scratch(256), Buffer(0)),
    )
    recipe = Recipe("tag", steps, 512, buffers=2, scalars=0, parts=(Part((0,), 3, "tag", 0),))
    assert divided(recipe, {0, 1}) is None


# Runs of it.


class Stream(host_cuda.Stream):
    """A stream that cannot capture."""

    def begin_capture(self, _mode: int) -> None:
        """Begin nothing."""

    def end_capture(self) -> None:
        """Say that it was not captured."""
        raise RuntimeError("not here")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A CUDA engine that runs kernels on the host."""
    host_cuda.use(monkeypatch)
    found: Any = cuda.CudaEngine()
    found.stream, found._pool = Stream(), host_cuda.MemoryPool()
    found._handle = None
    room = np.zeros(4096, np.uint8)
    found._workspace = SimpleNamespace(pointer=room.ctypes.data, nbytes=room.nbytes, owner=room)
    runtime = SimpleNamespace(streamCaptureModeThreadLocal=1, memGetInfo=lambda: (4096, 1 << 20))
    for module in (cuda, program):
        monkeypatch.setattr(module, "libraries", lambda: SimpleNamespace(runtime=runtime))
    yield found
    found.stream = None


class OnHost(Place):
    """An array on the host as a place of the engine."""

    def __init__(self, array: np.ndarray) -> None:
        self.owner = array
        self.pointer = array.ctypes.data
        self.spec = TensorSpec.packed(array.shape)


class Buffers:
    """A graph's buffers."""

    def __init__(self, seed: int, **dims: tuple[int, ...]) -> None:
        rng = np.random.default_rng(seed)
        self.arrays = {name: rng.normal(size=each).astype(np.float32) for name, each in dims.items()}
        self.places = {name: OnHost(array) for name, array in self.arrays.items()}

    def with_other(self, **dims: tuple[int, ...]) -> Buffers:
        """The same ones, but for some."""
        found = Buffers(1, **dims)
        found.arrays = self.arrays | found.arrays
        found.places = self.places | found.places
        return found


def padded_sum(rows: int = 3) -> Graph:
    """A weight with zeros behind it, and an input."""
    g = GraphBuilder()
    x, w = g.input("x", (rows, 3, 8)), g.input("w", (3, 6))
    return g.build(y=x + g.pad(w, [(0, 0), (0, 2)]))


def plan_of(graph: Graph) -> CudaPlan:
    """A plan in which the weight is prepared by a step of its own."""
    plan = compile_split(graph.body, None, None, choice=1)
    steps = tuple(
        msgspec.structs.replace(step, prepares=True) if isinstance(step, OperationStep) else step
        for step in plan.recipe.steps
    )
    assert steps != plan.recipe.steps
    return CudaPlan(msgspec.structs.replace(plan.recipe, steps=steps), plan.graphs)


def expected(engine: Any, graph: Graph, plan: CudaPlan, buffers: Buffers) -> Callable[[], None]:
    """What the engine expects, of a graph whose weight keeps its values."""
    names = {graph.ports[place].uid: name for name, place in graph.places.items()}
    of_w = [names[uid] for uid in graph.body.bound].index("w")
    assert engine.keeps(plan, [of_w]) == {of_w}
    places = [buffers.places[names[uid]] for uid in graph.body.bound]
    run: Callable[[], None] = engine.expect(plan, places, (), [of_w])
    return run


def check(buffers: Buffers, w: np.ndarray) -> None:
    wide = np.pad(w, ((0, 0), (0, 2)))
    np.testing.assert_array_equal(buffers.arrays["y"], buffers.arrays["x"] + wide)


def test_weights_are_prepared_before_the_first_run_and_again_after_a_write(engine: Any) -> None:
    graph = padded_sum()
    plan, buffers = plan_of(graph), Buffers(0, x=(3, 3, 8), w=(3, 6), y=(3, 3, 8))
    run = expected(engine, graph, plan, buffers)
    before = buffers.arrays["w"].copy()
    for _ in range(6):
        buffers.arrays["x"] += 1.0
        run()
        check(buffers, before)
    buffers.arrays["w"] += 1.0
    run()
    check(buffers, before)  # it reads what is kept: nobody has told the engine
    later = expected(engine, graph, plan, buffers)
    later()
    check(buffers, buffers.arrays["w"])


def test_plans_of_other_sizes_share_what_is_kept_until_the_weight_is_gone(engine: Any) -> None:
    buffers = Buffers(0, x=(3, 3, 8), w=(3, 6), y=(3, 3, 8))
    other = buffers.with_other(x=(5, 3, 8), y=(5, 3, 8))
    runs = []
    for rows, each in ((3, buffers), (5, other)):
        graph = padded_sum(rows)
        runs.append(expected(engine, graph, plan_of(graph), each))
        runs[-1]()
        check(each, buffers.arrays["w"])
    assert engine.converted_bytes == 4 * 3 * 8
    del runs, buffers, other, each
    gc.collect()
    assert engine.converted_bytes == 0


def test_parts_of_one_buffer_are_kept_apart(engine: Any) -> None:
    steps = padding(Buffer(0), Scratch(0)), padding(Buffer(0, 256), Scratch(256)), reading(Scratch(0))
    recipe = Recipe("tag", steps, 512, buffers=1, scalars=0, parts=(Part((0,), 3, "tag", 0),))
    found, buffers = divided(recipe, {0}), Buffers(0, w=(64, 6))
    assert found is not None
    values = KeptValues(engine._allocate)
    memory = values.of(found.kept, [buffers.places["w"]])
    assert memory is not None
    assert len({each.ptr for each in memory}) == 2
    assert values.of(found.kept, [buffers.places["w"]]) == memory


@pytest.mark.parametrize("free", [0, 4 * 96 - 1])
def test_what_does_not_fit_is_prepared_in_each_run(
    engine: Any, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    runtime = SimpleNamespace(memGetInfo=lambda: (free, 1 << 20))
    monkeypatch.setattr(cuda, "libraries", lambda: SimpleNamespace(runtime=runtime))
    graph = padded_sum()
    buffers = Buffers(0, x=(3, 3, 8), w=(3, 6), y=(3, 3, 8))
    run = expected(engine, graph, plan_of(graph), buffers)
    for _ in range(2):
        buffers.arrays["w"] += 1.0
        run()
        check(buffers, buffers.arrays["w"])
    assert engine.converted_bytes == 0


def test_a_run_that_fails_before_it_has_prepared_is_prepared_again(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = padded_sum()
    buffers = Buffers(0, x=(3, 3, 8), w=(3, 6), y=(3, 3, 8))
    run = expected(engine, graph, plan_of(graph), buffers)
    with monkeypatch.context() as broken:
        broken.setattr(Program, "_launch", lambda *_: (_ for _ in ()).throw(MemoryError))
        with contextlib.suppress(MemoryError):
            run()
    run()
    check(buffers, buffers.arrays["w"])


# Recurrent layers.


@pytest.mark.parametrize("first", range(0, 120, 60))
def test_layers_read_what_their_weights_were_brought_into_once(library: Computing, first: int) -> None:
    tried = 0
    for seed in range(first, first + 60):
        print(f"Network({seed})")  # noqa: T201 - shown if it fails
        body = Network(seed).graph().body
        parts = cut(body)
        for piece in () if parts is None else (each.graph for each in parts.pieces):
            if isinstance(layered(piece)[0], LayerWeights):
                tried += check_layers(library, piece, seed)
    assert tried > 5


def check_layers(library: Computing, piece: OperationGraph, seed: int) -> bool:
    """Run a piece twice, with other inputs the second time and other numbers where its weights were.

    Returns whether its weights are prepared: they may be tensors that something computes.
    """
    weights, layers = layered(piece)
    assert isinstance(layers, Layers)
    places = {piece.bound.index(uid) for uid in weights.reads if uid in piece.bound}
    handle = SimpleNamespace(backend_handle=9)
    plan = compile_split(piece, handle, None)
    found = plan.divided(frozenset(places))
    if found is None or not all(isinstance(step, OperationStep) for step in found.each.recipe.steps):
        return False
    library.memory.clear(seed)
    dims = [piece.tensor(uid).dims for uid in piece.bound]
    kept = [library.memory.place(each.nbytes) for each in found.kept]
    at = [*(library.memory.place(8 * int(np.prod(each))) for each in dims), *kept]
    workspace, rng = library.memory.place(plan.workspace), np.random.default_rng(seed)
    arrays = (library.memory.array(*each) for each in zip(at, dims, strict=False))
    buffers = dict(zip(piece.bound, arrays, strict=True))
    for array in buffers.values():
        array[:] = rng.normal(size=array.shape)
    given = {uid: array.copy() for uid, array in buffers.items()}
    once, each = (Program(half, handle, Stream()) for half in (found.once, found.each))
    once.launch(at, (), workspace, int)
    for uid in {*weights.reads} - {layers.x, *layers.h0, *layers.c0}:
        buffers[uid][:] = np.nan
    for turn in range(2):
        for uid, array in buffers.items():
            if uid not in piece.written and uid not in weights.reads:
                given[uid] = rng.normal(size=array.shape)
                array[:] = given[uid]
        each.launch(at, (), workspace, int)
        for uid, value in Call(layers, given).run().items():
            np.testing.assert_array_equal(buffers[uid], value, err_msg=f"turn {turn}")
    return True
