"""Has CuPy compile on other threads what the self-checks of larger graphs will compute with.

CuPy compiles each of its functions at the first use, which takes 0.1 to 0.2 s on a new machine. A small graph
is evaluated on the host (see `place_of`), but the same graph with more samples is evaluated on the device.
Its self-check used to wait for up to 20 functions, one after the other. So each kind of operation of a small
graph is evaluated once on the device, too, while the builder does other work.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

from cudnn_actor.actors.threads import ThreadRefused, start_thread
from cudnn_actor.engines.cuda.checking.convolution_reference import Reference
from cudnn_actor.engines.cuda.checking.evaluated_reference import OnHost, device_place, place_of
from cudnn_actor.engines.cuda.checking.self_check import BuildContext, SelfCheck
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["Rehearsals"]

_MOST_THREADS = 4
_LONGEST_WAIT_S = 5.0
"""A check that has waited for so long compiles what it needs itself."""
_CLOSE_WAIT_S = 1.0
_MOST_KINDS = 4096


class _Rehearsal(NamedTuple):
    graph: OperationGraph
    done: threading.Event


class Rehearsals:
    """What has been rehearsed, and the threads that do it. All methods are for the builder's thread.

    The threads share a queue with it, from which each takes one rehearsal after the other, and the event of
    each rehearsal, which one thread sets and the builder's waits for. CuPy's own caches are made for several
    threads: at worst, two threads compile one function.

    Parameters
    ----------
    context
        Called on each thread. Gives what graphs are evaluated with: a stream of its own.
    """

    def __init__(self, context: Callable[[], BuildContext]) -> None:
        self._context = context
        self._queue = SimpleQueue[_Rehearsal | None]()
        self._threads: list[threading.Thread] = []
        self._known: dict[Any, threading.Event] = {}
        """Kind of an operation → the end of its rehearsal."""

    def ask(self, graphs: Iterable[OperationGraph]) -> None:
        """Have those graphs rehearsed that are evaluated on the host and have new kinds of operations."""
        for graph in graphs:
            if Reference.covers(graph) or place_of(graph) is not OnHost:
                continue
            new = [kind for kind in _kinds(graph) if kind not in self._known]
            if new and len(self._known) < _MOST_KINDS:
                rehearsal = _Rehearsal(graph, threading.Event())
                self._known |= dict.fromkeys(new, rehearsal.done)
                self._queue.put(rehearsal)
                self._start_another()

    def wait_for(self, graph: OperationGraph) -> None:
        """Wait for the rehearsals of a graph's kinds of operations, if it is evaluated on the device.

        For 5 s at most. Blocks.
        """
        if Reference.covers(graph) or place_of(graph) is OnHost:
            return
        for kind in _kinds(graph):
            if kind in self._known and not self._known[kind].wait(_LONGEST_WAIT_S):
                return

    def close(self) -> None:
        """Drop what has not been begun, and wait for what has been, for 1 s at most. Safe to call twice."""
        while not self._queue.empty():
            dropped = self._queue.get()
            if dropped is not None:
                dropped.done.set()
        for _ in self._threads:
            self._queue.put(None)
        while self._threads:
            self._threads.pop().join(_CLOSE_WAIT_S)

    def _start_another(self) -> None:
        if len(self._threads) < min(_MOST_THREADS, max(1, (os.cpu_count() or 1) // 4)):
            thread = threading.Thread(target=self._run, name="cudnn-rehearsal", daemon=True)
            with contextlib.suppress(ThreadRefused):  # then `wait_for` waits, and the check compiles
                start_thread(thread)
                self._threads.append(thread)

    def _run(self) -> None:
        context: BuildContext | None = None
        while (rehearsal := self._queue.get()) is not None:
            with contextlib.suppress(Exception):  # the self-check itself meets what is wrong, and tells
                context = context or self._context()
                _rehearse(rehearsal.graph, context)
            rehearsal.done.set()


def _rehearse(graph: OperationGraph, context: BuildContext) -> None:
    check = SelfCheck(graph, context, place=device_place(graph))
    try:
        check.rehearse()
    finally:
        check.close()


def _kinds(graph: OperationGraph) -> Iterator[Any]:
    """What decides by which functions each operation is evaluated; dims do not."""
    for operation in graph.operations:
        operands = (graph.tensor(uid) for _, uid in operation.named())
        found = tuple((tensor.dtype, len(tensor.dims)) for tensor in operands)
        yield type(operation), getattr(operation, "mode", None), found
