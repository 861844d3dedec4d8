"""How a plan is timed."""

from __future__ import annotations

import pytest

from cudnn_actor.engines.timing import medians, without_overhead


def test_what_events_take_is_taken_off_each_piece_alike() -> None:
    assert without_overhead(100.0, (70.0, 40.0, 20.0)) == pytest.approx((60.0, 30.0, 10.0))


def test_no_piece_takes_less_than_nothing() -> None:
    assert without_overhead(10.0, (30.0, 2.0)) == pytest.approx((19.0, 0.0))


def test_pieces_that_take_no_longer_than_the_whole_are_left_alone() -> None:
    assert without_overhead(100.0, (70.0, 20.0)) == (70.0, 20.0)


def test_the_first_run_does_not_count_and_a_few_do() -> None:
    runs = iter([1000.0, 3.0, 1.0, *[2.0] * 1000])
    found = medians(lambda: (next(runs), 7.0))
    assert found == [2.0, 7.0]
