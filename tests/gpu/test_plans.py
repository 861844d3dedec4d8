"""Plans on the device: how they are tried, launched, replayed, kept and tuned."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cuda import CudaEngine
from cudnn_actor.engines.cuda.checking.self_check import BuildContext, SelfCheck
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.candidates import candidates, names_of
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.ranking import rank
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import fast_launch
from cudnn_actor.engines.cuda.running.recipe import Buffer
from cudnn_actor.protocol import (
    Activation,
    BufferRef,
    ConvBwdFilter,
    ConvFwd,
    ConvSpec,
    Epilogue,
    Layout,
    OutOfMemory,
    TensorSpec,
)
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.operations import PointwiseMode

from ..engines.cuda.planning.test_ranking import FEW
from ..engines.references import assert_close
from ..engines.workbench import Workbench, workbench

CONV = ConvSpec.symmetric(2, pad=1)


@pytest.fixture(params=[True, False], ids=["fast", "public"])
def engine(request: pytest.FixtureRequest) -> Iterator[CudaEngine]:
    """Launching plans either way."""
    engine = CudaEngine(fast=request.param)
    engine.open()
    yield engine
    engine.close()


@pytest.fixture
def bench(engine: CudaEngine) -> Iterator[Workbench]:
    with workbench(engine) as bench:
        yield bench


def numbers(*dims: int) -> np.ndarray:
    return np.random.default_rng(1).integers(-3, 4, dims).astype(np.float32)


def request_on(bench: Workbench, layout: Layout = Layout.NHWC, **fields: Any) -> ConvFwd:
    def place(*dims: int) -> BufferRef:
        return bench.place(numbers(*dims), TensorSpec.packed(dims, "float32", layout))

    x, w, y = place(2, 16, 9, 11), place(8, 16, 3, 3), place(2, 8, 9, 11)
    return ConvFwd(x=x, w=w, y=y, conv=CONV, **fields)


def wanted(message: ConvFwd, bench: Workbench) -> np.ndarray:
    """What the CPU engine makes of the same values, in float64."""
    oracle = CpuEngine(exact=True)
    oracle.open()
    fields = ("x", "w", "y", "bias")
    given = {name: getattr(message, name) for name in fields if getattr(message, name) is not None}
    with workbench(oracle) as other:
        placed = {name: other.place(bench.read(ref).astype(np.float64)) for name, ref in given.items()}
        return other.run(
            type(message)(**{**{f: getattr(message, f) for f in message.__struct_fields__}, **placed})
        )


def test_this_frontend_has_the_fast_way(engine: CudaEngine, bench: Workbench) -> None:
    message = request_on(bench)
    plan = engine.build(lower(message).graph, workspace_limit=None)
    step: Any = plan.recipe.steps[0]
    assert fast_launch(plan.graphs[0], step.uids, engine.handle) is not None


def test_a_run_gives_the_same_again_and_again_also_when_it_is_replayed(
    engine: CudaEngine, bench: Workbench
) -> None:
    message = request_on(bench, alpha=0.5)
    expected = wanted(message, bench)
    plan = engine.build(lower(message).graph, workspace_limit=None)
    for _ in range(10):
        engine.fill(bench.binding(message.y), float("nan"))
        bench.execute(plan, message)
        assert_close(bench.read(message.y), expected)
    assert plan.program.replays


def test_a_replay_is_not_used_for_other_buffers_or_scalars(engine: CudaEngine, bench: Workbench) -> None:
    message, other = request_on(bench, alpha=0.5), request_on(bench, alpha=2.0)
    plan = engine.build(lower(message).graph, workspace_limit=None)
    for _ in range(6):
        bench.execute(plan, message)
    bench.execute(plan, other)
    assert_close(bench.read(other.y), wanted(other, bench))


@pytest.mark.parametrize("layout", [Layout.NHWC, Layout.NCHW])
def test_a_plan_with_loaded_kernels_is_captured_in_its_first_run_if_many_are_expected(
    engine: CudaEngine, bench: Workbench, layout: Layout
) -> None:
    message = request_on(bench, layout, alpha=0.5)
    expected = wanted(message, bench)
    plan = engine.build(lower(message).graph, workspace_limit=None)
    engine.fill(bench.binding(message.y), 7.0)
    engine.poison_workspace()
    for _ in range(2):
        engine.load(plan)
    assert (bench.read(message.y) == 7.0).all(), "loading has run the plan"
    buffers, scalars = bench.bound(message)
    launch = engine.expect(plan, buffers, scalars)
    for _ in range(3):
        engine.fill(bench.binding(message.y), float("nan"))
        launch()
        assert len(plan.program.replays) == 1
        assert_close(bench.read(message.y), expected)


def test_an_expected_run_whose_graph_was_dropped_is_captured_again(
    engine: CudaEngine, bench: Workbench
) -> None:
    message = request_on(bench, alpha=0.5)
    expected = wanted(message, bench)
    plan = engine.build(lower(message).graph, workspace_limit=None)
    engine.load(plan)
    launch = engine.expect(plan, *bench.bound(message))
    for _ in range(3):
        engine.fill(bench.binding(message.y), float("nan"))
        launch()
        (replay,) = plan.program.replays.values()
        assert_close(bench.read(message.y), expected)
        gone = weakref.ref(replay)
        del replay
        engine.forget_replays()
        assert gone() is None, "an expected run keeps it"


def test_a_replay_stays_right_when_the_workspace_grows(engine: CudaEngine, bench: Workbench) -> None:
    message = request_on(bench, Layout.NCHW, alpha=0.5)  # in two steps, with the sums between them
    expected = wanted(message, bench)
    plan = engine.build(lower(message).graph, workspace_limit=None)
    assert plan.workspace
    for _ in range(6):
        bench.execute(plan, message)
    replays = dict(plan.program.replays)
    assert replays
    engine.grow_workspace(64 << 20)
    engine.poison_workspace()
    engine.fill(bench.binding(message.y), float("nan"))
    bench.execute(plan, message)
    assert plan.program.replays == replays
    assert_close(bench.read(message.y), expected)


@pytest.fixture
def builder() -> Iterator[CudaBuilder]:
    builder = CudaBuilder(0)
    builder.open()
    yield builder
    builder.close()


@pytest.mark.parametrize("layout", [Layout.NHWC, Layout.NCHW])
def test_a_plan_of_one_handle_runs_on_another_and_survives_being_bytes(
    engine: CudaEngine, bench: Workbench, builder: CudaBuilder, layout: Layout
) -> None:
    message = request_on(bench, layout, epilogue=Epilogue(activation=Activation.LEAKY_RELU))
    expected = wanted(message, bench)
    graph = lower(message).graph
    built = builder.build(graph, workspace_limit=None)
    data = builder.export(built)
    assert data is not None
    for plan in (built, builder.restore(graph, data)):
        engine.prepare(plan)
        engine.poison_workspace()
        bench.execute(plan, message)
        assert_close(bench.read(message.y), expected)


def test_bytes_that_are_no_plan_are_refused(bench: Workbench, builder: CudaBuilder) -> None:
    graph = lower(request_on(bench)).graph
    with pytest.raises(EngineFailure):
        builder.restore(graph, b"no plan")


@contextmanager
def all_memory_taken() -> Iterator[Callable[[], None]]:
    """Not a MiB is left on the device, until the end of the block, or another process gives some back.

    Yields a function that takes that, too.
    """
    runtime = libraries().runtime
    taken = list[int]()

    def take() -> None:
        chunk = 1 << 32
        while chunk >= 1 << 20:
            try:
                taken.append(runtime.malloc(chunk))
            except runtime.CUDARuntimeError:
                chunk //= 2

    try:
        take()
        yield take
    finally:
        for pointer in taken:
            runtime.free(pointer)


@pytest.mark.usefixtures("whole_device")
def test_a_plan_that_cannot_be_restored_on_a_full_device_stops_no_other(
    engine: CudaEngine, bench: Workbench, builder: CudaBuilder
) -> None:
    message = request_on(bench)
    expected = wanted(message, bench)
    graph = lower(message).graph
    data = builder.export(builder.build(graph, workspace_limit=None))
    assert data is not None
    builder.restore(graph, data)  # its kernels are loaded from here on
    # CUDA keeps a failed call's error for the thread that made it: PyTorch would raise it in a later test.
    with ThreadPoolExecutor(1) as pool, all_memory_taken() as take_the_rest:

        def restore() -> None:
            for _ in range(100):  # the tests of other processes may give memory back meanwhile
                take_the_rest()
                pool.submit(builder.restore, graph, data).result()

        with pytest.raises(EngineFailure, match="cuda_malloc"):
            restore()
    for plan in (builder.build(graph, workspace_limit=None), builder.restore(graph, data)):
        engine.prepare(plan)
        bench.execute(plan, message)
        assert_close(bench.read(message.y), expected)


def test_tuning_finds_a_plan_that_is_right_and_says_what_it_found(
    engine: CudaEngine, bench: Workbench, builder: CudaBuilder
) -> None:
    message = request_on(bench)
    expected = wanted(message, bench)
    seen: list[int] = []
    plan = builder.tune(
        lower(message).graph, workspace_limit=None, progress=lambda done, _of, _what: seen.append(done)
    )
    assert seen == sorted(seen)
    assert plan.tuning is not None
    assert plan.tuning.timed > 1
    assert plan.tuning.tuned_us <= plan.tuning.heuristic_us
    engine.prepare(plan)
    bench.execute(plan, message)
    assert_close(bench.read(message.y), expected)


def test_plans_keep_to_a_workspace_limit_or_say_what_they_need(engine: CudaEngine, bench: Workbench) -> None:
    message = request_on(bench, Layout.NCHW, alpha=0.5)
    needed = engine.build(lower(message).graph, workspace_limit=None).workspace
    with pytest.raises(OutOfMemory) as caught:
        engine.build(lower(message).graph, workspace_limit=16)
    assert caught.value.limit == 16
    assert caught.value.requested <= needed


class TestTrials:
    """A plan that does not do what its graph says is found out, whatever is wrong with it."""

    @pytest.fixture
    def check(self, engine: CudaEngine, bench: Workbench) -> Iterator[SelfCheck]:
        self.message = request_on(bench, Layout.NCHW, alpha=0.5)
        self.plan = engine.build(lower(self.message).graph, workspace_limit=None)
        check = SelfCheck(lower(self.message).graph, BuildContext(engine.handle, engine.stream))
        yield check
        check.close()

    @property
    def kernel(self) -> Any:
        """What the last step stores the result with."""
        last: Any = self.plan.recipe.steps[-1]
        return last.kernel

    def with_last_step(self, **changes: Any) -> CudaPlan:
        """The plan with its last step, the kernel that stores the result, changed."""
        *first, last = self.plan.recipe.steps
        kernel = msgspec.structs.replace(self.kernel, **changes)
        steps = (*first, msgspec.structs.replace(last, kernel=kernel))
        return CudaPlan(msgspec.structs.replace(self.plan.recipe, steps=steps), self.plan.graphs)

    def test_a_good_plan_has_no_fault(self, check: SelfCheck) -> None:
        assert check.fault(self.plan) is None

    def test_results_that_are_left_out_are_found(self, check: SelfCheck) -> None:
        (count, *rest) = self.kernel.dims
        assert "NaN" in (check.fault(self.with_last_step(dims=(count - 1, *rest))) or "")

    def test_results_that_are_wrong_are_found(self, check: SelfCheck) -> None:
        *before, last = self.kernel.body
        body = (*before, msgspec.structs.replace(last, mode=PointwiseMode.SUB))
        assert "wrong" in (check.fault(self.with_last_step(body=body)) or "")

    def test_writing_beyond_the_output_is_found_and_not_held_against_the_next_plan(
        self, check: SelfCheck
    ) -> None:
        (count, *rest) = self.kernel.dims
        fault = check.fault(self.with_last_step(dims=(count + 64, *rest)))
        assert "outside" in (fault or "")
        assert check.fault(self.plan) is None

    def test_a_filter_gradient_is_judged_too(self, engine: CudaEngine, bench: Workbench) -> None:
        x, dy, dw = (bench.place(numbers(*d)) for d in ((2, 4, 9, 9), (2, 8, 9, 9), (8, 4, 3, 3)))
        graph = lower(ConvBwdFilter(x=x, dy=dy, dw=dw, conv=CONV)).graph
        check = SelfCheck(graph, BuildContext(engine.handle, engine.stream))
        plan = engine.build(graph, workspace_limit=None)
        assert check.fault(plan) is None
        step: Any = plan.recipe.steps[0]
        swapped = msgspec.structs.replace(step, sources=(Buffer(0), Buffer(0), *step.sources[2:]))
        recipe = msgspec.structs.replace(plan.recipe, steps=(swapped,))
        assert check.fault(CudaPlan(recipe, plan.graphs)) is not None
        check.close()


def test_cudnn_offers_several_candidates_so_that_there_is_something_to_tune(
    engine: CudaEngine, bench: Workbench
) -> None:
    lowered = candidates(lower(request_on(bench)).graph, engine.handle, None)
    assert lowered.get_execution_plan_count() > 1


@pytest.mark.parametrize("name", FEW)
def test_small_attention_has_the_candidate_that_goes_first(name: str) -> None:
    builder = CudaBuilder(0)
    builder.open()
    graph = FEW[name]
    plan = builder.build(graph, workspace_limit=None)
    names = names_of(candidates(graph, builder.context.handle, None))
    assert plan.checked
    assert plan.tag.split("/", 3)[3] == names[rank(graph, names)[0]]
