"""Deferred messages, which cannot start yet. They keep their place in the order.

A message is deferred if its plan is being built or if it conflicts with a deferred message. A `Drain` is
deferred if any message is, and an `UnloadModel` if one of its model is. All other messages start, and
overtake the deferred ones. If nothing is deferred and the plan is there, this costs one lookup.

A deferred message has not started. So its caller can still cancel it, its `DeadlineExceeded` says that it had
not started, a stop answers it with `ServiceStopped`, and after a crash the successor runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cudnn_actor.broker.deployments import ModelRun
from cudnn_actor.broker.execution_state import ExecutionState
from cudnn_actor.broker.footprints import NOTHING, Footprint, compute_footprint, memory_footprint
from cudnn_actor.broker.message_cache import CachedMessage
from cudnn_actor.broker.request_checks import bind_message
from cudnn_actor.execution.hazards import Entry, HazardQueue
from cudnn_actor.execution.planning import Outcome, Planner, TuningWay
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.lowering import Lowered
from cudnn_actor.protocol.messages.message_checks import check_warm
from cudnn_actor.protocol.messages.messages import (
    COMPUTE,
    Drain,
    Explain,
    RunModel,
    UnloadModel,
    Warm,
    WarmModel,
)
from cudnn_actor.protocol.messages.operands import operands

__all__ = ["DeferredWork"]

Defer = Callable[[], None]

_WARMING = frozenset({Warm, WarmModel, Explain})
"""Messages that are about plans."""


class _Waiting(msgspec.Struct, eq=False):
    """A deferred message, and the outcomes of the builds that it waits for."""

    item: Any
    lowered: Lowered | None = None
    missing: int = 0
    outcomes: dict[str, Outcome] = msgspec.field(default_factory=dict)


class DeferredWork:
    """The messages that one incarnation has deferred. Used by the runner's thread only.

    Parameters
    ----------
    state
        The state that running requests needs.
    planner
        The planner, which gets the plans.
    note_count
        This is called with the number of deferred messages whenever it changes.
    """

    def __init__(self, state: ExecutionState, planner: Planner, note_count: Callable[[int], None]) -> None:
        self._state = state
        self._planner = planner
        self._note_count = note_count
        self._cache = planner.cache
        self._hazards: HazardQueue[_Waiting] = HazardQueue()
        self._found: tuple[Any, Outcome] | None = None
        self._warmed: tuple[Any, dict[str, Outcome]] | None = None

    def found_for(self, item: Any) -> Outcome | None:
        """The plan or error that was looked up for the request about to run; None if none was. Clears it."""
        found, self._found = self._found, None
        return found[1] if found is not None and found[0] is item else None

    def warmed_for(self, item: Any) -> dict[str, Outcome]:
        """The outcomes, by digest, of the builds that the `Warm` or `Explain` about to run has waited for.
        Clears them."""
        warmed, self._warmed = self._warmed, None
        return warmed[1] if warmed is not None and warmed[0] is item else {}

    # Whether a message must wait.

    def defers(self, item: Any) -> Defer | None:
        """The call that defers a message which must wait; None if it can start. See `Actor.defers`."""
        message = item.message
        kind = type(message)
        if kind in COMPUTE:
            return self._for_compute(item)
        if kind is RunModel or isinstance(getattr(item, "found", None), ModelRun):
            return self._for_model(item)
        if kind in _WARMING:
            return self._for_warm(item, message)
        if not self._hazards:
            return None
        if kind is Drain or (kind is UnloadModel and self._waits_for_model(message)):
            return functools.partial(self._defer_behind_all, _Waiting(item))
        return self._for_memory(item, message)

    def _waits_for_model(self, message: UnloadModel) -> bool:
        """Whether an earlier message of the model waits: a run, or a message that adds graphs."""
        waiting = (each.item.message for each in self._hazards.items())
        return any(isinstance(each, RunModel | WarmModel) and each.model == message.model for each in waiting)

    def _for_memory(self, item: Any, message: Any) -> Defer | None:
        try:
            for ref in operands(message).values():
                self._state.memory.resolve(ref)
            footprint = memory_footprint(message)
        except Exception:  # noqa: BLE001 - the message is not deferred, and fails when it starts
            return None
        if self._hazards.conflicts(footprint):
            return functools.partial(self._defer_behind, _Waiting(item), footprint)
        return None

    def _for_compute(self, item: Any) -> Defer | None:
        try:
            cached = self._state.cached_message(item)
        except Exception:  # noqa: BLE001 - as above
            return None
        known = self._cache.find(cached.lowered.graph.digest())
        if known is None or self._hazards:
            if not self._is_valid(cached):
                return None
            return self._for_slow(item, cached, known, compute_footprint(cached.message, cached.lowered))
        self._found = item, known
        return None

    def _for_model(self, item: Any) -> Defer | None:
        try:
            run = self._state.model_run(item)
        except Exception:  # noqa: BLE001 - as above
            return None
        known = self._cache.find(run.cached.lowered.graph.digest())
        if known is None or self._hazards:
            return self._for_slow(item, run.cached, known, run.hazards, soon=True)
        self._found = item, known
        return None

    def _for_slow(
        self,
        item: Any,
        cached: CachedMessage,
        known: Outcome | None,
        footprint: Footprint,
        *,
        soon: bool = False,
    ) -> Defer | None:
        lowered = cached.lowered
        if lowered.graph.digest() in self._state.quarantined:
            return None
        waiting = _Waiting(item, lowered)
        if known is None:
            return functools.partial(
                self._defer_for_plans, waiting, footprint, [lowered.graph], [], soon=soon
            )
        if self._hazards.conflicts(footprint):
            waiting.outcomes[lowered.graph.digest()] = known
            return functools.partial(self._defer_behind, waiting, footprint)
        self._found = item, known
        return None

    def _is_valid(self, cached: CachedMessage) -> bool:
        try:
            bind_message(cached, self._state.memory)
        except Exception:  # noqa: BLE001 - as above
            return False
        return True

    def _for_warm(self, item: Any, message: Warm | WarmModel | Explain) -> Defer | None:
        if isinstance(message, Explain):
            # It shows the plan that runs take now, also a provisional one. If there is none, the preferred
            # one is built.
            tune, soon, better = None, False, False
        else:
            tune, soon, better = message.tune, message.soon, not message.soon
        try:
            graphs = self._graphs_of(message)
        except Exception:  # noqa: BLE001 - as above
            return None
        wanted = [one for one in graphs.items() if one[0] not in self._state.quarantined]
        missing = [graph for digest, graph in wanted if digest not in self._cache]
        way = None if tune is None else self._planner.way_of_tuning(tune)
        untuned = [graph for digest, graph in wanted if way and self._planner.wants_tuning(digest, way)]
        known = [graph for digest, graph in wanted if better and self._planner.is_provisional(digest)]
        if not missing and not untuned and not known:
            return None
        waiting = _Waiting(item)
        return functools.partial(
            self._defer_for_plans, waiting, NOTHING, missing, untuned, way, provisional=known, soon=soon
        )

    def _graphs_of(self, message: Warm | WarmModel | Explain) -> dict[str, OperationGraph]:
        """The graphs whose plans a message is about, by digest. Raises `InvalidRequest`."""
        if isinstance(message, Explain):
            return {message.graph.digest(): message.graph}
        if isinstance(message, WarmModel):
            return {each.graph.body.digest(): each.graph.body for each in message.graphs}
        check_warm(message)
        return self._state.graphs_to_warm(message)

    # Deferring.

    def _defer_behind(self, waiting: _Waiting, footprint: Footprint) -> None:
        self._hazards.add(waiting, footprint)
        self._tell_count()

    def _defer_behind_all(self, waiting: _Waiting) -> None:
        self._hazards.add_barrier(waiting)
        self._tell_count()

    def _defer_for_plans(
        self,
        waiting: _Waiting,
        footprint: Footprint,
        missing: list[OperationGraph],
        untuned: list[OperationGraph],
        way: TuningWay | None = None,
        *,
        provisional: Sequence[OperationGraph] = (),
        soon: bool = False,
    ) -> None:
        waiting.missing = len(missing) + len(untuned) + len(provisional)
        entry = self._hazards.add(waiting, footprint, ready=False)
        for graph in missing:
            self._planner.wait_for(graph, functools.partial(self._note_outcome, entry), soon=soon)
        for graph in provisional:
            self._planner.wait_for_better(graph, functools.partial(self._note_outcome, entry))
        for graph in untuned:
            assert way is not None, "only then something is to be tuned"
            self._planner.wait_for_tuned(graph, way, functools.partial(self._note_end, entry))
        self._tell_count()

    def _tell_count(self) -> None:
        self._note_count(len(self._hazards))

    # Resuming.

    def _note_outcome(self, entry: Entry[_Waiting], digest: str, outcome: Outcome) -> None:
        entry.item.outcomes[digest] = outcome
        self._note_end(entry)

    def _note_end(self, entry: Entry[_Waiting]) -> None:
        entry.item.missing -= 1
        if not entry.item.missing:
            self._hazards.make_ready(entry)

    @property
    def may_resume(self) -> bool:
        """Whether any deferred message can start now."""
        return bool(self._hazards) and self._hazards.may_run()

    def take(self) -> Any:
        """Remove and return the next message that can start; None if there is none."""
        waiting = self._hazards.take()
        if waiting is None:
            return None
        self._tell_count()
        if waiting.lowered is not None:
            outcome = waiting.outcomes[waiting.lowered.graph.digest()]
            self._found = waiting.item, outcome
        elif waiting.outcomes:
            self._warmed = waiting.item, waiting.outcomes
        return waiting.item

    def clear(self) -> list[Any]:
        """Remove and return all deferred messages, in order."""
        waiting: list[Any] = self._hazards.clear()
        self._tell_count()
        return [one.item for one in waiting]
