"""What a watchdog counts, on a clock of the test's."""

from __future__ import annotations

import pytest

from cudnn_actor.supervision.watch import Watch, look_every_s

LIMIT_S = 8.0
EVERY_S = look_every_s(LIMIT_S)


def looked(watch: Watch, *times: float) -> None:
    """Looks at these times, each of them meant for a pause after the last."""
    for now in times:
        watch.wake(now)
        watch.sleep(now, EVERY_S, every_s=EVERY_S)


def test_looks_come_often_enough_for_any_limit() -> None:
    assert [look_every_s(limit) for limit in (30.0, 8.0, 0.001)] == [3.75, 1.0, 0.02]


def test_time_that_was_slept_as_meant_counts() -> None:
    watch = Watch()
    looked(watch, 0.0, 1.0, 2.0, 2.5, 3.6)
    assert watch.watched_s(0.5, 4.0) == 3.5


def test_time_beyond_the_meant_pause_does_not_count() -> None:
    watch = Watch()
    looked(watch, 0.0, 1.0, 52.0)
    assert watch.watched_s(0.5, 53.0) == pytest.approx(2.5)
    assert watch.watched_s(40.0, 53.0) == pytest.approx(1.0), "it began while nobody looked"
    assert watch.watched_s(52.5, 53.0) == pytest.approx(0.5)


def test_several_stops_add_up() -> None:
    watch = Watch()
    looked(watch, 0.0, 11.0, 12.0, 33.0)
    assert watch.watched_s(0.0, 34.0) == pytest.approx(4.0)


def test_what_has_ended_before_anything_that_is_watched_is_forgotten() -> None:
    watch = Watch()
    looked(watch, 0.0, 11.0, 12.0, 33.0)
    watch.forget_before(20.0)
    assert watch.watched_s(20.0, 34.0) == pytest.approx(1.0)
    watch.forget_before(33.0)
    assert watch.watched_s(0.0, 34.0) == 34.0


def test_one_that_had_nothing_to_wait_for_has_slept_through_nothing() -> None:
    watch = Watch()
    watch.sleep(0.0, None, every_s=0.0)
    watch.wake(99.0)
    assert watch.watched_s(0.0, 100.0) == 100.0
