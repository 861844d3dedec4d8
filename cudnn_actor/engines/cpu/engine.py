"""The `Engine` protocol on NumPy: every call finishes its work before it returns."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import BuilderAccess, EngineFailure, Plan, blamed_operations, no_progress
from cudnn_actor.engines.cpu import transfer
from cudnn_actor.engines.cpu.arenas import Arenas, keeping
from cudnn_actor.engines.cpu.blas import threads_of_blas
from cudnn_actor.engines.cpu.exact.compiler import compile_plan
from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan, Evaluation
from cudnn_actor.engines.cpu.exact.plan import CpuPlan, Program
from cudnn_actor.engines.cpu.fast.bound_programs import BoundPrograms
from cudnn_actor.engines.cpu.fast.compiler import compile_fast
from cudnn_actor.engines.cpu.fast.constants import Constants, Converted, is_convertible, with_constants
from cudnn_actor.engines.cpu.fast.lanes import Lanes
from cudnn_actor.engines.cpu.fast.launch import FastLaunch
from cudnn_actor.engines.cpu.fast.plan import FastPlan, FastProgram
from cudnn_actor.engines.cpu.measuring import operands, speed
from cudnn_actor.engines.cpu.scratch import aligned_bytes, footprint
from cudnn_actor.engines.cpu.sessions.choice import Sessions, fixed_or_none, session_or_reason, wants_session
from cudnn_actor.engines.cpu.sessions.plan import InsteadOfSession, SessionLaunch, SessionPlan, SessionRun
from cudnn_actor.engines.support import check_graph, check_reserves
from cudnn_actor.engines.timing import medians
from cudnn_actor.memory.container import processors, room_here
from cudnn_actor.protocol.errors import OutOfMemory
from cudnn_actor.protocol.graphs.explanation import Explanation
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.timing import PlanTimes
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["CpuEngine"]

log = Log("cudnn_actor")

_Run = Callable[..., None]
"""A run of a plan on its buffers. It takes `on_progress` and `on_piece`."""
_FOR_CONVERTED = 1 / 4
"""The share of memory that weights in float32 may take, of the memory that would be free without them.
Weights that do not fit are converted in each run."""
_BLAS_ALONE = 1
"""Threads of BLAS where the engine runs products side by side."""


class CpuEngine:
    """Runs operation graphs with NumPy, in float32 or in float64, or has ONNX Runtime run them.

    `cudnn_actor.engines.base.Engine` documents each method. Bindings are `numpy.ndarray` views of arenas.
    Nothing is asynchronous, so fences are not needed.

    Parameters
    ----------
    exact
        Whether everything is computed in float64, and rounded once to the dtype of the result. If not,
        float32 and smaller floats are computed in float32.
    threads
        How many threads compute at the same time; None for as many as this process can run. The exact engine
        leaves them to BLAS.
    sessions
        Whether ONNX Runtime runs the graphs that it has all operations of: "never", "where it pays", or
        "wherever it can". The exact engine never has it run any.
    """

    name = "cpu"
    device = "cpu"
    cudnn_version: str | None = None
    outlives_context = True
    synchronous = True

    def __init__(self, exact: bool = False, threads: int | None = 1, sessions: Sessions = "never") -> None:
        self.on_progress: Callable[[], None] = no_progress
        self._exact = exact
        self._threads = threads
        self._sessions: Sessions = "never" if exact else sessions
        self._lanes = Lanes(1)
        self._arenas = Arenas()
        self._workspace = aligned_bytes(0)
        self._programs: WeakKeyDictionary[CpuPlan | EvaluatedPlan, Program | Evaluation] = WeakKeyDictionary()
        self._fast_programs: WeakKeyDictionary[FastPlan, BoundPrograms] = WeakKeyDictionary()
        """The runs of plans on bound buffers. They keep these buffers' memory."""
        self._session_runs: WeakKeyDictionary[SessionPlan, SessionRun] = WeakKeyDictionary()
        """The runs of sessions, on any buffers. They hold bindings, too."""
        self._constants: WeakSet[Constants] = WeakSet()
        """The converted weights of expected runs, which keep them. They hold bindings, too."""
        self._weights = Converted()

    def open(self) -> None:
        """Find out how many threads there are. There is no handle; the workspace grows as plans need it."""
        self._lanes = Lanes(processors() if self._threads is None else self._threads)

    def close(self) -> None:
        """Drop arenas, workspace and bound plans. Safe to call twice."""
        self._lanes.close()
        self._session_runs.clear()
        self._drop_workspace()
        self._arenas.clear()

    def create_arena(self, arena: int, nbytes: int) -> int:
        """Create an arena of zeros. The caller owns the descriptor returned. Raises `MemoryError`."""
        return self._arenas.create(arena, nbytes)

    def map_arena(self, arena: int, fd: int, nbytes: int) -> None:
        """Map an arena that an earlier engine made, perhaps in another process."""
        self._arenas.map(arena, fd, nbytes)

    def import_arena(self, arena: int, fd: int, nbytes: int) -> None:
        """Map another service's arena for reading. Raises `EngineFailure` for what is no such memory."""
        self._arenas.map_for_reading(arena, fd, nbytes)

    def unmap_arena(self, arena: int) -> None:
        """Drop an arena; its memory is unmapped as soon as no binding in it is left."""
        self._fast_programs.clear()
        self._session_runs.clear()
        self._arenas.unmap(arena)

    def bind(self, arena: int, offset: int, spec: TensorSpec) -> np.ndarray:
        """A view of the arena: dims in N, C, spatial order, strides as the spec says."""
        return self._arenas.bind(arena, offset, spec)

    def builder(self, access: BuilderAccess | None) -> None:
        """None: plans are built when they are needed, on the engine's own thread."""

    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Plan:
        """Build a plan, and grow the workspace if necessary. Raises `UnsupportedGraph`, `OutOfMemory`."""
        check_graph(graph, "cpu", self.on_progress)
        check_reserves(graph, "cpu")
        refusal = None
        if wants_session(graph, self._sessions):
            session = session_or_reason(graph, self._lanes.count)
            if isinstance(session, SessionPlan):
                self.on_progress()
                return session
            refusal = session
        plan = None if self._exact else self._fast(graph, workspace_limit)
        plan = plan or compile_plan(graph, workspace_limit, self.on_progress)
        self.prepare(plan)
        return plan if refusal is None else InsteadOfSession(plan, refusal)

    def prepare(self, plan: Plan) -> None:
        """Grow the workspace if necessary. Raises `OutOfMemory`."""
        self._reserve(plan.workspace)

    def load(self, _plan: Plan) -> None:
        """Does nothing: a plan has all that it needs."""

    def execute(self, plan: Plan, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        """Compute at once. Raises `EngineFailure` if the buffers do not match the graph."""
        known = self._known_small(plan, buffers, scalars)
        if known is None:
            self._execute_bound(plan, buffers, scalars)
            return
        try:
            known.run(scalars, self._lanes, self.on_progress)
        except ValueError as error:
            raise _bad_bindings(error) from error

    def _execute_bound(self, plan: Plan, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        run = self._bind(plan, buffers, scalars)
        try:
            with self._limited_blas(plan):
                run(self.on_progress)
        except ValueError as error:
            raise _bad_bindings(error) from error

    def expect(
        self,
        plan: Plan,
        buffers: Sequence[np.ndarray],
        scalars: Sequence[float],
        constant: Collection[int] = (),
    ) -> Callable[[], None]:
        """A function that runs a plan on these buffers. Blocks where a session is made for constant ones."""
        if isinstance(plan, SessionPlan):
            self._check_count(plan, buffers, scalars)
            fixed = fixed_or_none(plan, buffers, constant) if constant else None
            self.on_progress()
            # One of its own: runs that take turns on other buffers would bind a shared one anew each time.
            own = fixed or plan.bind()
            if own.may_move(buffers):
                return SessionLaunch(own, buffers, scalars, self.on_progress)
            return functools.partial(own.run, buffers, scalars, self.on_progress)
        if (constants := self._convert_weights(_that_runs(plan), buffers, constant)) is not None:
            plan, buffers = constants.plan, constants.buffers
        self._bind(plan, buffers, scalars)
        run = functools.partial(self._run_with, constants, plan, scalars)
        fast = _that_runs(plan)
        if isinstance(fast, FastPlan) and FastLaunch.pays(fast, self._fast_program(fast, buffers)):
            return FastLaunch(fast, buffers, run)
        return functools.partial(run, buffers)

    def keeps(self, _plan: Plan, constant: Collection[int]) -> frozenset[int]:
        """All constant buffers: a session has them as its own, and weights of half types are converted."""
        return frozenset(constant)

    @property
    def converted_bytes(self) -> int:
        """Bytes of the weights that are kept in float32, for as long as runs with them are expected."""
        arrays = {id(array): array for constants in self._constants for array in constants.converted}
        return sum(footprint(array.shape, itemsize=array.itemsize) for array in arrays.values())

    def _run_with(
        self, constants: Constants | None, plan: Plan, scalars: Sequence[float], buffers: Sequence[np.ndarray]
    ) -> None:
        """Run a plan. Whoever may call this keeps the converted weights among its buffers."""
        del constants
        self.execute(plan, buffers, scalars)

    def _convert_weights(
        self, plan: Plan, buffers: Sequence[np.ndarray], constant: Collection[int]
    ) -> Constants | None:
        """Weights of half types in float32. None if there are none, or if they take too much memory."""
        if not isinstance(plan, FastPlan) or not is_convertible(plan, constant):
            return None
        nbytes = self._weights.missing_bytes(plan, buffers, constant)
        room, kept = room_here(), self.converted_bytes
        if room is None or kept + nbytes <= (kept + room) * _FOR_CONVERTED:
            with contextlib.suppress(MemoryError):
                found = with_constants(plan, buffers, constant, self._weights, self.on_progress)
                self._constants.add(found)
                return found
        log.info("weights.not_kept", plan=plan.tag, nbytes=nbytes)
        return None

    def measure(self, plan: Plan, graph: OperationGraph, _constant: Collection[int] = ()) -> PlanTimes:
        """Time a plan and its pieces on numbers of its own. Raises `OutOfMemory`, `EngineFailure`."""
        now = time.perf_counter_ns
        run = self._bind(plan, operands(graph), [1.0] * len(graph.scalars))

        def time_runs() -> Sequence[float]:
            marks = [now()]
            run(self.on_progress, lambda: marks.append(now()))
            pieces = (end - start for start, end in itertools.pairwise(marks))
            return [ns / 1e3 for ns in (now() - marks[0], *pieces)]

        try:
            with self._limited_blas(plan):
                run_us, *pieces_us = medians(time_runs)
        finally:  # else these numbers stay in memory
            ran: Any = _that_runs(plan)
            self._fast_programs.pop(ran, None)
            self._session_runs.pop(ran, None)
        return PlanTimes(run_us=run_us, pieces_us=tuple(pieces_us), device=speed())

    def with_candidates(
        self, plan: Plan, explanation: Explanation, graph: OperationGraph, workspace_limit: int | None
    ) -> Explanation:
        """The explanation with the one plan that there is of each piece."""
        del plan, graph, workspace_limit
        return explanation.with_only_candidates()

    def write(self, dst: np.ndarray, array: np.ndarray) -> None:
        """Copy host values in, cast within their kind. Raises `InvalidRequest` for values that do not fit."""
        transfer.write(dst, array)

    def read(self, src: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        """A C-contiguous array of the buffer's dims and dtype, new or `into`. Raises `EngineFailure`."""
        return transfer.read(src, into)

    def fetch(self, src: np.ndarray, into: np.ndarray | None = None) -> Callable[[], np.ndarray]:
        """A function that returns the result of `read`. The buffer is read at once. Raises
        `EngineFailure`."""
        values = transfer.read(src, into)
        return lambda: values

    def direct_copy(self, src: np.ndarray, dst: np.ndarray) -> Callable[[], object]:
        """A function that copies at once."""
        return functools.partial(np.copyto, dst, src, casting="no")

    def part_copy(self, src: np.ndarray, dst: np.ndarray) -> Callable[[int, int], object] | None:
        """A function that copies bytes at once; None for a buffer that is laid out otherwise."""
        if not dst.flags.c_contiguous:
            return None
        near, far = src.reshape(-1).view(np.uint8), dst.reshape(-1).view(np.uint8)
        return lambda begin, end: np.copyto(far[begin:end], near[begin:end])

    def row_copy(self, rows: np.ndarray, place: np.ndarray, *, store: bool) -> Callable[[int], None]:
        """A function that copies one row at once."""
        if store:
            return lambda row: self.copy(place, rows[row, ...])
        return lambda row: self.copy(rows[row, ...], place)

    def pin(self, _memory: memoryview) -> None:
        """Does nothing: this engine accesses all host memory directly."""

    def unpin(self, _memory: memoryview) -> None:
        """Does nothing, like `pin`."""

    def view(self, src: np.ndarray, owner: object) -> np.ndarray:
        """The binding itself, as an array whose base keeps `owner` alive."""
        return keeping(src, owner)

    def copy(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Copy between buffers of the same dims and dtype, whatever their strides."""
        np.copyto(dst, src, casting="no")

    def fill(self, dst: np.ndarray, value: float) -> None:
        """Set every element. Raises `InvalidRequest` for a value that the dtype cannot hold."""
        transfer.fill(dst, value)

    def fence(self) -> None:
        """None, since all work is done when its call returns."""

    def has_passed(self, _fence: object) -> bool:
        """True: there is nothing to wait for."""
        return True

    def probe(self) -> None:
        """Does nothing: host memory does not fail without ending the process."""

    def _fast(self, graph: OperationGraph, workspace_limit: int | None) -> Plan | None:
        """A plan in float32; None if the fast engine has none for the graph, or one over the limit."""
        plan = compile_fast(graph, self._lanes.count, self.on_progress)
        if plan is None or (workspace_limit is not None and plan.workspace > workspace_limit):
            return None
        return plan

    def _limited_blas(self, plan: Plan) -> AbstractContextManager[None]:
        """Keeps BLAS from using more threads than the engine may; fast plans run products side by side.

        A limit takes some 30 us, so a plan that runs small products alone has none.
        """
        ran = _that_runs(plan)
        if isinstance(ran, SessionPlan) or (isinstance(ran, FastPlan) and ran.has_small_products):
            return contextlib.nullcontext()
        return threads_of_blas(_BLAS_ALONE if isinstance(ran, FastPlan) else self._lanes.count)

    def _bind(self, plan: Plan, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> _Run:
        """A plan on these buffers. Raises `EngineFailure` if it takes others."""
        plan = _that_runs(plan)
        if not isinstance(plan, CpuPlan | EvaluatedPlan | FastPlan | SessionPlan):
            raise EngineFailure("FOREIGN_PLAN", f"{plan.tag} was built by another engine")
        self._check_count(plan, buffers, scalars)
        self._reserve(plan.workspace)
        if isinstance(plan, SessionPlan):
            session = self._session_runs.get(plan)
            if session is None:
                session = self._session_runs[plan] = plan.bind()
            return functools.partial(session.run, buffers, scalars)
        if isinstance(plan, FastPlan):
            return functools.partial(self._fast_program(plan, buffers).run, scalars, self._lanes)
        program = self._programs.get(plan)
        if program is None:
            program = self._programs[plan] = plan.bind(self._workspace)
        return functools.partial(program.run, buffers, scalars)

    def _known_small(
        self, plan: Plan, buffers: Sequence[np.ndarray], scalars: Sequence[float]
    ) -> FastProgram | None:
        """The program of a plan of small products that ran on these buffers before. It needs no more checks,
        and no limit of BLAS. None if there is none. For a small request, all that finds its program takes
        longer than the program.
        """
        if type(plan) is not FastPlan or not plan.has_small_products or len(scalars) != plan.scalars:
            return None
        programs = self._fast_programs.get(plan)
        return None if programs is None else programs.find_known(buffers)

    @staticmethod
    def _check_count(
        plan: CpuPlan | EvaluatedPlan | FastPlan | SessionPlan,
        buffers: Sequence[np.ndarray],
        scalars: Sequence[float],
    ) -> None:
        if len(buffers) != plan.buffers or len(scalars) != plan.scalars:
            wanted = f"{plan.buffers} buffers and {plan.scalars} scalars"
            raise EngineFailure("BAD_BINDINGS", f"{len(buffers)} and {len(scalars)} given, not {wanted}")

    def _fast_program(self, plan: FastPlan, buffers: Sequence[np.ndarray]) -> FastProgram:
        """A plan bound to these buffers: one that is bound to the same memory already, or a new one."""
        programs = self._fast_programs.get(plan)
        if programs is None:
            programs = self._fast_programs[plan] = BoundPrograms()
        try:
            return programs.of(buffers, lambda: plan.bind(buffers, self._workspace, self.on_progress))
        except ValueError as error:
            raise _bad_bindings(error) from error

    def _reserve(self, nbytes: int) -> None:
        """Make the workspace large enough. Plans are bound to the new one at their next run."""
        if nbytes <= self._workspace.nbytes:
            return
        self._drop_workspace()
        try:
            self._workspace = aligned_bytes(nbytes)
        except MemoryError as error:
            raise OutOfMemory(requested=nbytes, in_use=0, limit=None, workspace=True) from error

    def _drop_workspace(self) -> None:
        """Free the old workspace, and every program, because programs hold views of it."""
        self._programs.clear()
        self._fast_programs.clear()
        self._workspace = aligned_bytes(0)


def _bad_bindings(error: ValueError) -> EngineFailure:
    return EngineFailure("BAD_BINDINGS", str(error), blamed_operations(error))


def _that_runs(plan: Plan) -> Plan:
    """The plan, or the one that it stands for."""
    return plan.plan if isinstance(plan, InsteadOfSession) else plan
