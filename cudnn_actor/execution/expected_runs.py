"""The runs that an engine has prepared for the graphs of models, each of which runs many times on buffers of
its own.

**Constant buffers.** Runs of a graph only read its weights. An engine may read them once, rearrange them, and
compute with that (`Engine.expect`), so it must be told before they are written. A device reads them in the
order of enqueued work, at the first run after a write. Why no run ever computes with old weights:

- A write that goes through the runner is noted first (`note_writes`), and the next run is prepared again. The
  runner has one thread, so nothing comes in between. Every method of it that writes to a buffer says so.
- The parent of a worker maps the arenas, too. It writes straight into a buffer only if nothing holds that
  (`isolation.process.parent.values`), and a graph holds its buffers as long as it can be run
  (`Deployed.hold`). What is written before that is there when the graph is first prepared, by a `WarmModel`
  or by its first run. What is written after that is read by the next graph's preparation.
- A view of a buffer may be written at any time, so a buffer that has been viewed is never constant.
- Prepared runs end with the incarnation: the next one reads the buffers again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from cudnn_actor.broker.message_cache import Bound, CachedMessage
from cudnn_actor.engines.base import Binding, Plan, RunAnywhere
from cudnn_actor.execution.executor import Executor
from cudnn_actor.memory import Slot

__all__ = ["ExpectedRun", "ExpectedRuns", "written_slots"]


_MOST_ELSEWHERE = 8
"""How many other sets of buffers a graph is expected on at a time. An engine may capture a graph for each."""


class ExpectedRun:
    """A plan for a model's graph, and the engine's own buffers for it.

    Parameters
    ----------
    plan
        The plan.
    slots, buffers
        The slots of the buffers on which it runs, and the engine's bindings of these.
    constant
        The places of the buffers whose values the engine may keep.
    expect
        This returns a function that enqueues a run on these buffers. It may read the constant ones, and may
        take long.
    """

    def __init__(
        self,
        plan: Plan,
        slots: Sequence[Slot],
        buffers: list[Binding],
        constant: frozenset[int],
        expect: Callable[[list[Binding]], Callable[[], None]],
    ) -> None:
        self.plan = plan
        self.slots = slots
        self.buffers = buffers
        self.constant = constant
        self._expect = expect
        self._launch: Callable[[], None] | None = None
        """The function that enqueues a run; None if it has to be prepared again. Nothing here refers back to
        this object: in a reference cycle, its plan would be destroyed by the garbage collector, on whatever
        thread that runs."""
        self.anywhere: RunAnywhere | None = None
        """The engine's run on other buffers; None if there is none, or if it has to be prepared again."""
        self._elsewhere: WeakSet[ExpectedRun] = WeakSet()
        self._prepare()

    def _prepare(self) -> Callable[[], None]:
        launch = self._launch = self._expect(self.buffers)
        self.anywhere = launch if isinstance(launch, RunAnywhere) else None
        return launch

    def may_pay_elsewhere(self, nbytes: int) -> bool:
        """Whether it may pay to run it on other buffers that have `nbytes` bytes together. It is prepared for
        that, if it has to be."""
        if self._launch is None:
            self._prepare()
        return self.anywhere is not None and self.anywhere.may_pay(nbytes)

    def enqueue(self) -> None:
        """Enqueue a run."""
        launch = self._launch
        if launch is None:
            launch = self._prepare()
        launch()

    def forget_values(self) -> None:
        """Let the engine read the constant buffers again, when the next run is enqueued."""
        self._launch = self.anywhere = None
        for other in self._elsewhere:
            other.forget_values()

    def elsewhere(self, instead: Mapping[int, Binding], slots: Sequence[Slot]) -> ExpectedRun | None:
        """A run of the same plan on other buffers in place of some; None if the plan is expected on many
        others already.

        It counts as long as it is kept and `slots` is the graph's `Bound.slots`. Once any buffer has ended,
        that is another object, and the keeper looks its buffers up again.
        """
        if sum(other.slots is slots for other in self._elsewhere) >= _MOST_ELSEWHERE:
            return None
        buffers = [instead.get(place, buffer) for place, buffer in enumerate(self.buffers)]
        other = ExpectedRun(self.plan, slots, buffers, self.constant, self._expect)
        self._elsewhere.add(other)
        return other


class ExpectedRuns:
    """The runs that one engine has prepared, as long as it is open and the graphs exist.

    Parameters
    ----------
    executor
        The executor, which has the engine.
    catch_up
        A function that answers the requests that were enqueued before a slow step.
    """

    def __init__(self, executor: Executor[Any], catch_up: Callable[[], None]) -> None:
        self._executor, self._catch_up = executor, catch_up
        self._known: WeakKeyDictionary[CachedMessage, ExpectedRun] = WeakKeyDictionary()
        self._constants: set[int] = set()
        """The numbers of the slots that are constant for some graph, and of others that were."""
        self.changes = 0
        """How often slots were added to `_constants`."""

    def of(
        self, cached: CachedMessage, bound: Bound, plan: Plan, sources: Sequence[tuple[int, object]]
    ) -> ExpectedRun:
        """A plan for a model's graph on its buffers. `sources`: the places that each run is copied to first,
        and what is copied there.

        A prepared run stays if a buffer of another graph has ended, so that `bound` is another object: the
        graph's own buffers are held.
        """
        known = self._known.get(cached)
        if known is not None and known.plan is plan and known.slots == bound.slots:
            for place, _ in sources:
                if place in known.constant:
                    known = None
                    break
        else:
            known = None
        if known is None:
            copied = [place for place, _ in sources]
            self._catch_up()
            known = self._known[cached] = self._make(cached, bound, plan, copied)
            self._constants.update(bound.slots[place].index for place in known.constant)
            self.changes += 1
        return known

    @property
    def has_constants(self) -> bool:
        """Whether the engine may keep values of any buffer."""
        return bool(self._constants)

    def note_writes(self, slots: Iterable[Slot]) -> bool:
        """Note that buffers will be written next: the engine forgets the values that it keeps of them.

        Returns whether any is constant. If not, none of them is as long as `changes` stays the same.
        """
        if not self._constants:
            return False
        numbers = self._constants.intersection([slot.index for slot in slots])
        if not numbers:
            return False
        for known in self._known.values():
            if any(known.slots[place].index in numbers for place in known.constant):
                known.forget_values()
        return True

    def elsewhere(
        self, known: ExpectedRun, bound: Bound, instead: Mapping[int, Binding]
    ) -> ExpectedRun | None:
        """The plan of an expected run on other buffers: see `ExpectedRun.elsewhere`.

        Its first run may take as long as that of a new plan.
        """
        self._catch_up()
        return known.elsewhere(instead, bound.slots)

    def note_view(self, slot: Slot) -> None:
        """Note that a caller gets a view of a buffer. Views exist only on a thread, where nothing else keeps
        an `ExpectedRun`."""
        slot.viewed = True
        for cached, known in tuple(self._known.items()):
            if any(known.slots[place] is slot for place in known.constant):
                del self._known[cached]

    def _make(self, cached: CachedMessage, bound: Bound, plan: Plan, copied: Collection[int]) -> ExpectedRun:
        executor = self._executor
        buffers = [executor.binding(slot) for slot in bound.slots]
        constant = self._constant_places(cached, bound.slots, plan, copied)
        prepare = functools.partial(_prepare, executor, plan, bound.scalars, constant)
        return ExpectedRun(plan, bound.slots, buffers, constant, prepare)

    def _constant_places(
        self, cached: CachedMessage, slots: Sequence[Slot], plan: Plan, copied: Collection[int]
    ) -> frozenset[int]:
        results = {slot.index for slot in written_slots(cached, slots)}  # some overwrite an input
        constant = [
            place
            for place, slot in enumerate(slots)
            if place not in copied and slot.index not in results and not slot.viewed
        ]
        return self._executor.engine.keeps(plan, constant)


def _prepare(
    executor: Executor[Any],
    plan: Plan,
    scalars: Sequence[float],
    constant: frozenset[int],
    buffers: list[Binding],
) -> Callable[[], None]:
    expect = executor.engine.expect
    launch: Callable[[], None] = executor.call(plan.tag, expect, plan, buffers, scalars, constant)
    return launch


def written_slots(cached: CachedMessage, slots: Sequence[Slot]) -> list[Slot]:
    """The slots of those buffers of a request's plan that the request writes."""
    written = frozenset(cached.lowered.outputs)
    return [slot for name, slot in zip(cached.lowered.buffers, slots, strict=True) if name in written]
