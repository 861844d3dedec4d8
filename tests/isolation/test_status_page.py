"""The page that a worker and its parent share: who wins when a request is withdrawn as it begins."""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from cudnn_actor.isolation.process.status import StatusPage

from ..forked_programs import Program
from ..patience import PATIENCE_S
from .claimant import RAN, Turns, turns_bytes

MAXIMUM = (1 << 64) - 1


@pytest.fixture
def page() -> Iterator[StatusPage]:
    page = StatusPage.create(8)
    yield page
    page.close()
    page.close()


@pytest.fixture
def worker(page: StatusPage) -> Iterator[StatusPage]:
    """The same page, mapped once more."""
    worker = StatusPage.attach(page.fd, 8)
    yield worker
    worker.close()


def test_a_request_that_nobody_withdraws_begins(page: StatusPage, worker: StatusPage) -> None:
    assert not page.has_begun(3, 7)
    assert worker.begin(3, 7)
    assert page.has_begun(3, 7)


def test_a_withdrawn_request_is_not_begun(page: StatusPage, worker: StatusPage) -> None:
    assert page.withdraw(3, 7)
    assert not worker.begin(3, 7)


def test_a_request_that_has_begun_is_not_withdrawn(page: StatusPage, worker: StatusPage) -> None:
    assert worker.begin(3, 7)
    assert not page.withdraw(3, 7)


def test_withdrawing_twice_says_the_same(page: StatusPage) -> None:
    assert page.withdraw(3, 7)
    assert page.withdraw(3, 7)


def test_a_place_takes_no_notice_of_its_former_occupant(page: StatusPage, worker: StatusPage) -> None:
    assert page.withdraw(3, 7)
    assert not worker.begin(3, 7)
    assert worker.begin(3, 8)
    assert not page.has_begun(3, 7)
    assert page.withdraw(3, 9)
    assert not worker.begin(3, 9)


def test_places_do_not_touch_each_other(page: StatusPage, worker: StatusPage) -> None:
    for place in range(0, 8, 2):
        assert page.withdraw(place, MAXIMUM)
    assert [worker.begin(place, MAXIMUM) for place in range(8)] == [False, True] * 4


def test_the_worker_counts_what_it_has_begun_or_left(page: StatusPage, worker: StatusPage) -> None:
    assert page.begun_count == 0
    worker.begin(0, 1)
    page.withdraw(1, 2)
    worker.begin(1, 2)
    worker.begin(2, 3)
    assert page.begun_count == 3


def test_signs_of_life_reach_the_parent(page: StatusPage, worker: StatusPage) -> None:
    assert (page.beat_ns, page.since_ns) == (0, 0)
    now_ns = time.monotonic_ns()
    worker.beat_ns = now_ns
    worker.since_ns = now_ns - 5
    assert (page.beat_ns, page.since_ns) == (now_ns, now_ns - 5)
    worker.since_ns = 0
    assert page.since_ns == 0


def test_a_time_yet_to_come_means_nothing(page: StatusPage, worker: StatusPage) -> None:
    worker.beat_ns = worker.since_ns = MAXIMUM
    assert (page.beat_ns, page.since_ns) == (0, 0)


def test_each_word_is_at_a_place_of_its_own(page: StatusPage, worker: StatusPage) -> None:
    worker.beat_ns, worker.since_ns = 1, 2
    for place in range(8):
        page.withdraw(place, 100 + place)
        worker.begin(place, 200 + place)
    assert (page.beat_ns, page.since_ns, page.begun_count) == (1, 2, 8)
    assert all(page.has_begun(place, 200 + place) for place in range(8))


@pytest.mark.parametrize("window", [1, 8, 256, 1000])
def test_what_the_parent_writes_lies_on_pages_of_its_own(window: int) -> None:
    page = StatusPage.create(window)
    with mmap.mmap(page.fd, 0) as raw:
        before = bytes(raw)
        for place in range(window):
            page.withdraw(place, MAXIMUM)
        parents = {n // mmap.PAGESIZE for n, byte in enumerate(bytes(raw)) if byte != before[n]}
        before = bytes(raw)
        for place in range(window):
            page.begin(place, MAXIMUM)
        page.beat_ns = page.since_ns = MAXIMUM
        workers = {n // mmap.PAGESIZE for n, byte in enumerate(bytes(raw)) if byte != before[n]}
    assert parents
    assert workers
    assert not parents & workers
    page.close()


def test_a_worker_cannot_cut_the_page_off(page: StatusPage) -> None:
    for nbytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(page.fd, nbytes)
    assert fcntl.fcntl(page.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def test_a_page_is_not_attached_for_a_larger_window(page: StatusPage) -> None:
    with pytest.raises(ValueError, match="length"):
        StatusPage.attach(page.fd, 1 << 16)


def test_of_a_closed_page_nobody_can_know(page: StatusPage, worker: StatusPage) -> None:
    worker.begin(0, 1)
    worker.beat_ns = worker.since_ns = 1
    page.close()
    assert (page.begun_count, page.beat_ns, page.since_ns) == (0, 0, 0)
    assert not page.withdraw(3, 7)
    assert page.has_begun(3, 7)


def test_a_page_may_be_closed_while_others_withdraw() -> None:
    page = StatusPage.create(8)
    ready = threading.Barrier(3)
    promised: list[bool] = []

    def withdraw() -> None:
        ready.wait()
        while page.withdraw(3, 7):
            promised.append(True)

    threads = [threading.Thread(target=withdraw) for _ in range(2)]
    for thread in threads:
        thread.start()
    ready.wait()
    page.close()
    for thread in threads:
        thread.join()


# The claim, in every order in which its steps can come.


@dataclass
class World:
    """Memory of one place, and the store that each side's processor has not let out yet."""

    begun: int = 0
    withdrawn: int = 0
    buffered: dict[str, int] = field(default_factory=dict)
    ran: set[int] = field(default_factory=set)
    promised: set[int] = field(default_factory=set)

    def store(self, name: str, number: int) -> None:
        self.buffered[name] = number

    def let_out(self, name: str) -> None:
        if name in self.buffered:
            setattr(self, name, self.buffered.pop(name))


@dataclass(frozen=True)
class Side:
    """One side's claim on a request: which word it writes, which it looks at, and what it concludes."""

    mine: str
    theirs: str
    number: int

    def steps(self, *, barrier: bool) -> list[str]:
        """`out`: the processor lets the store out. The barrier is that it has by the time of the look."""
        return ["store", "out", "look"] if barrier else ["store", "look", "out"]

    def take(self, step: str, world: World) -> None:
        if step == "store":
            world.store(self.mine, self.number)
        elif step == "out":
            world.let_out(self.mine)
        elif getattr(world, self.theirs) != self.number:
            (world.ran if self.mine == "begun" else world.promised).add(self.number)


def worlds(first: list[tuple[Side, str]], second: list[tuple[Side, str]]) -> Iterator[World]:
    """What comes of two sequences of steps in each order that keeps either."""
    length = len(first) + len(second)
    for chosen in itertools.combinations(range(length), len(first)):
        world, one, other = World(), iter(first), iter(second)
        for turn in range(length):
            side, step = next(one if turn in chosen else other)
            side.take(step, world)
        yield world


def claims(side: Side, *, barrier: bool = True) -> list[tuple[Side, str]]:
    return [(side, step) for step in side.steps(barrier=barrier)]


def test_no_order_starts_what_was_promised_never_to_start() -> None:
    ends = list(worlds(claims(Side("begun", "withdrawn", 7)), claims(Side("withdrawn", "begun", 7))))
    assert len(ends) == 20
    assert not any(world.ran & world.promised for world in ends)
    assert {(bool(world.ran), bool(world.promised)) for world in ends} == {
        (True, False),
        (False, True),
        (False, False),
    }


@pytest.mark.parametrize(("worker", "parent"), [(False, True), (True, False), (False, False)])
def test_without_either_barrier_some_order_does(worker: bool, parent: bool) -> None:
    begins = claims(Side("begun", "withdrawn", 7), barrier=worker)
    withdraws = claims(Side("withdrawn", "begun", 7), barrier=parent)
    assert any(world.ran & world.promised for world in worlds(begins, withdraws))


def test_no_order_takes_a_former_occupant_for_the_present_one() -> None:
    begins = [*claims(Side("begun", "withdrawn", 7)), *claims(Side("begun", "withdrawn", 8))]
    ends = list(worlds(begins, claims(Side("withdrawn", "begun", 8))))
    assert all(7 in world.ran for world in ends)
    assert not any(world.ran & world.promised for world in ends)
    assert any(8 in world.promised for world in ends)
    assert any(8 in world.ran for world in ends)


# The claim, between two processes.


def test_two_processes_never_disagree() -> None:
    rounds, least, enough_s, window = 30_000, 1_000, 5.0, 2
    page = StatusPage.create(window)
    turns_fd = os.memfd_create("turns", os.MFD_CLOEXEC)
    os.ftruncate(turns_fd, turns_bytes(rounds))
    turns = Turns(turns_fd, rounds)
    arguments = [str(number) for number in (page.fd, turns_fd, window, rounds)]
    worker = Program(["-m", "tests.isolation.claimant", *arguments], pass_fds=(page.fd, turns_fd))
    try:
        promised = bytearray(rounds + 1)
        began, number = time.monotonic(), 0
        while number == 0 or not turns.is_last(number):
            number += 1
            if number >= least and time.monotonic() - began > enough_s:  # two busy cores take turns
                turns.end_with(number)
            turns.open_round(number)
            turns.await_moment(number)
            promised[number] = page.withdraw(number % window, number)
            turns.await_done(number)
        assert worker.wait(PATIENCE_S) == 0
        both = [n for n in range(1, number + 1) if promised[n] and turns.ran[n] == RAN]
        assert not both, f"{len(both)} ran that were promised never to, the first {both[0]}"
        assert page.begun_count == number
    finally:
        worker.kill()
        worker.wait()
        turns.close()
        os.close(turns_fd)
        page.close()
