"""Which requests become a batch, and when: the rules, without a service, on times that the tests give."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cudnn_actor.models.forming import FormingBatches

SIZES = (1, 2, 4, 8)
DELAY = 10.0
WITHIN = DELAY / 2
"""How long after the latest request others are waited for that were under way lately."""


def forming(sizes: Sequence[int] = SIZES, in_flight: int = 2) -> FormingBatches[str]:
    return FormingBatches(sizes, DELAY, in_flight, expected_within=WITHIN)


def test_the_first_request_starts_at_once() -> None:
    batches = forming()
    batches.add("a", "group", 1, now=0.0)
    assert batches.take(0.0) == ["a"]
    assert batches.take(0.0) is None


def test_while_a_batch_runs_requests_wait_until_the_next_is_full_or_the_first_has_waited() -> None:
    batches = forming()
    batches.add("a", "group", 1, now=0.0)
    assert batches.take(0.0) == ["a"]
    batches.add("b", "group", 4, now=1.0)
    batches.add("c", "group", 3, now=2.0)
    assert batches.take(2.0) is None
    assert batches.next_at() == 11.0
    assert batches.take(10.9) is None
    assert batches.take(11.0) == ["b", "c"]
    batches.end(1, 0.0)
    batches.end(2, 0.0)
    assert batches.next_at() is None


def test_a_full_batch_starts_beside_another() -> None:
    batches = forming()
    batches.add("a", "group", 1, now=0.0)
    assert batches.take(0.0) == ["a"]
    for name in "bcdefghij":
        batches.add(name, "group", 1, now=0.0)
    assert batches.take(0.0) == list("bcdefghi")
    assert batches.take(100.0) is None, "two run"
    assert batches.next_at() is None
    batches.end(1, 0.0)
    assert batches.take(9.0) is None
    assert batches.take(10.0) == ["j"]


def test_a_full_batch_starts_before_it_can_run_and_no_more_than_one_for_each_device() -> None:
    batches = FormingBatches[int](SIZES, DELAY, 2, devices=2)
    for number in range(40):
        batches.add(number, "group", 1, now=0.0)
    assert [batches.take(0.0) for _ in range(4)] == [list(range(n, n + 8)) for n in range(0, 32, 8)]
    assert batches.take(100.0) is None, "two run, and two are put together"


def test_no_batch_starts_ahead_of_one_that_came_first_and_waits_for_its_run() -> None:
    batches = forming()
    for number in range(2):
        batches.add(f"runs {number}", "group", 8, now=0.0)
        assert batches.take(0.0) == [f"runs {number}"]
    batches.add("first", 1, 1, now=1.0)
    batches.add("full", 2, 8, now=2.0)
    assert batches.take(3.0) is None, "while the first may wait for others, too"
    assert batches.take(100.0) is None
    batches.end(1, 0.0)
    assert batches.take(100.0) == ["first"]
    assert batches.take(100.0) == ["full"]


@given(
    requests=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 8)), max_size=40),
    devices=st.integers(1, 3),
)
def test_what_starts_ahead_is_what_would_have_started_anyhow(
    requests: list[tuple[int, int]], devices: int
) -> None:
    """So a batch that is put together ahead takes no other's place, and no request waits longer for it."""

    def with_all_running() -> FormingBatches[int]:
        batches = FormingBatches[int](SIZES, DELAY, 2 * devices, devices)
        for number in range(2 * devices):
            batches.add(number, "runs", 8, now=0.0)
            assert batches.take(0.0) == [number]
        for number, (group, samples) in enumerate(requests):
            batches.add(100 + number, group, samples, now=1.0 + number)
        return batches

    ahead, behind = with_all_running(), with_all_running()
    now = 1.0 + len(requests)
    for _ in range(devices):
        started = ahead.take(now)
        if started is None:
            break
        behind.end(1, now)  # a place becomes free
        assert behind.take(now) == started
    if ahead.running == ahead.most_in_flight:
        assert ahead.take(now) is None


def test_a_request_that_does_not_fit_goes_first_in_the_next_batch() -> None:
    batches = forming()
    for name, samples in (("a", 5), ("b", 4), ("c", 3)):
        batches.add(name, "group", samples, now=0.0)
    assert batches.take(0.0) == ["a"]
    batches.end(1, 0.0)
    assert batches.take(WITHIN) == ["b", "c"]


def test_requests_of_other_dims_make_other_batches_and_the_first_come_starts() -> None:
    batches = forming()
    for name, group in (("a", 1), ("b", 2), ("c", 1), ("d", 2)):
        batches.add(name, group, 1, now=0.0)
    assert batches.take(0.0) == ["a", "c"]
    batches.end(2, 0.0)
    assert batches.take(WITHIN) == ["b", "d"]


def test_a_device_waits_for_as_many_as_were_under_way_lately_while_they_come() -> None:
    batches = forming()
    for name in "abc":
        batches.add(name, "group", 1, now=0.0)
    assert batches.take(0.0) == ["a", "b", "c"]
    batches.end(3, 0.0)
    batches.add("d", "group", 1, now=1.0)
    assert batches.take(1.0) is None
    assert batches.next_at() == 1.0 + WITHIN
    batches.add("e", "group", 1, now=3.0)
    assert batches.take(1.0 + WITHIN) is None, "another has come since"
    assert batches.next_at() == 3.0 + WITHIN
    batches.add("f", "group", 1, now=7.0)
    assert batches.take(7.0) == ["d", "e", "f"], "as many as before"


def test_a_device_waits_for_the_others_no_longer_than_the_delay() -> None:
    batches = forming()
    for number in range(8):
        batches.add(f"first {number}", "group", 1, now=0.0)
    assert batches.take(0.0) is not None
    batches.end(8, 0.0)
    for number in range(6):
        batches.add(str(number), "group", 1, now=1.0 + 2 * number)
        assert batches.take(1.0 + 2 * number) == (list("012345") if number == 5 else None)
    assert batches.next_at() is None


def test_requests_that_come_one_after_another_start_at_once_soon_after_many_came_together() -> None:
    batches = forming()
    for number in range(8):
        batches.add(f"first {number}", "group", 1, now=0.0)
    assert batches.take(0.0) is not None
    batches.end(8, 0.0)
    now, waited = 0.0, []
    for number in range(12):
        batches.add(str(number), "group", 1, now)
        begun = now
        while batches.take(now) is None:
            now = batches.next_at() or now
        waited.append(now - begun)
        batches.end(1, now)
    assert waited == [*[WITHIN] * 7, *[0.0] * 5]


def test_requests_that_come_one_by_one_do_not_keep_a_device_waiting_until_a_long_delay() -> None:
    """Not even if each comes soon after the last, so that as many as once came together are there at last."""
    batches = FormingBatches[str](SIZES, 100 * WITHIN, 2, expected_within=WITHIN)
    for name in "abcdefgh":
        batches.add(name, "group", 1, now=0.0)
    assert batches.take(0.0) is not None
    batches.end(8, 0.0)
    waited = []
    for number in range(200):
        now = WITHIN * (1 + 0.9 * number)
        if batches.next_at() is None:
            first = now
        batches.add(str(number), "group", 1, now)
        starts_at = min(now + 0.9 * WITHIN, batches.next_at() or now)
        if (taken := batches.take(starts_at)) is not None:
            waited.append(starts_at - first)
            batches.end(len(taken), starts_at)
    assert max(waited) == pytest.approx(2 * WITHIN)


@pytest.mark.parametrize(("pause", "waits"), [(99 * WITHIN, True), (101 * WITHIN, False)])
def test_long_after_many_were_under_way_a_request_starts_at_once(pause: float, waits: bool) -> None:
    batches = forming()
    for name in "abc":
        batches.add(name, "group", 1, now=0.0)
    assert batches.take(0.0) == ["a", "b", "c"]
    ended = 1000 * WITHIN  # however long a batch runs, its clients may send again behind it
    batches.end(3, ended)
    batches.add("d", "group", 1, ended + pause)
    assert (batches.take(ended + pause) is None) == waits


def test_where_no_more_is_expected_nothing_is_waited_for() -> None:
    batches = forming()
    for name in "abc":
        batches.add(name, "group", 1, now=0.0)
    assert batches.take(0.0) == ["a", "b", "c"]
    batches.end(3, 0.0)
    batches.add("d", "group", 1, now=0.0)
    assert batches.take(0.0) is None
    batches.expect_no_more()
    assert batches.take(0.0) == ["d"]


def test_while_as_many_batches_run_as_may_the_request_that_fills_one_says_that_it_may_start() -> None:
    batches = forming()
    for name in ("a", "b"):
        batches.add(name, "group", 8, now=0.0)
        assert batches.take(0.0) == [name]
    assert [batches.add(str(n), "group", 1, now=1.0) for n in range(9)] == [False] * 7 + [True, False]
    assert (len(batches), batches.under_way, batches.samples) == (9, 11, 9)
    assert batches.take(1.0) == list("01234567")
    assert not batches.add("9", "group", 1, now=2.0), "three batches run, and no other may be ahead"
    assert batches.remove("8", "group")
    batches.end(1, now=3.0)
    assert batches.leave_out("group", 8) == []
    assert [batches.add(str(n), "group", 1, now=3.0) for n in range(10, 13)] == [False, False, True]
    assert batches.take(3.0) == ["9", "10", "11", "12"], "full with four"
    assert batches.clear() == []


def test_requests_of_several_groups_that_come_while_batches_run_keep_their_order_and_times() -> None:
    batches = forming()
    for name in ("a", "b"):
        batches.add(name, "group", 8, now=0.0)
        assert batches.take(0.0) == [name]
    for number, group in enumerate((2, 1, 2, 1, 1)):
        assert not batches.add(str(number), group, 1, now=1.0 + number)
    batches.end(1, now=6.0)
    assert batches.next_at() == 1.0 + DELAY
    assert batches.take(1.0 + DELAY) == ["0", "2"]
    batches.end(1, now=11.0)
    assert batches.next_at() == 2.0 + DELAY
    assert batches.take(2.0 + DELAY) == ["1", "3", "4"]


def test_those_that_come_while_as_many_batches_run_as_may_were_under_way_lately() -> None:
    batches = forming()
    for name in ("a", "b"):
        batches.add(name, "group", 8, now=0.0)
        assert batches.take(0.0) == [name]
    for number in range(5):
        assert not batches.add(str(number), "group", 1, now=20.0 + number / 8)
    for _ in range(2):
        batches.end(1, now=21.0)
    assert batches.take(21.0) is None, "seven were under way"
    assert batches.next_at() == 20.5 + WITHIN


def test_what_was_removed_is_in_no_batch() -> None:
    batches = forming()
    for name in "abc":
        batches.add(name, "group", 1, now=0.0)
    assert batches.remove("b", "group")
    assert not batches.remove("b", "group")
    assert batches.take(0.0) == ["a", "c"]


def test_once_the_first_request_is_removed_a_full_batch_behind_it_may_start_ahead() -> None:
    batches = forming()
    for request, group, samples in (("a", 0, 8), ("b", 0, 8), ("c", 1, 1), ("d", 0, 8)):
        batches.add(request, group, samples, now=0.0)
    assert batches.take(0.0) == ["a"]
    assert batches.take(0.0) == ["b"]
    assert batches.take(0.0) is None
    assert batches.remove("c", 1)
    assert batches.take(0.0) == ["d"]


@pytest.mark.parametrize(("samples", "size"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, None)])
def test_a_batch_is_filled_up_to_the_next_size(samples: int, size: int | None) -> None:
    assert forming().size_for("group", samples) == size


def test_a_size_that_is_left_out_is_used_no_more_in_that_group() -> None:
    batches = forming()
    batches.add("a", 1, 6, now=0.0)
    batches.add("b", 1, 3, now=0.0)
    batches.add("c", 1, 3, now=0.0)
    assert batches.leave_out(1, 8) == ["a"]
    assert batches.sizes(1) == (1, 2, 4)
    assert batches.sizes(2) == SIZES
    assert batches.take(0.0) == ["b"]
    assert batches.leave_out(1, 4) == ["c"]
    assert len(batches) == batches.samples == 0


class Asking:
    """Batches of requests that are asked for what may start, as `BatchedModel` asks.

    They are asked at each end, at the latest when `next_at` said, once a request was withdrawn, and after a
    request: after each, or only where `add` says so, if it has to be called at all.
    """

    def __init__(self, devices: int, *, always: bool) -> None:
        self._batches = FormingBatches[int](SIZES, DELAY, 2 * devices, devices, expected_within=WITHIN)
        self._always = always
        self._timer: float | None = None
        self._running: list[int] = []
        self._waiting: dict[int, int] = {}
        self.asked = 0
        self.started: list[tuple[float, list[int]]] = []

    def pass_time(self, until: float) -> None:
        while self._timer is not None and self._timer <= until:
            at, self._timer = self._timer, None
            self._ask(at)

    def add(self, number: int, group: int, samples: int, now: float) -> None:
        self._waiting[number] = group
        if not self._always and samples == 1 and len(self._batches.arrived) < self._batches.room:
            self._batches.arrived.append((number, group, now))
        elif self._batches.add(number, group, samples, now) or self._always:
            self._ask(now)

    def withdraw_the_first(self, now: float) -> None:
        if self._waiting:
            first = next(iter(self._waiting))
            assert self._batches.remove(first, self._waiting.pop(first))
            self._ask(now)

    def end_a_batch(self, now: float) -> None:
        if self._running:
            self._batches.end(self._running.pop(0), now)
            self._ask(now)

    def _ask(self, now: float) -> None:
        self.asked += 1
        while (taken := self._batches.take(now)) is not None:
            self.started.append((now, taken))
            self._running.append(len(taken))
            for number in taken:
                del self._waiting[number]
        at = self._batches.next_at()
        if self._always or (at is not None and (self._timer is None or self._timer > at)):
            self._timer = at


def asked_after_all(devices: int, events: list[tuple[float, int, int]]) -> tuple[Asking, Asking]:
    both = Asking(devices, always=True), Asking(devices, always=False)
    now = 0.0
    for number, (passing, group, samples) in enumerate([*events, *[(2 * DELAY, 0, 0)] * 2 * len(events)]):
        now += passing
        for each in both:
            each.pass_time(now)
            if samples > 0:
                each.add(number, group, samples, now)
            elif samples < 0:
                each.withdraw_the_first(now)
            else:
                each.end_a_batch(now)
    return both


@example(events=[(0.0, 0, 8), (0.0, 0, 8), (0.0, 1, 1), (0.0, 0, 8), (0.0, 0, -1), (0.1, 1, 1)], devices=1)
@given(
    events=st.lists(
        st.tuples(
            st.floats(0, 1.0) | st.floats(0, 2 * DELAY),
            st.integers(0, 1),
            st.integers(-1, 3) | st.integers(0, 8),
        ),
        max_size=60,
    ),
    devices=st.integers(1, 2),
)
def test_batches_start_at_the_same_times_if_they_are_asked_only_after_requests_that_add_names(
    events: list[tuple[float, int, int]], devices: int
) -> None:
    always, seldom = asked_after_all(devices, events)
    assert seldom.started == always.started


@pytest.mark.parametrize(
    ("events", "fewer"),
    [
        pytest.param([(0.0, 0, 8)] * 2 + [(0.01, 0, 1)] * 7, 7, id="as many batches run as may"),
        pytest.param(
            [(0.0, 0, 1)] * 4 + [(0.1, 0, 0)] * 2 + [(0.01, 0, 1)] * 4, 3, id="a device waits for others"
        ),
    ],
)
def test_nothing_is_asked_after_a_request_because_of_which_nothing_may_start(
    events: list[tuple[float, int, int]], fewer: int
) -> None:
    always, seldom = asked_after_all(1, events)
    assert always.asked - seldom.asked == fewer


class Batching(RuleBasedStateMachine):
    """Every request is in one batch, or was removed; batches fit; each group keeps its order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.number = 0
        self.batches: FormingBatches[int] = FormingBatches(SIZES, DELAY, 2, expected_within=WITHIN)
        self.waiting: dict[int, tuple[int, int, float]] = {}
        """By number: group, samples and time of those that have not been taken or removed."""
        self.sent: list[int] = []
        """How many requests each batch has that runs."""
        self.latest = 0.0

    @rule(group=st.integers(0, 2), samples=st.integers(1, 8))
    def request(self, group: int, samples: int) -> None:
        self.batches.add(self.number, group, samples, self.now)
        self.waiting[self.number] = group, samples, self.now
        self.number += 1
        self.latest = self.now

    @rule(passing=st.floats(0, 2 * DELAY))
    def time_passes(self, passing: float) -> None:
        self.now += passing

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        group, _, _ = self.waiting.pop(number)
        assert self.batches.remove(number, group)

    @precondition(lambda self: self.batches.running)
    @rule(data=st.data())
    def a_batch_ends(self, data: st.DataObject) -> None:
        self.batches.end(self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1))), self.now)

    @rule()
    def start(self) -> None:
        running, told = self.batches.running, self.batches.next_at()
        ahead = running == 2 and self._first_is_full()
        taken = self.batches.take(self.now)
        if taken is None:
            first = min(since for _, _, since in self.waiting.values()) if self.waiting else self.now
            another_is_expected = self.now < min(self.latest + WITHIN, first + 2 * WITHIN)
            may_wait = (running or another_is_expected) and self._none_is_due()
            assert not self.waiting or (running >= 2 and not ahead) or may_wait
            assert self.batches.running == running
            assert told is None or told > self.now
            return
        assert running < 2 or (ahead and taken[0] == min(self.waiting))
        assert self.batches.running == running + 1
        group = self.waiting[taken[0]][0]
        mates = [number for number, one in self.waiting.items() if one[0] == group]
        assert taken == mates[: len(taken)], "in order"
        samples = sum(self.waiting[number][1] for number in taken)
        assert samples <= 8
        if len(taken) < len(mates):
            assert samples + self.waiting[mates[len(taken)]][1] > 8, "no larger batch fits"
        due = not running or samples == 8 or len(taken) < len(mates)
        assert due or self.now >= self.waiting[taken[0]][2] + DELAY
        for number in taken:
            del self.waiting[number]
        self.sent.append(len(taken))

    def _first_is_full(self) -> bool:
        """Whether the group of the request that came first has enough for the largest batch."""
        group, _, _ = next(iter(self.waiting.values()), (None, 0, 0))
        return sum(samples for each, samples, _ in self.waiting.values() if each == group) >= 8

    def _none_is_due(self) -> bool:
        groups: dict[int, list[tuple[int, int, float]]] = {}
        for one in self.waiting.values():
            groups.setdefault(one[0], []).append(one)
        return all(
            sum(samples for _, samples, _ in ones) < 8 and self.now < ones[0][2] + DELAY
            for ones in groups.values()
        )

    @invariant()
    def it_counts(self) -> None:
        assert len(self.batches) == len(self.waiting)
        assert self.batches.samples == sum(samples for _, samples, _ in self.waiting.values())
        assert self.batches.under_way == len(self.waiting) + sum(self.sent)


TestBatching = Batching.TestCase
