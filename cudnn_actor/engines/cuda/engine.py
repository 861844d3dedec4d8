"""The `Engine` protocol on cuDNN: one handle and one stream, used by the thread that opens it."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import (
    Builder,
    BuilderAccess,
    EngineFailure,
    Fence,
    Plan,
    StickyError,
    no_progress,
)
from cudnn_actor.engines.cuda.checking.self_check import BuildContext
from cudnn_actor.engines.cuda.cudnn.kernel_caches import KernelCaches
from cudnn_actor.engines.cuda.device.arenas import Arenas
from cudnn_actor.engines.cuda.device.fences import Fences
from cudnn_actor.engines.cuda.device.launch_ranges import VARIABLE, with_ranges
from cudnn_actor.engines.cuda.device.place import Place
from cudnn_actor.engines.cuda.device.transfer import Transfer
from cudnn_actor.engines.cuda.device.workspace import Workspace
from cudnn_actor.engines.cuda.library.failures import (
    NOT_READY,
    check_status,
    mind_own_captures,
    translate,
    translate_failures,
)
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.library.versions import version_text
from cudnn_actor.engines.cuda.planning.compiler import compile_plan
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.listing import with_candidates
from cudnn_actor.engines.cuda.running.kept_values import KeptValues, PreparedRun
from cudnn_actor.engines.cuda.running.plan import CudaPlan, DividedPlan
from cudnn_actor.engines.cuda.running.program import Program, Replay
from cudnn_actor.engines.cuda.running.timing import Once, speed_of, time_run
from cudnn_actor.engines.remote import RemoteBuilder
from cudnn_actor.protocol.errors import OutOfMemory
from cudnn_actor.protocol.graphs.explanation import Explanation
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.timing import DeviceSpeed, PlanTimes
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["CudaEngine"]

_A_TRANSFER = 4
"""How many launches one transfer counts as: it makes a few copies and kernels."""
_MOST_REPLAYS = 1024
"""CUDA graphs kept at most: each holds some device memory."""
_FOR_KEPT = 1 / 4
"""The part of the free memory that values prepared from weights may take. Values that do not fit are computed
in each run."""
_QUIET_S = 1.0
"""How long a builder process waits for another build before it begins what nobody waits for."""

log = Log("cudnn_actor")


class CudaEngine:
    """Runs operation graphs with cuDNN on one GPU.

    `cudnn_actor.engines.base.Engine` documents each method. Bindings are `Place`s. Methods enqueue work and
    return before it is done unless they say otherwise; enqueued work runs in order on one stream.

    Parameters
    ----------
    ordinal
        The device's number, as CUDA counts the devices visible to this process.
    dynamic_shapes
        Whether graphs that differ in sizes alone share the kernels that cuDNN compiles.
    fast
        Whether to launch plans without the frontend's own `execute` where that is possible.
    """

    name = "cuda"
    outlives_context = False
    synchronous = False

    def __init__(self, ordinal: int = 0, dynamic_shapes: bool = False, *, fast: bool = True) -> None:
        self.device = f"cuda:{ordinal}"
        self.on_progress = no_progress
        self._ordinal = ordinal
        self._dynamic_shapes = dynamic_shapes
        self._kernel_caches = KernelCaches() if dynamic_shapes else None
        self._fast = fast
        self._arenas = Arenas(ordinal)
        self.handle: Any = None
        """cuDNN's handle on the stream; None while the engine is not open."""
        self.stream: Any = None
        """The CuPy stream that all work runs on; None while the engine is not open."""
        self._launched = self._passed = 0
        """Launches enqueued so far, and how many of them a passed fence has covered."""
        self._replays = 0
        """CUDA graphs captured since all were dropped: at least as many as exist now."""
        self._programs: weakref.WeakSet[Program] = weakref.WeakSet()
        self._kept_values = KeptValues(self.allocate)
        self._speed: DeviceSpeed | None = None
        """The measured speed of the device; None until it is asked for."""

    @property
    def cudnn_version(self) -> str:
        """The version of the library that this process has loaded, or loads now."""
        return version_text(libraries().cudnn.backend_version())

    # Lifecycle.

    @translate_failures
    def open(self) -> None:
        """Make the device current on this thread; create a handle and a stream. Blocks for 0.3 s."""
        loaded = libraries().load()
        cupy, cudnn = loaded.cupy, loaded.cudnn
        cupy.cuda.Device(self._ordinal).use()
        mind_own_captures()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._fences = Fences(self.stream)
        self._transfer = Transfer(self.stream, self._fences)
        self.workspace = Workspace(self._ordinal)
        self._probe_stream = cupy.cuda.Stream(non_blocking=True)
        self.pool = cupy.cuda.MemoryPool()
        self.handle = cudnn.create_handle()
        cudnn.set_stream(self.handle, self.stream.ptr)
        if os.environ.get(VARIABLE) == "1":
            self.execute = with_ranges(self.execute, cupy.cuda.nvtx)  # type: ignore[method-assign]

    def close(self) -> None:
        """Wait for the stream and release everything. Safe to call twice, and after a sticky error."""
        if self.stream is None:
            return
        stream, self.stream = self.stream, None
        handle, self.handle = self.handle, None
        dead = self._shows_death(stream.synchronize)
        self.forget_replays()
        self._programs.clear()
        self._kept_values.clear()
        if dead:
            self._transfer.pinned.forget()
        else:
            if handle is not None:
                libraries().cudnn.destroy_handle(handle)
            self._transfer.close()
            self.workspace.close()
            self.pool.free_all_blocks()
        self._arenas.clear()

    @staticmethod
    def _shows_death(call: Callable[[], object]) -> bool:
        """Whether a call shows that the context is dead."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a dead context may raise anything
            return isinstance(translate(error), StickyError)
        return False

    # Memory.

    @translate_failures
    def create_arena(self, arena: int, nbytes: int) -> int:
        """Allocate device memory. Returns its descriptor, which the caller owns.

        Raises `MemoryError`, `EngineFailure`.
        """
        return self._arenas.create(arena, nbytes)

    @translate_failures
    def map_arena(self, arena: int, fd: int, nbytes: int) -> None:
        """Map an arena that an earlier engine made, perhaps in another process. Raises `EngineFailure`."""
        self._arenas.map(arena, fd, nbytes)

    @translate_failures
    def import_arena(self, arena: int, fd: int, nbytes: int) -> None:
        """Map an arena of another service, on this device or another, for reading. Raises `EngineFailure`."""
        self._arenas.map_for_reading(arena, fd, nbytes)

    def unmap_arena(self, arena: int) -> None:
        """Drop an arena; its memory is unmapped once no view of it exists. Raises `KeyError`."""
        self._arenas.unmap(arena)

    def bind(self, arena: int, offset: int, spec: TensorSpec) -> Place:
        """A buffer's place. Raises `TypeError` if the buffer does not fit into the arena."""
        return Place(self._arenas[arena], offset, spec)

    @translate_failures
    def view(self, src: Place, owner: object) -> Any:
        """A CuPy array on the buffer, of its dtype; the memory stays mapped while the array exists."""
        user = _User(owner)
        src.mapping.keep_for(user)
        return src.array(src.spec.dtype.numpy, user)

    # Plans.

    def builder(self, access: BuilderAccess | None) -> Builder:
        """A builder for a second thread; it builds in the process that `access` connects to, if given.

        cuDNN's frontend holds the interpreter's lock while it builds, for up to a second where a kernel is
        compiled.
        """
        local = CudaBuilder(self._ordinal, dynamic_shapes=self._dynamic_shapes)
        if access is None:
            return local
        make = f"{CudaBuilder.__module__}:{CudaBuilder.__name__}"
        arguments = (self._ordinal, access.journal, self._dynamic_shapes)
        return RemoteBuilder(make, arguments, local, access, tries=3, quiet_s=_QUIET_S)

    @translate_failures
    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> CudaPlan:
        """Build a plan and allocate its workspace.

        Raises `UnsupportedGraph`, `OutOfMemory`, `EngineFailure`.
        """
        plan = compile_plan(
            graph, BuildContext(self.handle, self.stream, kernels=self._kernel_caches), workspace_limit
        )
        self.prepare(plan)
        return plan

    @translate_failures
    def prepare(self, plan: Plan) -> None:
        """Allocate a plan's workspace and bind the plan to this engine. Does not wait for running work.

        Raises `OutOfMemory`, `EngineFailure`.
        """
        self._program(plan)

    @translate_failures
    def load(self, plan: Plan) -> None:
        """Load a plan's kernels, and run none. Raises `OutOfMemory`, `EngineFailure`, `StickyError`."""
        self._program(plan).load(self.workspace.pointer)

    def _program(self, plan: Plan) -> Program:
        if not isinstance(plan, CudaPlan):
            raise EngineFailure("FOREIGN_PLAN", f"{plan.tag} was built by another engine")
        if plan.workspace > self.workspace.nbytes:
            self.grow_workspace(plan.workspace)
        if plan.program is None or plan.program.stream is not self.stream:
            plan.program = Program(plan, self.handle, self.stream, fast=self._fast)
            self._programs.add(plan.program)
        return plan.program  # type: ignore[no-any-return]

    def grow_workspace(self, nbytes: int) -> None:
        """Let the workspace have at least `nbytes` bytes. Raises `OutOfMemory`."""
        try:
            self.workspace.grow(nbytes)
        except MemoryError:
            raise OutOfMemory(requested=nbytes, in_use=0, limit=None, workspace=True) from None

    def forget_replays(self) -> None:
        """Drop every captured CUDA graph."""
        self._replays = 0
        for program in self._programs:
            program.forget_replays()

    def poison_workspace(self) -> None:
        """Fill the workspace with NaN. For tests."""
        self.workspace.poison(self.stream)

    # Work.

    def execute(self, plan: Plan, buffers: Sequence[Place], scalars: Sequence[float]) -> None:
        """Enqueue a run. Raises `EngineFailure`, `StickyError`."""
        self._enqueue(plan, (*[place.pointer for place in buffers], *scalars), buffers, scalars)

    @translate_failures
    def expect(
        self,
        plan: Plan,
        buffers: Sequence[Place],
        scalars: Sequence[float],
        constant: Collection[int] = (),
    ) -> Callable[[], None]:
        """A function that enqueues a run on these buffers. The second run is captured, not only the fourth;
        after `load`, the first.

        What the plan prepares of constant buffers, the first call prepares for all, in memory of its own. If
        there is none left, each run prepares it. Raises `OutOfMemory`, `EngineFailure`.
        """
        program, pointers = self._program(plan), [place.pointer for place in buffers]
        found = self._divide(plan, constant)
        kept = None if found is None else self._kept_values.of(found.each, found.kept, buffers)
        if found is not None and kept is None:
            log.info("weights.not_kept", plan=plan.tag, nbytes=sum(each.nbytes for each in found.kept))
        if found is None or kept is None:
            key = (*pointers, *scalars)
            program.expect(key)
            return functools.partial(self._enqueue_expected, _Expected(plan, key, buffers, scalars))
        key, places = (*pointers, *(memory.ptr for memory in kept), *scalars), (*buffers, *kept)
        each = self._program(found.each)
        if program.is_loaded:
            each.load(self.workspace.pointer)
        each.expect(key)
        once = functools.partial(self._enqueue, found.once, key, places, scalars)
        runs = functools.partial(self._enqueue_expected, _Expected(found.each, key, places, scalars))
        return PreparedRun(once, runs)

    def keeps(self, plan: Plan, constant: Collection[int]) -> frozenset[int]:
        """The buffers of which an expected run keeps values: see `Engine.keeps`."""
        found = self._divide(plan, constant)
        kept = () if found is None else found.kept
        return frozenset(place for each in kept for place in each.reads)

    @property
    def converted_bytes(self) -> int:
        """Bytes of device memory for what is prepared of constant buffers."""
        return self._kept_values.nbytes

    @staticmethod
    def _divide(plan: Plan, constant: Collection[int]) -> DividedPlan | None:
        return plan.divide(frozenset(constant)) if constant and isinstance(plan, CudaPlan) else None

    def allocate(self, nbytes: int) -> Any:
        """Device memory that is free when it is dropped, for work on the engine's stream alone.

        Raises `MemoryError` if it would take more than a part of what is free.
        """
        kept, free = self._kept_values.nbytes, libraries().runtime.memGetInfo()[0]
        if kept + nbytes > (kept + free) * _FOR_KEPT:
            raise MemoryError(f"{nbytes:,} bytes for what is prepared of weights")
        with self.stream:
            return self.pool.malloc(nbytes)

    def _enqueue(
        self,
        plan: Plan,
        key: tuple[float, ...],
        buffers: Sequence[Any],
        scalars: Sequence[float],
        replay: Replay | None = None,
    ) -> None:
        """Enqueue a run. `replay`: the graph that was captured of it, where the caller has it."""
        try:
            if replay is None and (program := getattr(plan, "program", None)) is not None:
                replay = program.replays.get(key)
            if replay is not None:
                replay.launch(self._launched - self._passed)
            else:
                self._run(plan, key, buffers, scalars)
        except Exception as error:
            known = translate(error)
            if known is error:
                raise
            raise known from error
        self._launched += 1

    def _enqueue_expected(self, run: _Expected) -> None:
        replay = run.replay()
        self._enqueue(run.plan, run.key, run.buffers, run.scalars, replay)
        if replay is None:
            run.find()

    def _run(
        self, plan: Plan, key: tuple[float, ...], buffers: Sequence[Any], scalars: Sequence[float]
    ) -> None:
        program = self._program(plan)
        recipe = program.recipe
        if len(buffers) != recipe.buffers or len(scalars) != recipe.scalars:
            wanted = f"{recipe.buffers} buffers and {recipe.scalars} scalars"
            raise EngineFailure("BAD_BINDINGS", f"{len(buffers)} and {len(scalars)} given, not {wanted}")
        if self._replays >= _MOST_REPLAYS:
            self.forget_replays()
        before = len(program.replays)
        program.run(key, key[: len(buffers)], scalars, self.workspace.pointer)  # type: ignore[arg-type]
        self._replays += len(program.replays) > before

    @translate_failures
    def measure(self, plan: Plan, graph: OperationGraph, constant: Collection[int] = ()) -> PlanTimes:
        """Time a plan and its pieces, without what is computed from constant buffers alone. Blocks.

        Raises `OutOfMemory`, `EngineFailure`, `StickyError`.
        """
        found = self._divide(plan, constant)
        program = self._program(plan if found is None else found.each)
        once = None if found is None else Once(self._program(found.once), [of.nbytes for of in found.kept])
        if self._speed is None:
            self._speed = speed_of(self._ordinal, self.stream)
        return time_run(program, graph, self.workspace.pointer, self._speed, self.on_progress, once=once)

    @translate_failures
    def with_candidates(
        self, plan: Plan, explanation: Explanation, graph: OperationGraph, workspace_limit: int | None
    ) -> Explanation:
        """See `listing.with_candidates`. Raises `EngineFailure`, `StickyError`."""
        assert isinstance(plan, CudaPlan)
        return with_candidates(
            plan.recipe, explanation, graph, self.handle, workspace_limit, on_progress=self.on_progress
        )

    @translate_failures
    def write(self, dst: Place, array: Any) -> None:
        """Enqueue a copy of host values, or of a `DeviceArray`. Raises `InvalidRequest`, `EngineFailure`."""
        self._launched += _A_TRANSFER
        self._transfer.write(dst, array)

    @translate_failures
    def read(self, src: Place, into: np.ndarray | None = None) -> np.ndarray:
        """A C-contiguous array of the buffer's dims and dtype. Blocks. Raises `EngineFailure`."""
        return self._transfer.read(src, into)

    @translate_failures
    def fetch(self, src: Place, into: np.ndarray | None = None) -> Callable[[], np.ndarray] | None:
        """Enqueue a download that a later fence completes; None if the free staging memory is too small."""
        self._launched += _A_TRANSFER
        return self._transfer.fetch(src, into)

    def direct_copy(self, src: Place | np.ndarray, dst: Place | np.ndarray) -> Callable[[], object] | None:
        """A function that enqueues one copy; None for arrays that are not pinned, and for other layouts."""
        copy = self._transfer.direct_copy(src, dst)
        if copy is None:
            return None

        @translate_failures
        def enqueue() -> None:
            self._launched += 1
            copy()

        return enqueue

    def part_copy(self, src: np.ndarray, dst: Place) -> Callable[[int, int], object] | None:
        """A function that enqueues copies of bytes of an array; None where `direct_copy` gives None."""
        copy = self._transfer.part_copy(src, dst)
        if copy is None:
            return None

        @translate_failures
        def enqueue(begin: int, end: int) -> None:
            self._launched += 1
            copy(begin, end)

        return enqueue

    def row_copy(self, rows: Place, place: Place, *, store: bool) -> Callable[[int], None]:
        """A function that enqueues the copy of one row."""
        copy = self._transfer.row_copy(rows, place, store=store)

        @translate_failures
        def enqueue(row: int) -> None:
            self._launched += 1
            copy(row)

        return enqueue

    @translate_failures
    def pin(self, memory: memoryview) -> None:
        """Lock a mapping's pages for the device. Blocks while the driver does. Raises `StickyError`."""
        self._transfer.pinned.add(memory)

    @translate_failures
    def unpin(self, memory: memoryview) -> None:
        """Undo `pin`. Blocks until work has finished. Raises `EngineFailure`."""
        if self.stream is not None:
            self._transfer.unpin(memory)

    @translate_failures
    def copy(self, src: Place, dst: Place) -> None:
        """Enqueue a copy between buffers of the same dims and dtype. Raises `EngineFailure`."""
        self._launched += _A_TRANSFER
        self._transfer.copy(src, dst)

    @translate_failures
    def fill(self, dst: Place, value: float) -> None:
        """Enqueue setting every element. Raises `InvalidRequest`, `EngineFailure`."""
        self._launched += _A_TRANSFER
        self._transfer.fill(dst, value)

    # Fences.

    @translate_failures
    def fence(self) -> Fence:
        """An event after all enqueued work, and the number of launches enqueued so far."""
        self._transfer.release()
        return self._fences.record(), self._launched

    def has_passed(self, fence: Fence) -> bool:
        """Whether the device has passed the fence, which must then not be used again. Never blocks.

        Raises `StickyError`.
        """
        event, launched = fence
        if not self._fences.has_passed(event):
            return False
        self._passed = launched
        self._transfer.release()  # no later call may come: an idle engine must not keep callers' arrays
        return True

    def probe(self) -> str | None:
        """The fault of the context as a text; None if the context is healthy. Blocks briefly."""
        try:
            status = libraries().runtime.streamQuery(self.stream.ptr)
            if status != NOT_READY:
                check_status(status)
            self.workspace.touch(self._probe_stream)
        except Exception as error:  # noqa: BLE001 - the error is the answer
            return str(translate(error))
        return None


class _Expected:
    """A run that comes again and again, and the graph that was captured of it.

    To look the graph up takes long for a network: its key has an address for each buffer.
    """

    __slots__ = ("buffers", "key", "plan", "replay", "scalars")

    def __init__(
        self, plan: Plan, key: tuple[float, ...], buffers: Sequence[Any], scalars: Sequence[float]
    ) -> None:
        self.plan, self.key, self.buffers, self.scalars = plan, key, buffers, scalars
        self.replay: Callable[[], Replay | None] = _none_yet
        """The graph, as long as its program keeps it; None before it is captured, and once it was dropped."""

    def find(self) -> None:
        """Look the graph up, if there is one by now."""
        program = getattr(self.plan, "program", None)
        replay = None if program is None else program.replays.get(self.key)
        self.replay = _none_yet if replay is None else weakref.ref(replay)


def _none_yet() -> None:
    return None


class _User:
    """A view's hold on its owner. The memory stays mapped until this object is collected."""

    __slots__ = ("__weakref__", "owner")

    def __init__(self, owner: object) -> None:
        self.owner = owner
