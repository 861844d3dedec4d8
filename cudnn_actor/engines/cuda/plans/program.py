"""A plan bound to one engine: how its steps are launched, and what is replayed instead.

Launching costs more than the device takes for a small convolution, so the
shortest way counts. The frontend's own `execute` describes every tensor anew
(30 us of host time); the graph that it has lowered takes a row of addresses
(7 us), through methods that it does not promise to keep: where they are
missing, the public way serves. A run that comes again with the same addresses
and scalars is captured as a CUDA graph, and replayed (4 us).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.engines.cuda.library.failures import check_status
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans.kernels import Kernel
from cudnn_actor.engines.cuda.plans.plan import CudaPlan
from cudnn_actor.engines.cuda.plans.recipe import Buffer, GraphStep, Number, Source

__all__ = ["Program", "fast_launch", "public_launch"]

Launch = Callable[[Sequence[int], int], None]
"""Enqueues one of cuDNN's graphs: addresses in the order of its uids, and the workspace's."""

_CAPTURE_AT = 4
"""At which run with the same addresses a graph is captured: that costs as much as six runs save."""
_MOST_KEYS = 256
"""Rows of addresses that are remembered for a plan."""
_FAR_BEHIND = 256
"""A stream takes 1,024 launches before it makes the next one wait; a run is a few."""


def public_launch(graph: Any, uids: Sequence[int], handle: Any) -> Launch:
    """The frontend's documented way."""

    def launch(addresses: Sequence[int], workspace: int) -> None:
        graph.execute(dict(zip(uids, addresses, strict=True)), workspace, handle=handle)

    return launch


def fast_launch(graph: Any, uids: Sequence[int], handle: Any) -> Launch | None:
    """The way past the frontend's Python; None where this frontend does not have it."""
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
    """Which of the lowered graph's plans was built; -1, its own choice, for one restored from bytes."""
    plans = getattr(graph, "_plans", None)
    index = plans[graph._plan_index].cpp_index if plans else None
    return -1 if index is None else int(index)


class Replay:
    """A captured CUDA graph, and the call that launches it.

    The call keeps the interpreter's lock: letting it go for the 4 us that it takes, for each request of a
    batch, hands it to the event loop's thread and back each time, which costs more. It waits when the device
    is a thousand launches behind, so `launch` looks first how far that is.
    """

    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph = graph
        self._stream = stream
        self._arguments = ctypes.c_void_p(int(graph.graphExec)), ctypes.c_void_p(stream.ptr)

    def launch(self, behind: int) -> None:
        """Enqueue it. `behind` is how many launches the device has not finished, at the most."""
        if behind > _FAR_BEHIND:
            self._graph.launch(self._stream)
        else:
            check_status(_launch_graph()(*self._arguments))


@functools.cache
def _launch_graph() -> Callable[..., int]:
    launch = ctypes.PyDLL("libcuda.so.1").cuGraphLaunch
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return launch


class Program:
    """A plan with its launches, for one engine. One thread's own.

    Parameters
    ----------
    plan
        Built or restored.
    handle
        The engine's cuDNN handle, whose stream it runs on.
    stream
        That stream.
    fast
        Whether to go past the frontend's Python where that is possible.
    """

    def __init__(self, plan: CudaPlan, handle: Any, stream: Any, *, fast: bool = True) -> None:
        recipe = plan.recipe
        self.recipe = recipe
        self.stream = stream
        self._numbers = (ctypes.c_double * max(recipe.scalars, 1))()
        self._number_address = ctypes.addressof(self._numbers)
        self._steps: list[Callable[[Sequence[int], Sequence[float], int], None]] = []
        graphs = iter(plan.graphs)
        for step in recipe.steps:
            if isinstance(step, GraphStep):
                graph = next(graphs)
                launch = fast_launch(graph, step.uids, handle) if fast else None
                launch = launch or public_launch(graph, step.uids, handle)
                self._steps.append(self._graph_step(launch, step.sources, recipe.own_workspace))
            else:
                self._steps.append(self._kernel_step(Kernel(step.kernel), step.sources, recipe.own_workspace))
        self._doubles = {
            source.number: source.double
            for step in recipe.steps
            for source in step.sources
            if isinstance(source, Number)
        }
        self._times: dict[tuple[float, ...], int] = {}
        self._capturable = True
        self.replays: dict[tuple[float, ...], Replay] = {}
        """CUDA graphs by the addresses and scalars that they were captured with."""

    def _graph_step(
        self, launch: Launch, sources: Sequence[Source], scratch: int
    ) -> Callable[[Sequence[int], Sequence[float], int], None]:
        find = self._finder(sources, scratch)

        def run(pointers: Sequence[int], _: Sequence[float], workspace: int) -> None:
            launch(find(pointers, workspace), workspace)

        return run

    def _kernel_step(
        self, kernel: Kernel, sources: Sequence[Source], scratch: int
    ) -> Callable[[Sequence[int], Sequence[float], int], None]:
        find, stream = self._finder(sources, scratch), self.stream

        def run(pointers: Sequence[int], scalars: Sequence[float], workspace: int) -> None:
            with stream:
                kernel.launch(find(pointers, workspace), scalars)

        return run

    def _finder(
        self, sources: Sequence[Source], scratch: int
    ) -> Callable[[Sequence[int], int], Sequence[int]]:
        """How to find a step's addresses, given those of the plan's buffers and of the workspace."""
        # The steps hold nothing of the program itself: in a cycle, what it has captured and built would wait
        # for the collector, and then end on whatever thread that runs on.
        places = [self._find(source, scratch) for source in sources]
        numbers = self._number_address
        if places == [(0, number) for number in range(len(places))]:
            return lambda pointers, _: pointers[: len(places)]

        def find(pointers: Sequence[int], workspace: int) -> Sequence[int]:
            bases = pointers, numbers, workspace
            return [bases[0][n] if kind == 0 else bases[kind] + n for kind, n in places]  # type: ignore[operator]

        return find

    def _find(self, source: Source, scratch: int) -> tuple[int, int]:
        match source:
            case Buffer(number=number):
                return 0, number
            case Number(number=number):
                return 1, number * ctypes.sizeof(ctypes.c_double)
            case _:
                return 2, scratch + source.offset

    def run(
        self, key: tuple[float, ...], pointers: Sequence[int], scalars: Sequence[float], workspace: int
    ) -> None:
        """Enqueue a run that is no replay; remember it, and capture it once it has come often enough."""
        self._put(scalars)
        times = self._times.get(key, 0) + 1
        if times < _CAPTURE_AT or not self._capturable:
            if len(self._times) >= _MOST_KEYS:
                self._times.clear()
            self._times[key] = times
            self._launch(pointers, scalars, workspace)
            return
        del self._times[key]
        graph = self._capture(pointers, scalars, workspace)
        if graph is None:
            self._launch(pointers, scalars, workspace)
        else:
            if len(self.replays) >= _MOST_KEYS:
                self.replays.clear()
            self.replays[key] = Replay(graph, self.stream)
            graph.launch(self.stream)

    def _put(self, scalars: Sequence[float]) -> None:
        """Lay the scalars out where cuDNN reads them: it has read them when the launch returns."""
        for number, double in self._doubles.items():
            if double:
                self._numbers[number] = scalars[number]
            else:
                place = self._number_address + number * ctypes.sizeof(ctypes.c_double)
                ctypes.c_float.from_address(place).value = scalars[number]

    def _launch(self, pointers: Sequence[int], scalars: Sequence[float], workspace: int) -> None:
        for step in self._steps:
            step(pointers, scalars, workspace)

    def _capture(self, pointers: Sequence[int], scalars: Sequence[float], workspace: int) -> Any:
        """The run as a CUDA graph, not launched; None where it cannot be captured, now and later."""
        stream = self.stream
        stream.begin_capture(libraries().runtime.streamCaptureModeThreadLocal)
        try:
            self._launch(pointers, scalars, workspace)
        except Exception:  # noqa: BLE001 - whatever a plan does that a capture forbids
            self._capturable = False
        try:
            graph = stream.end_capture()
        except Exception:  # noqa: BLE001
            self._capturable = False
        return graph if self._capturable else None

    def forget_replays(self) -> None:
        """Drop what was captured: the workspace that it writes to has moved."""
        self.replays.clear()
        self._times.clear()
