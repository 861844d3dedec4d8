"""Which of the requests that wait may run: never two that conflict in another order than they came."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_actor.broker.footprints import overwritten
from cudnn_actor.broker.hazards import NOTHING, Footprint, Parked, Parking


def reads(*slots: int) -> Footprint:
    return Footprint(slots, ())


def writes(*slots: int) -> Footprint:
    return Footprint((), slots)


def all_that_may_run(parking: Parking[str]) -> list[str]:
    ran = []
    while (item := parking.take()) is not None:
        ran.append(item)
    return ran


@pytest.mark.parametrize(
    ("parked", "later", "conflict"),
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
    parked: Footprint, later: Footprint, conflict: bool
) -> None:
    parking: Parking[str] = Parking()
    parking.park("waits", parked, ready=False)
    assert parking.conflicts(later) is conflict


def test_nothing_conflicts_with_an_empty_parking() -> None:
    parking: Parking[str] = Parking()
    assert not parking
    assert not parking.conflicts(writes(1))


def test_what_parks_behind_one_that_waits_follows_it_in_order() -> None:
    parking: Parking[str] = Parking()
    first = parking.park("write", writes(1), ready=False)
    for name in ("read", "read too"):
        parking.park(name, reads(1))
    parking.park("write again", writes(1))
    assert all_that_may_run(parking) == []
    parking.make_ready(first)
    assert all_that_may_run(parking) == ["write", "read", "read too", "write again"]
    assert not parking


def test_a_writer_waits_for_those_that_read_before_it() -> None:
    parking: Parking[str] = Parking()
    reader = parking.park("read", reads(1), ready=False)
    parking.park("write", writes(1))
    assert all_that_may_run(parking) == []
    parking.make_ready(reader)
    assert all_that_may_run(parking) == ["read", "write"]


def test_a_chain_of_conflicts_holds_at_both_ends() -> None:
    parking: Parking[str] = Parking()
    first = parking.park("a to b", Footprint((1,), (2,)), ready=False)
    parking.park("b to c", Footprint((2,), (3,)))
    parking.park("c to d", Footprint((3,), (4,)))
    parking.park("apart", writes(9))
    assert all_that_may_run(parking) == ["apart"]
    parking.make_ready(first)
    assert all_that_may_run(parking) == ["a to b", "b to c", "c to d"]


def test_a_barrier_comes_when_all_before_it_have_gone_and_holds_up_nobody() -> None:
    parking: Parking[str] = Parking()
    first = parking.park("waits", writes(1), ready=False)
    parking.park_behind_all("barrier")
    parking.park("behind", writes(2))
    assert all_that_may_run(parking) == ["behind"]
    parking.make_ready(first)
    assert all_that_may_run(parking) == ["waits", "barrier"]


def test_giving_up_returns_all_in_the_order_in_which_they_came() -> None:
    parking: Parking[str] = Parking()
    parking.park("a", writes(1), ready=False)
    parking.park("b", NOTHING, ready=False)
    parking.park_behind_all("c")
    parking.park("d", reads(1))
    assert parking.clear() == ["a", "b", "c", "d"]
    assert not parking
    assert not parking.conflicts(writes(1))
    assert parking.take() is None


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
        self.parking: Parking[int] = Parking()
        self.came: list[Footprint | None] = []
        self.ran: list[int] = []
        self.unready: list[Parked[int]] = []

    def come(self, footprint: Footprint, *, ready: bool) -> None:
        number = len(self.came)
        self.came.append(footprint)
        if ready and not self.parking.conflicts(footprint):
            self.ran.append(number)
            return
        entry = self.parking.park(number, footprint, ready=ready)
        if not ready:
            self.unready.append(entry)

    def barrier(self) -> None:
        number = len(self.came)
        self.came.append(None)
        if self.parking:
            self.parking.park_behind_all(number)
        else:
            self.ran.append(number)

    def get_ready(self, choice: int) -> None:
        if self.unready:
            self.parking.make_ready(self.unready.pop(choice % len(self.unready)))

    def check(self) -> None:
        assert self.parking.may_run() is self.any_may_run()

    def run_one(self) -> None:
        number = self.parking.take()
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
        while self.parking.may_run():
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
    assert not model.parking
    place = {number: place for place, number in enumerate(model.ran)}
    for later, mine in enumerate(model.came):
        for earlier, theirs in enumerate(model.came[:later]):
            if mine is None or (theirs is not None and in_conflict(mine, theirs)):
                assert place[earlier] < place[later]


@given(st.lists(FOOTPRINTS, max_size=12))
def test_a_request_is_spoiled_when_a_later_one_writes_what_it_reads(footprints: list[Footprint]) -> None:
    expected = [
        any(set(mine.reads) & set(later.writes) for later in footprints[place + 1 :])
        for place, mine in enumerate(footprints)
    ]
    assert overwritten(footprints) == expected
