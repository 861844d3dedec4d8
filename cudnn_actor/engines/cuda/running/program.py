"""A plan bound to one engine: launches its steps, or replays a captured CUDA graph instead.

For a small convolution, the launch costs more than the device's work, so it
must be short. The frontend's own `execute` describes every tensor on each call
(30 us of host time). The frontend's lowered graph takes an array of addresses
instead (7 us), through private methods; if they are missing, the public
`execute` is used. A run that is repeated with the same addresses and scalars is
captured as a CUDA graph and replayed (4 us).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from cudnn_actor.engines.base import blame
from cudnn_actor.engines.cuda.kernels.kernel import Run, compile_run
from cudnn_actor.engines.cuda.library.failures import check_status
from cudnn_actor.engines.cuda.library.libcuda import libcuda
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS
from cudnn_actor.engines.cuda.running.barriers import barrier, waits, waits_at_start
from cudnn_actor.engines.cuda.running.full_edges import are_proved, wait_by_edge
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import (
    AnyKernel,
    Buffer,
    GraphStep,
    KernelStep,
    Number,
    OperationStep,
    ProductStep,
    Source,
)

__all__ = ["Program", "fast_launch", "public_launch"]

Launch = Callable[[Sequence[int], int], None]
"""Enqueues one of cuDNN's graphs, from the addresses in the order of its uids, and the workspace's."""

_CAPTURE_AT = 4
"""The fourth run with the same addresses is captured. A capture costs as much as six replays save."""
_MOST_KEYS = 256
"""The most sets of addresses and scalars remembered for a plan."""
_FAR_BEHIND = 256
"""The unfinished launches at which a replay releases the interpreter's lock: a stream queues 1,024 launches
before the next one blocks, and a run makes a few."""


def public_launch(graph: Any, uids: Sequence[int], handle: Any) -> Launch:
    """A launch by the frontend's documented `execute`."""

    def launch(addresses: Sequence[int], workspace: int) -> None:
        graph.execute(dict(zip(uids, addresses, strict=True)), workspace, handle=handle)

    return launch


def fast_launch(graph: Any, uids: Sequence[int], handle: Any) -> Launch | None:
    """A launch by the lowered graph, without the frontend's Python; None if this version lacks the calls."""
    lowered: Any = getattr(graph, "_lowered_graph", None)
    names = ("_execute_with_raw_ptrs", "_prepare_variant_pack_template", "_get_variant_pack_uids_sorted")
    backend_handle = getattr(handle, "backend_handle", None)
    if backend_handle is None or not all(hasattr(lowered, name) for name in names):
        return None
    lowered._prepare_variant_pack_template()
    if list(lowered._get_variant_pack_uids_sorted()) != list(uids):
        return None
    execute, count, index = lowered._execute_with_raw_ptrs, len(uids), _backend_index(graph)
    row = (ctypes.c_void_p * count)()
    address = ctypes.addressof(row)

    def launch(addresses: Sequence[int], workspace: int) -> None:
        row[:] = addresses  # type: ignore[call-overload]
        execute(address, count, workspace, backend_handle, index)

    return launch


def _backend_index(graph: Any) -> int:
    """Index of the lowered graph's plan that was built; -1, its own choice, if restored from bytes."""
    plans = getattr(graph, "_plans", None)
    index = plans[graph._plan_index].cpp_index if plans else None
    return -1 if index is None else int(index)


class Replay:
    """A captured CUDA graph, and the call that launches it.

    The call does not release the interpreter's lock. It takes 4 us; releasing the lock for each request of a
    batch would switch to the event loop's thread and back each time, which costs more. But the call blocks if
    the device is about a thousand launches behind, so `launch` uses a call that releases the lock then.
    """

    def __init__(self, graph: Any, stream: Any) -> None:
        self.graph = graph
        """CuPy's graph."""
        self._stream = stream
        self._arguments = ctypes.c_void_p(int(graph.graphExec)), ctypes.c_void_p(stream.ptr)

    def launch(self, behind: int) -> None:
        """Enqueue the graph. `behind` is an upper bound on the launches that the device has not finished."""
        if behind > _FAR_BEHIND:
            self.graph.launch(self._stream)
        else:
            check_status(_launch_graph()(*self._arguments))


@functools.cache
def _launch_graph() -> Callable[..., int]:
    """The driver's `cuGraphLaunch`, which keeps the interpreter's lock."""
    launch = libcuda().cuGraphLaunch
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return launch  # type: ignore[no-any-return]


_NUMBERS, _WORKSPACE = -2, -1
"""The places of the addresses of the numbers and of the workspace, behind those of the plan's buffers."""
_Step = Callable[[Sequence[int], Sequence[float]], None]
"""Enqueues a step, given the addresses that sources are counted from (`Program._find`), and the scalars."""


class _Waiting:
    """How those steps of a program wait that need a barrier before them. It changes only between two runs."""

    def __init__(self) -> None:
        self.by_edge = False
        """Whether a run is being captured with an edge in the place of each barrier: see `full_edges`."""


def _behind_barrier(run: _Step, stream: Any, waiting: _Waiting) -> _Step:
    """A step with a barrier before it: see `barriers`."""

    def both(bases: Sequence[int], scalars: Sequence[float]) -> None:
        if waiting.by_edge:
            wait_by_edge(stream)
        else:
            _enqueue_barrier(stream)
        run(bases, scalars)

    return both


def _enqueue_barrier(stream: Any) -> None:
    with stream:
        barrier()((1,), (1,), ())


class _Shared:
    """The functions that enqueue steps. One thread makes them for one handle, once for equal steps.

    Products are compared by value, kernels by identity: two kernels that compare equal may differ in the sign
    of a zero. Each function is kept with the handle, so that no other object gets the handle's `id`. Steps
    and graphs live as long as their plan.
    """

    def __init__(self, known: dict[Hashable, tuple[Any, Any]], handle: Any) -> None:
        self._known = known
        self._handle = handle
        self._of = threading.get_ident(), id(handle)

    def launch(self, graph: Any, uids: Sequence[int], *, fast: bool) -> Launch:
        """The launch of one of cuDNN's graphs."""

        def make() -> Launch:
            launch = fast_launch(graph, uids, self._handle) if fast else None
            return launch or public_launch(graph, uids, self._handle)

        found: Launch = self._once((GraphStep, id(graph), tuple(uids), fast), make)
        return found

    def run(self, step: OperationStep | ProductStep | KernelStep[AnyKernel]) -> Run:
        """The run of another step."""
        found: Run
        match step:
            case ProductStep(product=product):
                found = self._once(product, product.run)
            case KernelStep(kernel=kernel):
                found = self._once((KernelStep, id(kernel)), lambda: compile_run(kernel.launches()))
            case OperationStep():
                launcher = IMPLEMENTATIONS[type(step.operation)].launchers[step.launcher]
                found = launcher.make(step.operation, step.tensors, self._handle)
        return found

    def _once(self, step: Hashable, make: Callable[[], Any]) -> Any:
        """The function for a step, by the key that equal steps share. `make` makes it."""
        key = (*self._of, step)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._handle, make()
        return found[1]


class Program:
    """A plan with its launches, for one engine. Used by one thread only.

    Parameters
    ----------
    plan
        A plan that was built or restored.
    handle
        The engine's cuDNN handle, set to `stream`.
    stream
        The stream to run on.
    fast
        Whether to launch without the frontend's Python where that is possible.
    full_edges
        Whether captured runs have edges in the place of barriers; by default, where that has been proved.
    """

    def __init__(
        self,
        plan: CudaPlan,
        handle: Any,
        stream: Any,
        *,
        fast: bool = True,
        full_edges: bool | None = None,
    ) -> None:
        recipe = plan.recipe
        self.recipe = recipe
        self.stream = stream
        self._numbers = (ctypes.c_double * max(recipe.scalars, 1))()
        self._number_address = ctypes.addressof(self._numbers)
        self._steps: list[_Step] = []
        waiting = waits(recipe.steps)
        self._waits_at_start = waits_at_start(recipe.steps, waiting)
        if self._waits_at_start or any(waiting):
            barrier().compile()
        self._waiting = _Waiting()
        self._full_edges = any(waiting) and (are_proved() if full_edges is None else full_edges)
        graphs = iter(plan.graphs)
        shared = _Shared(plan.runs, handle)
        for step, waits_here in zip(recipe.steps, waiting, strict=True):
            if isinstance(step, GraphStep):
                launch = shared.launch(next(graphs), step.uids, fast=fast)
                self._steps.append(self._graph_step(launch, step.sources, recipe.own_workspace))
            else:
                run = shared.run(step)
                self._steps.append(self._step_on_stream(run, step.sources, recipe.own_workspace))
            if waits_here:
                self._steps[-1] = _behind_barrier(self._steps[-1], stream, self._waiting)
        self._doubles = {
            source.number: source.double
            for step in recipe.steps
            for source in step.sources
            if isinstance(source, Number)
        }
        self._times: dict[tuple[float, ...], int] = {}
        self._expected: set[tuple[float, ...]] = set()
        """Addresses and scalars with which many runs are expected."""
        self._capturable = True
        self.is_loaded = False
        """Whether `load` has loaded all kernels."""
        self.replays: dict[tuple[float, ...], Replay] = {}
        """CUDA graphs by the addresses and scalars that they were captured with."""

    def _graph_step(self, launch: Launch, sources: Sequence[Source], scratch: int) -> _Step:
        """The run of one of cuDNN's graphs."""
        find = self._finder(sources, scratch)

        def run(bases: Sequence[int], _: Sequence[float]) -> None:
            launch(find(bases), bases[_WORKSPACE])

        return run

    def _step_on_stream(self, run: Run, sources: Sequence[Source], scratch: int) -> _Step:
        """The run of an operation's launcher or of a kernel of our own."""
        find, stream = self._finder(sources, scratch), self.stream

        def run_on_stream(bases: Sequence[int], scalars: Sequence[float]) -> None:
            with stream:
                run(find(bases), scalars)

        return run_on_stream

    def _finder(self, sources: Sequence[Source], scratch: int) -> Callable[[Sequence[int]], Sequence[int]]:
        """A function that returns a step's addresses, for those that its sources are counted from."""
        # The steps must not refer to the program. In a reference cycle, its captured and built graphs would
        # be destroyed by the garbage collector, on whatever thread that runs.
        places = [self._find(source, scratch) for source in sources]
        if places == [(number, 0) for number in range(len(places))]:
            return lambda bases: bases[: len(places)]
        return lambda bases: [bases[base] + offset for base, offset in places]

    @staticmethod
    def _find(source: Source, scratch: int) -> tuple[int, int]:
        """The place of the address that a source is counted from (a buffer's, `_NUMBERS` or `_WORKSPACE`),
        and the source's distance from it in bytes."""
        match source:
            case Buffer(number=number, offset=offset):
                return number, offset
            case Number(number=number):
                return _NUMBERS, number * ctypes.sizeof(ctypes.c_double)
            case _:
                return _WORKSPACE, scratch + source.offset

    def run(
        self, key: tuple[float, ...], pointers: Sequence[int], scalars: Sequence[float], workspace: int
    ) -> None:
        """Enqueue a run that has no replay yet. Count it, and capture it at run number `_CAPTURE_AT`."""
        self._store_scalars(scalars)
        times = self._times.get(key, 0) + 1
        if key in self._expected and (times > 1 or self.is_loaded):
            times = _CAPTURE_AT
        if times < _CAPTURE_AT or not self._capturable:
            if len(self._times) >= _MOST_KEYS:
                self._times.clear()
            self._times[key] = times
            self._launch_behind_others(pointers, scalars, workspace)
            return
        self._times.pop(key, None)
        graph = self._capture(pointers, scalars, workspace)
        if graph is None:
            self._launch_behind_others(pointers, scalars, workspace)
        else:
            if len(self.replays) >= _MOST_KEYS:
                self.replays.clear()
            self.replays[key] = Replay(graph, self.stream)
            graph.launch(self.stream)

    def expect(self, key: tuple[float, ...]) -> None:
        """Expect many runs with these addresses and scalars: capture the second one, or, if all kernels have
        been loaded, the first."""
        if len(self._expected) >= _MOST_KEYS:
            self._expected.clear()
        self._expected.add(key)

    def launch(
        self,
        pointers: Sequence[int],
        scalars: Sequence[float],
        workspace: int,
        on_piece: Callable[[], object],
    ) -> None:
        """Enqueue a run that is neither counted nor captured. Call `on_piece` behind each piece."""
        self._store_scalars(scalars)
        bases = (*pointers, self._number_address, workspace)
        if self._waits_at_start:
            _enqueue_barrier(self.stream)
        steps = iter(self._steps)
        for part in self.recipe.parts:
            for step in itertools.islice(steps, part.steps):
                step(bases, scalars)
            on_piece()

    def _store_scalars(self, scalars: Sequence[float]) -> None:
        """Store the scalars where cuDNN reads them. It has read them when the launch returns."""
        for number, double in self._doubles.items():
            if double:
                self._numbers[number] = scalars[number]
            else:
                place = self._number_address + number * ctypes.sizeof(ctypes.c_double)
                ctypes.c_float.from_address(place).value = scalars[number]

    def _launch_behind_others(
        self, pointers: Sequence[int], scalars: Sequence[float], workspace: int
    ) -> None:
        """Enqueue the steps, behind a barrier if they need one before them."""
        if self._waits_at_start:
            _enqueue_barrier(self.stream)
        self.launch_steps(pointers, scalars, workspace)

    def launch_steps(self, pointers: Sequence[int], scalars: Sequence[float], workspace: int) -> None:
        """Enqueue the steps."""
        number = 0
        # Once for all steps: there may be thousands of each.
        bases = (*pointers, self._number_address, workspace)
        try:
            for number, step in enumerate(self._steps):  # noqa: B007 - the error names the step that fails
                step(bases, scalars)
        except Exception as error:
            blame(error, self._operations_of(number))
            raise

    def _operations_of(self, step: int) -> tuple[int, ...]:
        """The numbers of the graph's operations that a step computes."""
        for part in self.recipe.parts:
            if step < part.steps:
                return part.operations
            step -= part.steps
        return ()

    def _capture(self, pointers: Sequence[int], scalars: Sequence[float], workspace: int) -> Any:
        """The run as a CUDA graph, not launched; None if the plan cannot be captured, now or later."""
        mode = libraries().runtime.streamCaptureModeThreadLocal
        graph = self._record(pointers, scalars, workspace, mode)
        self._capturable = graph is not None
        return graph

    def _record(
        self, pointers: Sequence[int], scalars: Sequence[float], workspace: int, mode: int
    ) -> Any | None:
        """The run as a CUDA graph; None if the plan does anything that a capture forbids."""
        stream = self.stream
        stream.begin_capture(mode)
        whole = True
        self._waiting.by_edge = self._full_edges
        try:
            self.launch_steps(pointers, scalars, workspace)
        except Exception:  # noqa: BLE001 - a plan may do anything that a capture forbids
            whole = False
        finally:
            self._waiting.by_edge = False
        try:
            graph = stream.end_capture()
        except Exception:  # noqa: BLE001
            return None
        return graph if whole else None

    def load(self, address: int) -> None:
        """Load the kernels of all steps, and run none. The next run of those that are expected is captured.

        A kernel is loaded when it is first launched, or captured: cuBLASLt's first one takes some 80 ms.
        cuDNN's frontend loads its own in the same way. `address` stands for all buffers and the workspace:
        nothing is read or written there.
        """
        if self.is_loaded:
            return
        numbers = (1.0,) * self.recipe.scalars
        self._store_scalars(numbers)
        mode = libraries().runtime.streamCaptureModeRelaxed  # loading may allocate
        graph = self._record((address,) * self.recipe.buffers, numbers, address, mode)
        self.is_loaded = graph is not None

    def forget_replays(self) -> None:
        """Drop captured graphs."""
        self.replays.clear()
        self._times.clear()
