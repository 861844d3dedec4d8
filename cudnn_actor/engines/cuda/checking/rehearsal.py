"""Compiles, between builds, the functions of CuPy that the self-checks of larger graphs will need.

CuPy compiles each of its functions at the first use, which takes 0.1 to 0.2 s on a new machine. A small graph
is evaluated on the host (see `evaluator_of`), but the same graph with more samples is evaluated on the
device. Its self-check used to wait for up to 20 functions, one after the other. So after a build, each new
kind of operation is evaluated once on the device, too, on other threads. Until that has been done, a part of
a larger graph is evaluated, on the host.

A build that a model's run waits for evaluates a graph on the device only if another build has evaluated one
of the same form there. A rehearsal is not enough: which functions CuPy compiles depends on which dims are 1,
too, and those that load whole tensors are not rehearsed. To compile one takes longer than the host takes.

These threads pause while something is built. Each holds the interpreter's lock for much of its time, and a
build waits for that lock after each of its many short calls: beside rehearsals, first answers took up to 1.7
times as long.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

from cudnn_actor.actors.threads import ThreadRefused, start_thread
from cudnn_actor.engines.cuda.checking.convolution_reference import Reference
from cudnn_actor.engines.cuda.checking.evaluated_reference import (
    Evaluator,
    OnDevice,
    OnHost,
    OnHostInPart,
    device_evaluator,
    evaluator_of,
    small_part,
)
from cudnn_actor.engines.cuda.checking.self_check import BuildContext, SelfCheck
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["Rehearsals", "kinds_of", "rehearse"]

_MOST_THREADS = 4
_CLOSE_WAIT_S = 1.0
_MOST_KINDS = 4096


class _Closed(BaseException):
    """Raised in a rehearsal to abandon it. Not an `Exception`: nothing between takes it for a failure."""


class Rehearsals:
    """The rehearsals so far, and the threads that rehearse. All methods are for the builder's thread.

    The threads share with it a queue, from which each takes one graph after the other; an event, which is
    set while nothing is built; and a flag, which only `close` sets, before it sets the event. CuPy's own
    caches are made for several threads: at worst, two threads compile one function.

    Parameters
    ----------
    context
        Called on each thread. Returns a context with a stream of the thread's own.
    """

    def __init__(self, context: Callable[[], BuildContext]) -> None:
        self._context = context
        self._queue = SimpleQueue[OperationGraph | None]()
        self._threads: list[threading.Thread] = []
        self._known: set[Any] = set()
        """The kinds of operations whose rehearsals have been queued."""
        self.ready: set[Any] = set()
        """The kinds that have been evaluated on the device. Only the threads add to it. If the builder's
        thread looks too early, the host evaluates a part of a graph once more."""
        self._evaluated: set[Any] = set()
        """The forms of graphs that builds have evaluated on the device. Only the builder's thread uses it."""
        self._may_go_on = threading.Event()
        self._may_go_on.set()
        self._closed = False

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Pause the threads, each at the next function of CuPy that it looks up, during the `with` block."""
        self._may_go_on.clear()
        try:
            yield
        finally:
            self._may_go_on.set()

    def evaluator(self, graph: OperationGraph) -> Evaluator:
        """The class that evaluates a graph now: see `evaluator_of`."""
        return evaluator_of(graph, ready=self.ready.issuperset(kinds_of(graph)))

    def evaluator_soon(self, graph: OperationGraph) -> Evaluator:
        """The class that evaluates a graph now without any compilation, as far as that is known."""
        return evaluator_of(graph, ready=_form(graph) in self._evaluated)

    def note(self, graph: OperationGraph) -> None:
        """Note that a build has evaluated a graph by its `evaluator`."""
        if issubclass(self.evaluator(graph), OnDevice) and len(self._evaluated) < _MOST_KINDS:
            self._evaluated.add(_form(graph))

    def ask(self, graphs: Iterable[OperationGraph]) -> None:
        """Queue a rehearsal of each graph that was evaluated on the host and has new kinds of operations.

        For a large graph, the part that was evaluated is rehearsed.
        """
        for graph in graphs:
            if Reference.covers(graph):
                continue
            evaluator = self.evaluator(graph)
            new = set(kinds_of(graph)) - self._known
            if issubclass(evaluator, OnHost) and new and len(self._known) < _MOST_KINDS:
                self._known |= new
                self._queue.put(small_part(graph) if evaluator is OnHostInPart else graph)
                self._start_another()

    def close(self) -> None:
        """Abandon all rehearsals, and wait for each thread, for 1 s at most. Safe to call twice."""
        self._closed = True
        self._may_go_on.set()
        for _ in self._threads:
            self._queue.put(None)
        while self._threads:
            self._threads.pop().join(_CLOSE_WAIT_S)

    def _start_another(self) -> None:
        if len(self._threads) < min(_MOST_THREADS, max(1, (os.cpu_count() or 1) // 4)):
            thread = threading.Thread(target=self._run, name="cudnn-rehearsal", daemon=True)
            with contextlib.suppress(ThreadRefused):  # then checks compile, as they do without rehearsals
                start_thread(thread)
                self._threads.append(thread)

    def _run(self) -> None:
        context: BuildContext | None = None
        while (graph := self._queue.get()) is not None:
            with contextlib.suppress(Exception):  # the self-check itself meets the same error, and reports it
                try:
                    self.await_pause()
                    context = context or self._context()
                    rehearse(graph, context, self._with_pauses(device_evaluator(graph)))
                    self.ready.update(kinds_of(graph))
                except _Closed:
                    return

    def await_pause(self) -> None:
        """Wait while something is built. Raises `_Closed`."""
        self._may_go_on.wait()
        if self._closed:
            raise _Closed

    def _with_pauses(self, evaluator: type[OnDevice]) -> type[OnDevice]:
        """The evaluator, but looking up one of its functions waits while something is built."""
        library, await_pause = evaluator.xp, self.await_pause

        class Waiting:
            def __getattr__(self, name: str) -> Any:
                await_pause()
                return getattr(library, name)

        return type("Slowed", (evaluator,), {"xp": Waiting()})


def rehearse(graph: OperationGraph, context: BuildContext, evaluator: type[OnDevice]) -> None:
    """Run the self-check of a graph without a plan, so that the device is ready to evaluate it."""
    check = SelfCheck(graph, context, evaluator=evaluator)
    try:
        check.rehearse()
    finally:
        check.close()


def kinds_of(graph: OperationGraph) -> Iterator[Any]:
    """Yields the kind of each operation, which decides which of CuPy's functions evaluate it; see `_form`."""
    for operation in graph.operations:
        operands = (graph.tensor(uid) for _, uid in operation.named())
        found = tuple((tensor.dtype, len(tensor.dims)) for tensor in operands)
        yield type(operation), getattr(operation, "mode", None), found


def _form(graph: OperationGraph) -> Any:
    """The key of the functions that evaluate a graph: its operations' kinds, and which dims are 1."""
    ones = tuple(tuple(size == 1 for size in tensor.dims) for tensor in graph.tensors)
    return tuple(kinds_of(graph)), ones
