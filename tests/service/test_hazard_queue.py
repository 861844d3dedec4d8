"""Which of the requests that wait may run: never two that conflict in another order than they came."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_actor.broker.footprints import NOTHING, Footprint, are_inputs_overwritten
from cudnn_actor.execution.hazards import Entry, HazardQueue


def reads(*slots: int) -> Footprint:
    return Footprint(slots, ())


def writes(*slots: int) -> Footprint:
    return Footprint((), slots)


def all_that_may_run(queue: HazardQueue[str]) -> list[str]:
    ran = []
    while (item := queue.take()) is not None:
        ran.append(item)
    return ran


@pytest.mark.parametrize(
    ("first", "later", "conflict"),
    [
        (reads(1), reads(1), False),
        (reads(1), writes(1), True),
        (writes(1), reads(1), True),
        (writes(1), writes(1), True),
        (writes(1), writes(2), False),
        (Footprint((1,), (2,)), Footprint((1,), (3,)), False),
        (Footprint((1,), (2,)), Footprint((2,), (3,)), True),
        (writes(1), NOTHING, False),
    ],
)
def test_two_conflict_when_one_writes_what_the_other_uses(
    first: Footprint, later: Footprint, conflict: bool
) -> None:
    queue: HazardQueue[str] = HazardQueue()
    queue.add("waits", first, ready=False)
    assert queue.conflicts(later) is conflict


def test_nothing_conflicts_with_an_empty_parking() -> None:
    queue: HazardQueue[str] = HazardQueue()
    assert not queue
    assert not queue.conflicts(writes(1))


def test_what_parks_behind_one_that_waits_follows_it_in_order() -> None:
    queue: HazardQueue[str] = HazardQueue()
    first = queue.add("write", writes(1), ready=False)
    for name in ("read", "read too"):
        queue.add(name, reads(1))
    queue.add("write again", writes(1))
    assert all_that_may_run(queue) == []
    queue.make_ready(first)
    assert all_that_may_run(queue) == ["write", "read", "read too", "write again"]
    assert not queue


def test_a_writer_waits_for_those_that_read_before_it() -> None:
    queue: HazardQueue[str] = HazardQueue()
    reader = queue.add("read", reads(1), ready=False)
    queue.add("write", writes(1))
    assert all_that_may_run(queue) == []
    queue.make_ready(reader)
    assert all_that_may_run(queue) == ["read", "write"]


def test_a_chain_of_conflicts_holds_at_both_ends() -> None:
    queue: HazardQueue[str] = HazardQueue()
    first = queue.add("a to b", Footprint((1,), (2,)), ready=False)
    queue.add("b to c", Footprint((2,), (3,)))
    queue.add("c to d", Footprint((3,), (4,)))
    queue.add("apart", writes(9))
    assert all_that_may_run(queue) == ["apart"]
    queue.make_ready(first)
    assert all_that_may_run(queue) == ["a to b", "b to c", "c to d"]


def test_a_barrier_comes_when_all_before_it_have_gone_and_holds_up_nobody() -> None:
    queue: HazardQueue[str] = HazardQueue()
    first = queue.add("waits", writes(1), ready=False)
    queue.add_barrier("barrier")
    queue.add("behind", writes(2))
    assert all_that_may_run(queue) == ["behind"]
    queue.make_ready(first)
    assert all_that_may_run(queue) == ["waits", "barrier"]


def test_giving_up_returns_all_in_the_order_in_which_they_came() -> None:
    queue: HazardQueue[str] = HazardQueue()
    queue.add("a", writes(1), ready=False)
    queue.add("b", NOTHING, ready=False)
    queue.add_barrier("c")
    queue.add("d", reads(1))
    assert queue.clear() == ["a", "b", "c", "d"]
    assert not queue
    assert not queue.conflicts(writes(1))
    assert queue.take() is None


class Step(NamedTuple):
    """One thing of a random life: a request comes, or one that waits gets ready, or one may run."""

    what: str
    footprint: Footprint
    ready: bool
    choice: int


SLOTS = st.frozensets(st.integers(0, 4), max_size=3)
FOOTPRINTS = st.builds(lambda r, w: Footprint(r - w, w), SLOTS, SLOTS)
STEPS = st.builds(
    Step,
    st.sampled_from(["comes", "comes", "comes", "barrier", "ready", "runs"]),
    FOOTPRINTS,
    st.booleans(),
    st.integers(0, 99),
)


def in_conflict(one: Footprint, other: Footprint) -> bool:
    mine, theirs = set(one.writes), set(other.writes)
    return bool(mine & theirs or mine & set(other.reads) or theirs & set(one.reads))


class Model:
    """Takes requests as the actor does: what need not park runs at once."""

    def __init__(self) -> None:
        self.queue: HazardQueue[int] = HazardQueue()
        self.came: list[Footprint | None] = []
        self.ran: list[int] = []
        self.unready: list[Entry[int]] = []

    def come(self, footprint: Footprint, *, ready: bool) -> None:
        number = len(self.came)
        self.came.append(footprint)
        if ready and not self.queue.conflicts(footprint):
            self.ran.append(number)
            return
        entry = self.queue.add(number, footprint, ready=ready)
        if not ready:
            self.unready.append(entry)

    def barrier(self) -> None:
        number = len(self.came)
        self.came.append(None)
        if self.queue:
            self.queue.add_barrier(number)
        else:
            self.ran.append(number)

    def get_ready(self, choice: int) -> None:
        if self.unready:
            self.queue.make_ready(self.unready.pop(choice % len(self.unready)))

    def check(self) -> None:
        assert self.queue.may_run() is self.any_may_run()

    def run_one(self) -> None:
        number = self.queue.take()
        if number is not None:
            self.ran.append(number)

    def any_may_run(self) -> bool:
        """Whether any may, by the definition."""
        waiting = [n for n in range(len(self.came)) if n not in self.ran]
        unready = {entry.item for entry in self.unready}
        return any(n not in unready and not self.held_up(n, waiting) for n in waiting)

    def held_up(self, number: int, waiting: list[int]) -> bool:
        mine = self.came[number]
        for other in waiting:
            if other >= number:
                return False
            theirs = self.came[other]
            if mine is None or (theirs is not None and in_conflict(mine, theirs)):
                return True
        return False

    def finish(self) -> None:
        while self.unready:
            self.get_ready(0)
        while self.queue.may_run():
            self.run_one()
            self.check()


@given(st.lists(STEPS, min_size=10, max_size=60))
def test_every_order_of_running_keeps_conflicting_requests_in_order_and_none_waits_for_ever(
    steps: list[Step],
) -> None:
    model = Model()
    for step in steps:
        match step.what:
            case "comes":
                model.come(step.footprint, ready=step.ready)
            case "barrier":
                model.barrier()
            case "ready":
                model.get_ready(step.choice)
            case "runs":
                model.run_one()
        model.check()
    model.finish()
    assert sorted(model.ran) == list(range(len(model.came))), "somebody waits for ever"
    assert not model.queue
    place = {number: place for place, number in enumerate(model.ran)}
    for later, mine in enumerate(model.came):
        for earlier, theirs in enumerate(model.came[:later]):
            if mine is None or (theirs is not None and in_conflict(mine, theirs)):
                assert place[earlier] < place[later]


@given(st.lists(FOOTPRINTS, max_size=12))
def test_an_input_is_overwritten_when_a_later_request_writes_it(footprints: list[Footprint]) -> None:
    expected = [
        any(set(mine.reads) & set(later.writes) for later in footprints[place + 1 :])
        for place, mine in enumerate(footprints)
    ]
    assert are_inputs_overwritten(footprints) == expected
