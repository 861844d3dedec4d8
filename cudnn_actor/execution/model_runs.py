"""Runs of models: the copies of inputs and outputs around a plan, enqueued together.

The runner decides which plan runs, and answers the request.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cudnn_actor.broker.message_cache import Bound, CachedMessage
from cudnn_actor.engines.base import Binding, Plan, RunAnywhere, StickyError
from cudnn_actor.execution.arriving import Arriving, Awaits, copy_of
from cudnn_actor.execution.executor import Executor
from cudnn_actor.execution.expected_runs import ExpectedRun, ExpectedRuns
from cudnn_actor.memory import Slot
from cudnn_actor.protocol.errors import CudnnActorError

__all__ = ["ModelPlaces", "ModelRuns", "Source", "Values", "collect"]

Values = Callable[[], np.ndarray]
"""Gives an output's values. Call it once a fence behind the run has passed."""

Source = Slot | np.ndarray | Arriving
"""The source of an input's values."""

_OFTEN = 64
"""The runs between the same places behind which a device runs the graph on the buffers themselves. The copies
take it 10 to 20 us, and to capture a graph for these addresses takes as long as a hundred of them."""


class ModelPlaces(msgspec.Struct, eq=False, kw_only=True):
    """The sources of the inputs of a model's run, and the targets of its outputs.

    Parameters
    ----------
    bound
        The slots on which the graph runs.
    sources, targets
        Inputs and outputs: for each, the index of its buffer among the plan's, and the source or target of
        the values. That is another buffer, or an array, which may still arrive; None for a new array.
    slots
        The buffers that the request holds.
    repeats
        Whether many runs have these same places, so that preparing the copies pays. Then no target is None.
        The runner clears it if copies cannot be prepared, or if runs may need none.
    on_host
        Whether all sources are arrays that have arrived, and all targets new arrays.
    prepared
        The calls that the runner has prepared; None if it has not yet, or cannot.
    runs
        How often these were used.
    harmless
        The `ExpectedRuns.changes` with which the targets were found to have no constant buffer among them; -1
        if they were not.
    """

    bound: Bound
    sources: Sequence[tuple[int, Source]]
    targets: Sequence[tuple[int, Slot | np.ndarray | None]]
    slots: Sequence[Slot]
    repeats: bool = False
    on_host: bool = False
    prepared: _Prepared | None = None
    runs: int = 0
    harmless: int = -1


class _Prepared(NamedTuple):
    """A plan, and the function that enqueues a whole run of it, copies included."""

    plan: Plan
    enqueue: Callable[[], object]


class ModelRuns:
    """Enqueues runs of models on an engine, for as long as it is open.

    Parameters
    ----------
    executor
        The executor, which has the engine.
    expected
        The runs that the engine has prepared.
    flush
        A function that delivers the answers so far, because the next step may take long.
    awaits
        A function that waits for a part of an array that arrives.
    """

    def __init__(
        self,
        executor: Executor[Any],
        expected: ExpectedRuns,
        flush: Callable[[], None],
        awaits: Awaits,
    ) -> None:
        self._executor, self._expected, self._flush = executor, expected, flush
        self._awaits = awaits

    def prepare(self, cached: CachedMessage, plan: Plan, places: ModelPlaces) -> _Prepared | None:
        """The calls that enqueue a run between these places; None if a value needs more than a copy, or if
        the run may need no copies. Then call `enqueue`.

        `cached`: the `RunGraph` to which the run is equivalent.
        """
        known = places.prepared
        if known is None or known.plan is not plan:
            if self._may_need_no_copies(cached, plan, places):
                places.repeats = False
            return self._prepare(cached, plan, places) if places.repeats else None
        places.runs += 1
        if places.runs == _OFTEN and not self._executor.synchronous:
            with contextlib.suppress(CudnnActorError):  # without memory for it, runs stay as they are
                self._prepare_in_place(cached, plan, places)
        return places.prepared

    def _may_need_no_copies(self, cached: CachedMessage, plan: Plan, places: ModelPlaces) -> bool:
        """Whether the engine may run the graph on the buffers and arrays of the places themselves, also in
        memory that a parent fills.

        Small values are copied: prepared copies take less time than these checks.

        Callers see the same as with copies, as in `_prepare_in_place`. The run begins when all that it reads
        has arrived. If it fails half-way, or its worker ends, what it has written is invalid or torn, or is
        written again from the same inputs: it reads nothing that it writes. The parent keeps the staging
        memory of a request as it is until its worker has answered, or has certainly ended (`PendingReclaim`).
        """
        if not self._executor.synchronous:
            return False
        slots = places.bound.slots
        nbytes = sum(slots[place].spec.nbytes for place, _ in (*places.sources, *places.targets))
        return self._expected_run(cached, plan, places).may_pay_elsewhere(nbytes)

    def _prepare(self, cached: CachedMessage, plan: Plan, places: ModelPlaces) -> _Prepared | None:
        executor, expected = self._executor, self._expected_run(cached, plan, places)
        buffers = expected.buffers
        direct, binding = executor.engine.direct_copy, executor.binding
        calls: list[Callable[[], object] | None] = []
        for place, source in places.sources:
            if isinstance(source, Arriving):
                calls.append(copy_of(executor, plan.tag, source, buffers[place], self._awaits))
            else:
                near = binding(source) if isinstance(source, Slot) else source
                calls.append(executor.call(plan.tag, direct, near, buffers[place]))
        calls.append(expected.enqueue)
        for place, target in places.targets:
            assert target is not None, "a new array is not the same for many runs"
            near = binding(target) if isinstance(target, Slot) else target
            calls.append(executor.call(plan.tag, direct, buffers[place], near))
        chosen = tuple(call for call in calls if call is not None)
        places.repeats = len(chosen) == len(calls)  # else do not try again
        places.prepared, places.runs = (_Prepared(plan, _in_turn(chosen)) if places.repeats else None), 0
        return places.prepared

    def _prepare_in_place(self, cached: CachedMessage, plan: Plan, places: ModelPlaces) -> None:
        """Let runs read and write the named buffers in place, if all values are in buffers with the layouts
        of the graph's own.

        That changes neither what a run reads and writes, nor when, as others see it: its request holds these
        buffers from before the copies until behind them, the graph changes no input (`check_model_graph`),
        and no buffer is both read and written (`Deployments.slots`). Once a buffer has ended, there are other
        places.
        """
        moved = [*places.sources, *places.targets]
        instead: dict[int, Binding] = {}
        for place, other in moved:
            if not isinstance(other, Slot) or not _lie_alike(other, places.bound.slots[place]):
                return
            instead[place] = self._executor.binding(other)
        if len(instead) < len(moved):
            return  # an input that is returned, or an output with two names
        known = self._expected_run(cached, plan, places)
        if (run := self._expected.elsewhere(known, places.bound, instead)) is not None:
            places.prepared = _Prepared(plan, run.enqueue)

    def enqueue(
        self, cached: CachedMessage, plan: Plan, places: ModelPlaces, read: list[Values]
    ) -> list[np.ndarray] | None:
        """Enqueue a run with its copies, one after the other.

        Returns the arrays among the targets if it needed no copies, and has run. Else returns None, and adds
        what gives them to `read`.
        """
        executor, tag = self._executor, plan.tag
        expected = self._expected.of(cached, places.bound, plan, places.sources)
        anywhere, sources, targets = expected.anywhere, places.sources, places.targets
        instead: dict[int, Binding] = {}
        if not places.on_host:
            sources = self._wait_for_arrays(tag, sources)
            if anywhere is not None:
                instead = self._instead(tag, anywhere, sources, targets)
        elif anywhere is not None:
            instead = executor.call(tag, anywhere.instead, sources, targets)
            if len(instead) == len(sources) + len(targets):
                executor.call(tag, anywhere.run_on, instead)
                return [instead[place] for place, _ in targets]
        self._enqueue_with_copies(tag, expected, (sources, targets), instead, read)
        return None

    def _enqueue_with_copies(
        self,
        tag: str,
        expected: ExpectedRun,
        moved: tuple[Sequence[tuple[int, Any]], Sequence[tuple[int, Any]]],
        instead: dict[int, Binding],
        read: list[Values],
    ) -> None:
        """Enqueue a run, and copies of the sources and targets in `moved` that are not among `instead`."""
        executor, buffers, (sources, targets) = self._executor, expected.buffers, moved
        engine = executor.engine
        for place, source in sources:
            if place in instead:
                continue
            if isinstance(source, Slot):
                executor.call(tag, engine.copy, executor.binding(source), buffers[place])
            else:
                executor.call(tag, engine.write, buffers[place], source)
        if expected.anywhere is not None and instead:
            executor.call(tag, expected.anywhere.run_on, instead)
        else:
            executor.call(tag, expected.enqueue)
        for place, target in targets:
            if place in instead:
                if not isinstance(target, Slot):
                    read.append(functools.partial(instead.__getitem__, place))
            elif isinstance(target, Slot):
                executor.call(tag, engine.copy, buffers[place], executor.binding(target))
            else:
                read.append(self._read_soon(tag, buffers[place], target))

    def _wait_for_arrays(
        self, tag: str, sources: Sequence[tuple[int, Source]]
    ) -> list[tuple[int, Slot | np.ndarray]]:
        """The sources, once the arrays among them are there."""
        arrived: list[tuple[int, Slot | np.ndarray]] = []
        for place, source in sources:
            if isinstance(source, Arriving):
                for number, _, _ in source.parts:
                    self._executor.call(tag, self._awaits, source, number)
                arrived.append((place, source.array))
            else:
                arrived.append((place, source))
        return arrived

    def _instead(
        self,
        tag: str,
        anywhere: RunAnywhere,
        sources: Sequence[tuple[int, Any]],
        targets: Sequence[tuple[int, Any]],
    ) -> dict[int, Binding]:
        """The bindings that a run uses in place, instead of the buffers on which it is expected."""
        executor = self._executor
        binding = executor.binding
        sources = [(place, binding(one) if isinstance(one, Slot) else one) for place, one in sources]
        targets = [(place, binding(one) if isinstance(one, Slot) else one) for place, one in targets]
        found: dict[int, Binding] = executor.call(tag, anywhere.instead, sources, targets)
        return found

    def _expected_run(self, cached: CachedMessage, plan: Plan, places: ModelPlaces) -> ExpectedRun:
        return self._expected.of(cached, places.bound, plan, places.sources)

    def _read_soon(self, tag: str, place: Binding, into: np.ndarray | None) -> Values:
        """A function that returns a buffer's values as they are after the work enqueued so far.

        Blocks if the engine has no staging memory left.
        """
        executor = self._executor
        engine = executor.engine
        if not executor.synchronous:
            fetched: Values | None = executor.call(tag, engine.fetch, place, into)
            if fetched is not None:
                return fetched
            self._flush()  # the next call waits for all that was enqueued before it
        array = executor.call(tag, engine.read, place, into)
        return lambda: array


def _in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A function that makes these calls."""

    def call_each() -> None:
        for call in calls:
            call()

    return call_each if len(calls) > 1 else calls[0]


def _lie_alike(one: Slot, other: Slot) -> bool:
    """Whether the elements of two buffers of the same dims and dtype are in the same order. Any buffer begins
    at a multiple of 256 bytes."""
    return one.spec.dtype is other.spec.dtype and one.spec.strides == other.spec.strides


def collect(read: Iterable[Values], error: Exception | None = None) -> list[np.ndarray]:
    """The values of all of these functions. Raises `error`, or the first error of one.

    Each is called even so: until then, the engine keeps memory for its values.
    """
    arrays = []
    for values in read:
        try:
            arrays.append(values())
        except StickyError:
            raise
        except Exception as failure:  # noqa: BLE001 - raised below
            error = error or failure
    if error is not None:
        raise error
    return arrays
