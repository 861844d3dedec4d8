"""How often a device is asked: at once for as long as a small kernel takes, then ever more rarely."""

from __future__ import annotations

import itertools

import pytest

from cudnn_actor.execution.polling import AT_ONCE_S, EARLY_S, LONGEST_PAUSE_S, pause_s


def test_a_small_kernel_is_looked_at_without_a_pause() -> None:
    assert [pause_s(waited) for waited in (0.0, 5e-6, 50e-6)] == [0.0] * 3


def test_pauses_grow_with_the_wait_up_to_a_millisecond() -> None:
    pauses = [pause_s(microseconds * 1e-6) for microseconds in range(0, 20_000, 10)]
    assert all(earlier <= later for earlier, later in itertools.pairwise(pauses))
    assert pause_s(60.0) == LONGEST_PAUSE_S == 1e-3


def test_an_end_is_seen_late_by_an_eighth_at_most() -> None:
    for microseconds in range(1, 20_000, 7):
        waited = microseconds * 1e-6
        assert pause_s(waited) <= waited / 8


def test_looking_takes_few_looks() -> None:
    waited, looks = AT_ONCE_S, 0
    while waited < 1.0:
        waited += pause_s(waited)
        looks += 1
    assert looks < 1100


def test_a_run_of_known_length_is_looked_at_when_it_should_end() -> None:
    waited, looks = 0.0, []
    while waited < 5e-3:
        looks.append(waited)
        waited += pause_s(waited, 4e-3) or 10e-6
    early = [at for at in looks if 0.0 < at < 4e-3]
    assert min(early) >= 4e-3 - EARLY_S
    assert len(early) >= 9
    assert pause_s(6e-3, 4e-3) == pause_s(6e-3)


def test_an_expected_end_that_is_near_is_awaited_without_a_pause() -> None:
    assert pause_s(0.0, EARLY_S + 50e-6) == pytest.approx(50e-6)
    assert pause_s(60e-6, EARLY_S + 50e-6) == pause_s(250e-6, EARLY_S + 50e-6) == 0.0


def test_a_short_run_of_known_length_may_be_awaited_without_a_pause() -> None:
    for microseconds in range(0, 500, 10):
        assert pause_s(microseconds * 1e-6, 400e-6, awake_s=500e-6) == 0.0
    assert pause_s(0.0, 600e-6, awake_s=500e-6) == pause_s(0.0, 600e-6) > 0.0
    assert pause_s(5e-3, 400e-6, awake_s=500e-6) == pause_s(5e-3, 400e-6) > 0.0, "it takes longer than known"
    assert pause_s(5e-3, awake_s=500e-6) == pause_s(5e-3) > 0.0
