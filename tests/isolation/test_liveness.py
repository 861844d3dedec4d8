"""When a worker counts as hung: a healthy one never, whatever it does; one that has lost a frame, in time.

The worker is a model that does one thing after another, on a clock of ticks. What counts is real: the
in-flight table, the heartbeat, and the decision.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_actor.isolation.process.child.heartbeat import Heartbeat
from cudnn_actor.isolation.process.parent.in_flight import InFlightTable, WorkerRequest
from cudnn_actor.isolation.process.parent.liveness import (
    Claimed,
    FirstSeen,
    Wait,
    stalled_since,
    unless_unread,
)

from ..whole import more
from .test_in_flight import request

LIMIT, BEAT = 40, 4
STEP = LIMIT - BEAT - 2
"""The longest time between two signs of progress of a healthy worker, in ticks."""


@dataclass(eq=False)
class Job:
    """A request: the pause before it is sent, the steps of its build, if it waits for one, and of its run."""

    pause: int
    run: tuple[int, ...]
    build: tuple[int, ...] = ()
    request: WorkerRequest = field(default_factory=lambda: request(0))


@dataclass(eq=False)
class Steps:
    """Steps that take ticks. Each end of one is progress."""

    left: deque[int]
    since: int

    def tick(self, now: int) -> bool:
        """Let a tick pass; whether all is done."""
        if self.left and now - self.since >= self.left[0]:
            self.left.popleft()
            self.since = now
        return not self.left


class Page:
    """The status page."""

    def __init__(self) -> None:
        self.since_ns = self.built_ns = self.beat_ns = self.turned_ns = 0
        self.begun: dict[int, int] = {}

    def has_begun(self, place: int, number: int) -> bool:
        return self.begun.get(place) == number

    def withdraw(self, place: int, number: int) -> bool:
        return not self.has_begun(place, number)

    def finished_record(self, place: int, number: int) -> None:
        return None


class World:
    """A parent, its watchdog, and a worker. `lost`: the request, or the answer, of this number is lost."""

    def __init__(self, *, lost: int = 0, lost_answer: int = 0, deaf_from: int = 0) -> None:
        self.now = 1
        self.table = InFlightTable(256, clock=lambda: float(self.now))
        self.page = Page()
        self._heartbeat = Heartbeat(
            cast(Any, self.page), BEAT, self._since, self._builds_since, lambda: self.now * 10**9
        )
        self._seen = FirstSeen()
        self._lost, self._lost_answer, self._deaf_from = lost, lost_answer, deaf_from
        self._inbox: deque[Job] = deque()
        self._resumed: deque[Job] = deque()
        self._builds: deque[Job] = deque()
        self._built: list[Job] = []
        self._run: tuple[Job, Steps] | None = None
        self._build: tuple[Job, Steps] | None = None

    def send(self, number: int, job: Job) -> None:
        job.request = request(number)
        self.table.hand_over(job.request, self.page)
        if number != self._lost and not (self._deaf_from and number >= self._deaf_from):
            self._inbox.append(job)

    def tick(self) -> int:
        """Let a tick pass. Returns for how long the worker has made no progress, as its watchdog sees it."""
        self.now += 1
        self._build_on()
        self._run_on()
        if self.now % BEAT == 0:
            self._heartbeat.beat()
        return self.stalled()

    def stalled(self) -> int:
        oldest = self.table.oldest
        if not self.table.requests or oldest is None:
            return 0
        wait = self._seen.wait_for(oldest, self.page, self.now)
        claimed = Claimed(self.page.since_ns / 1e9, max(self.page.built_ns, self.page.turned_ns) / 1e9)
        return self.now - int(stalled_since(wait, self.table.answered_s, claimed))

    def _build_on(self) -> None:
        if self._build is None and self._builds:
            job = self._builds.popleft()
            self._build = job, Steps(deque(job.build), self.now)
        if self._build is not None and self._build[1].tick(self.now):
            self._resumed.append(self._build[0])
            self._build = None
            self.page.turned_ns = self.now * 10**9

    def _run_on(self) -> None:
        while self._run is None and (self._resumed or self._inbox):
            job = self._resumed.popleft() if self._resumed else self._inbox.popleft()
            if job.build and job not in self._built:
                self._built.append(job)
                self._builds.append(job)
                continue
            self.page.begun[job.request.place] = job.request.number
            self._run = job, Steps(deque(job.run), self.now)
        if self._run is not None and self._run[1].tick(self.now):
            self._answer(self._run[0])
            self._run = None

    def _answer(self, job: Job) -> None:
        if job.request.number != self._lost_answer:
            self.table.note_finished(job.request)
            self.table.complete(job.request)
            self.table.note_progress()

    def _since(self) -> float | None:
        times = [steps[1].since for steps in (self._run, self._build) if steps is not None]
        return min(times, default=None)

    def _builds_since(self) -> float | None:
        return None if self._build is None else self._build[1].since


STEPS = st.lists(st.integers(1, STEP), min_size=1, max_size=4).map(tuple)
JOBS = st.lists(
    st.builds(Job, st.integers(0, 3 * LIMIT), STEPS, st.one_of(st.just(()), STEPS)), min_size=1, max_size=6
)


@settings(max_examples=more(150), deadline=None)
@given(jobs=JOBS)
def test_a_worker_that_makes_progress_is_never_taken_for_hung(jobs: list[Job]) -> None:
    world = World()
    for number, job in enumerate(jobs, 1):
        for _ in range(job.pause):
            assert world.tick() < LIMIT
        world.send(number, job)
    while world.table.requests:
        assert world.tick() < LIMIT


@settings(max_examples=more(100), deadline=None)
@given(jobs=JOBS, pick=st.integers(0, 5), what=st.sampled_from(["lost", "lost_answer", "deaf_from"]))
def test_after_a_lost_frame_the_worker_is_hung_when_nothing_else_is_left_to_do(
    jobs: list[Job], pick: int, what: str
) -> None:
    world = World(**{what: 1 + pick % len(jobs)})
    for number, job in enumerate(jobs, 1):
        for _ in range(job.pause):
            world.tick()
        world.send(number, job)
    for _ in range(sum(sum(job.run + job.build) + 2 for job in jobs)):
        world.tick()
    assert any(world.tick() >= LIMIT for _ in range(LIMIT + BEAT))


@pytest.mark.parametrize("what", ["lost", "lost_answer"])
def test_work_that_keeps_coming_does_not_hide_a_lost_frame(what: str) -> None:
    world = World(**{what: 5})
    for number in range(1, 3 * LIMIT):
        world.send(number, Job(0, (2,)))
        if any(world.tick() >= LIMIT for _ in range(3)):
            break
    assert world.stalled() >= LIMIT
    assert world.now <= 15 + LIMIT + 3 * BEAT


def test_a_request_that_waits_for_a_long_build_is_not_lost() -> None:
    """Others overtake it, and it begins only behind them."""
    world, number = World(), 1
    world.send(1, Job(0, (STEP,), build=(STEP,) * 5))
    while 1 in world.table.requests:
        number += 1
        world.send(number, Job(0, (2,)))
        assert all(world.tick() < LIMIT for _ in range(3))


def test_idle_time_before_a_request_does_not_count() -> None:
    wait = Wait(since_s=1000.0, before_s=1000.0)
    assert stalled_since(wait, 500.0, Claimed(since_s=600.0, built_s=0.0)) == 1000.0


@given(
    since_s=st.floats(1000, 2000),
    read_s=st.floats(0, 3000),
    now=st.floats(2000, 3000),
    limit_s=st.floats(0.1, 100),
)
def test_no_worker_is_hung_as_long_as_its_answers_may_be_unread(
    since_s: float, read_s: float, now: float, limit_s: float
) -> None:
    found = unless_unread(since_s, read_s, now, limit_s=limit_s, every_s=limit_s / 8)
    assert found >= since_s
    if now - found >= limit_s:
        assert found == since_s
        assert read_s - since_s >= limit_s


def test_a_worker_is_hung_at_the_second_look_after_the_limit() -> None:
    assert 10.0 - unless_unread(0.0, 7.9, 10.0, limit_s=8.0, every_s=1.0) < 8.0
    assert 9.25 - unless_unread(0.0, 9.0, 9.25, limit_s=8.0, every_s=1.0) == 9.25
