"""Plans of deployed models on CUDA: what is prepared of weights is prepared once, and again after a write."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cuda import engine as cuda
from cudnn_actor.engines.cuda.device.place import Place
from cudnn_actor.engines.cuda.kernels.elementwise import elementwise
from cudnn_actor.engines.cuda.kernels.expressions import Expression, Leaf, Scalar
from cudnn_actor.engines.cuda.kernels.joined_kernels import Joined
from cudnn_actor.engines.cuda.operations.recurrent_calls import Layers, LayerWeights
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.recurrent_layers import replace_layers
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running import program
from cudnn_actor.engines.cuda.running.divided import divide
from cudnn_actor.engines.cuda.running.kept_values import KeptValues
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.recipe import (
    Between,
    Buffer,
    GraphStep,
    KernelStep,
    OperationStep,
    Part,
    Recipe,
    Scratch,
    Step,
)
from cudnn_actor.protocol import DType, Graph, GraphBuilder, OperationGraph, TensorSpec
from cudnn_actor.protocol.operations import GraphTensor, Pad, PointwiseMode

from ... import host_cuda
from ..operations.test_recurrent_calls import Computing, library
from ..operations.test_recurrent_networks import Call, Network

__all__ = ["library"]

PAD = Pad[int](x=0, y=1, before=(0, 0), after=(0, 2), steps=(1, 1))
NARROW, WIDE = (
    GraphTensor(uid=uid, dims=dims, strides=(dims[1], 1), dtype=DType.FLOAT32)
    for uid, dims in ((0, (3, 6)), (1, (3, 8)))
)
A, B = Scratch(0, 96), Scratch(256, 96)
RESULT = Buffer(2)


def padding(source: Any, target: Any, *workspace: Any) -> OperationStep:
    """A step that pads a tensor."""
    return OperationStep(PAD, (NARROW, WIDE), (source, target, *workspace), "kernel")


def reading(*sources: Any, target: Any = RESULT) -> GraphStep:
    """A step of cuDNN's."""
    names = tuple(range(len(sources) + 1))
    return GraphStep("eng", 0, names, (*sources, target), reads=names[:-1])


def recipe_of(
    *parts: Sequence[Step], own: int = 0, between: Sequence[Between] = (), buffers: int = 3
) -> Recipe:
    """A recipe of parts."""
    return Recipe(
        "tag",
        tuple(itertools.chain.from_iterable(parts)),
        1024,
        buffers=buffers,
        scalars=1,
        parts=tuple(Part((n,), len(steps), "tag", 0, own=own) for n, steps in enumerate(parts)),
        between=tuple(between),
    )


# A recipe in two.


def test_steps_that_read_weights_alone_run_once() -> None:
    recipe = recipe_of(
        (padding(Buffer(1), A), padding(Buffer(0), B), reading(B, A)),
        (padding(Buffer(1, 512), A), reading(A)),
        (reading(A),),  # of another part, in which the place has another tensor
    )
    found = divide(recipe, {1})
    assert found is not None
    assert [(each.reads, each.nbytes) for each in found.kept] == [((1,), 96), ((1,), 96)]
    assert found.kept[0].value != found.kept[1].value
    assert found.once.steps == (padding(Buffer(1), Buffer(3)), padding(Buffer(1, 512), Buffer(4)))
    assert found.each.steps == (
        padding(Buffer(0), B),
        reading(B, Buffer(3)),
        reading(Buffer(4)),
        reading(A),
    )
    assert [part.steps for part in found.each.parts] == [2, 1, 1]
    assert (found.once.buffers, found.each.buffers) == (5, 5)
    assert [part.steps for part in found.once.parts] == [1, 1, 0]
    assert (found.once.scalars, found.each.scalars, found.each.workspace) == (1, 1, recipe.workspace)


def test_what_is_made_of_what_runs_once_runs_once_too() -> None:
    """What only such steps read needs no memory of its own."""
    recipe = recipe_of((padding(Buffer(0), A), padding(A, B), reading(Scratch(320, 32), Buffer(1))))
    found = divide(recipe, {0})
    assert found is not None
    assert [each.reads for each in found.kept] == [(0,)]
    assert found.once.steps == (padding(Buffer(0), A), padding(A, Buffer(3)))
    assert found.each.steps == (reading(Buffer(3, 64), Buffer(1)),)
    assert divide(recipe, {1}) is None


def test_what_lies_between_parts_is_kept_for_all_that_read_it() -> None:
    weights, other = Between(7, 96, 0, 0, 2), Between(8, 96, 0, 3, 4)
    own = Scratch(512, 96)
    recipe = recipe_of(
        (padding(Buffer(0), A),),
        (padding(Buffer(1), own), reading(own, A)),
        (reading(A),),
        (padding(Buffer(1), A),),  # the next tensor that lies there
        (reading(A),),
        own=512,
        between=(weights, other),
    )
    found = divide(recipe, {0})
    assert found is not None
    assert found.once.steps == (padding(Buffer(0), Buffer(3)),)
    assert found.each.steps == (
        padding(Buffer(1), own),
        reading(own, Buffer(3)),
        reading(Buffer(3)),
        padding(Buffer(1), A),
        reading(A),
    )


SHARED = {
    "it is written again": (padding(Buffer(0), A), reading(A), padding(Buffer(1), A), reading(A)),
    "a part of it is written": (
        padding(Buffer(0), A),
        reading(Buffer(1), target=Scratch(64, 8)),
        reading(A),
    ),
    "more is read with it": (padding(Buffer(0), A), reading(A), reading(Scratch(0, 128))),
    "it is changed in place": (padding(Buffer(0), A), reading(A, target=A), reading(A)),
    "it is another step's workspace": (padding(Buffer(0), A), reading(A), padding(Buffer(1), B, A)),
    "something else was read there before": (reading(A), padding(Buffer(0), A), reading(A)),
    "it is a result": (padding(Buffer(0), Buffer(2)),),
    "it is not known what cuDNN computes": (reading(Buffer(0), target=A), reading(A)),
    "nothing is read": (OperationStep(PAD, (), (A,), "kernel"), reading(A)),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_place_that_has_more_than_one_tensor_is_written_in_each_run(name: str) -> None:
    assert divide(recipe_of(SHARED[name]), {0}) is None


def test_what_cudnn_computes_of_weights_is_computed_once() -> None:
    def steps(of: int) -> list[Step]:
        first = msgspec.structs.replace(reading(Buffer(of), target=A), digest="a graph")
        return [reading(Buffer(1 - of)), first, reading(A), reading(Buffer(of))]

    graphs = ("w", "x", "y", "z")
    plan, other = (CudaPlan(recipe_of(steps(of)), graphs) for of in (0, 1))
    found, second = plan.divide(frozenset({0})), other.divide(frozenset({1}))
    assert found is not None
    assert second is not None
    assert found.once.graphs == ("x",)
    assert found.each.graphs == ("w", "y", "z")
    assert found.each.recipe.steps[1] == reading(Buffer(3))
    assert [each.value for each in found.kept] == [each.value for each in second.kept]


def test_what_other_parts_may_read_is_not_kept_if_it_is_not_known_which() -> None:
    recipe = recipe_of((padding(Buffer(0), A),), (reading(A),), own=512)
    assert divide(recipe, {0}) is None
    assert divide(msgspec.structs.replace(recipe, between=(Between(7, 96, 0, 0, 1),)), {0}) is not None


def test_what_takes_scalars_runs_each_time() -> None:
    value = Expression(PointwiseMode.MUL, (Leaf(0, DType.FLOAT32), Scalar(0)))
    plain, scaled = (
        elementwise(each, DType.FLOAT32, (24,), [(1,), (1,)]) for each in (Leaf(0, DType.FLOAT32), value)
    )
    for kernel, runs_once in ((plain, True), (scaled, False), (Joined((plain, scaled)), False)):
        count = 1 if kernel is not scaled and kernel is not plain else 0
        sources = (A, Buffer(0), *((B, Buffer(0)) if count else ()))
        recipe = recipe_of((KernelStep(kernel, sources), reading(A)))
        assert (divide(recipe, {0}) is not None) == runs_once


def test_the_same_computation_is_the_same_value_wherever_its_weights_stand() -> None:
    one = recipe_of((padding(Buffer(0), A), reading(A, Buffer(1))))
    other = recipe_of((padding(Buffer(1), B), reading(B, Buffer(0))))
    (first,), (second,) = (
        found.kept for found in (divide(one, {0}), divide(other, {1})) if found is not None
    )
    assert first.value == second.value
    assert (first.reads, second.reads) == ((0,), (1,))
    moved = recipe_of((padding(Buffer(0, 256), A), reading(A, Buffer(1))))
    third = divide(moved, {0})
    assert third is not None
    assert third.kept[0].value != first.value


def test_a_long_chain_of_what_is_computed_of_weights_takes_no_longer_than_its_steps() -> None:
    """Each step reads the result of the one before twice."""
    last, steps = Scratch(0, 8), list[Step]()
    for number in range(200):
        source = last if steps else Buffer(0)
        last = Scratch(8 * number, 8)
        steps.append(msgspec.structs.replace(reading(source, source, target=last), digest="a sum"))
    found = divide(recipe_of((*steps, reading(last))), {0})
    assert found is not None
    assert len(found.once.steps) == 200
    assert [each.reads for each in found.kept] == [(0,)]
    assert hash(found.kept[0].value) == hash(found.kept[0].value)


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
    found.stream, found.pool = Stream(), host_cuda.MemoryPool()
    found.handle = None
    room = np.zeros(4096, np.uint8)
    found.workspace = SimpleNamespace(pointer=room.ctypes.data, nbytes=room.nbytes, owner=room)
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
    """A plan in which the weight is padded by a step of its own."""
    return compile_split(graph.body, None, None, choice=1)


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
    recipe = recipe_of((padding(Buffer(0), A), padding(Buffer(0, 256), B), reading(A, B)))
    found, buffers = divide(recipe, {0}), Buffers(0, w=(64, 6))
    assert found is not None
    values = KeptValues(engine.allocate)
    plan = CudaPlan(recipe, ())
    memory = values.of(plan, found.kept, [buffers.places["w"]])
    assert memory is not None
    assert len({each.ptr for each in memory}) == 2
    assert values.of(plan, found.kept, [buffers.places["w"]]) == memory


def test_a_plan_that_counts_more_bytes_for_a_value_has_as_many() -> None:
    found, buffers = divide(recipe_of((padding(Buffer(0), A), reading(A))), {0}), Buffers(0, w=(3, 6))
    assert found is not None
    values, places = KeptValues(bytes), list(buffers.places.values())
    plan, sizes = CudaPlan(recipe_of(), ()), []
    for nbytes in (96, 128, 96):
        memory = values.of(plan, [found.kept[0]._replace(nbytes=nbytes)], places)
        assert memory is not None
        sizes.append(len(memory[0]))
    assert sizes == [96, 128, 96]
    assert values.nbytes == 96 + 128


def test_what_only_a_plan_that_was_replaced_has_read_is_dropped() -> None:
    found, buffers = divide(recipe_of((padding(Buffer(0), A), reading(A))), {0}), Buffers(0, w=(3, 6))
    assert found is not None
    values, places = KeptValues(bytes), list(buffers.places.values())
    (shared,), old, new = found.kept, CudaPlan(recipe_of(), ()), CudaPlan(recipe_of(), ())
    values.of(old, [shared, shared._replace(value="another")], places)
    memory = values.of(new, [shared], places)
    assert values.nbytes == 2 * 96
    del old
    again = values.of(new, [shared], places)
    assert memory is not None
    assert again is not None
    assert memory[0] is again[0]
    assert values.nbytes == 96


def test_nothing_is_kept_of_what_does_not_fit_as_a_whole() -> None:
    recipe = recipe_of((padding(Buffer(0), A), padding(Buffer(1), B), reading(A, B)))
    one, whole, buffers = divide(recipe, {0}), divide(recipe, {0, 1}), Buffers(0, v=(3, 6), w=(3, 6))
    assert one is not None
    assert whole is not None
    places, room = list(buffers.places.values()), [bytes(96)]

    def allocate(_nbytes: int) -> bytes:
        if not room:
            raise MemoryError
        return room.pop()

    plan, values = CudaPlan(recipe, ()), KeptValues(allocate)
    assert values.of(plan, whole.kept, places) is None
    assert values.nbytes == 0
    room.append(bytes(96))
    assert values.of(plan, one.kept, places) is not None
    assert values.of(plan, whole.kept, places) is None
    assert values.nbytes == 96, "that is used"


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
        broken.setattr(Program, "launch_steps", lambda *_: (_ for _ in ()).throw(MemoryError))
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
            if isinstance(replace_layers(piece)[0], LayerWeights):
                tried += check_layers(library, piece, seed)
    assert tried > 5


def check_layers(library: Computing, piece: OperationGraph, seed: int) -> bool:
    """Run a piece twice, with other inputs the second time and other numbers where its weights were.

    Returns whether its weights are prepared: they may be tensors that something computes.
    """
    weights, layers = replace_layers(piece)
    assert isinstance(layers, Layers)
    places = {piece.bound.index(uid) for uid in weights.reads if uid in piece.bound}
    handle = SimpleNamespace(backend_handle=9)
    plan = compile_split(piece, handle, None)
    found = plan.divide(frozenset(places))
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
