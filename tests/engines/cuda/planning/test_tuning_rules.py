"""How tuning decides: what is measured, and what counts as faster."""

from __future__ import annotations

import numpy as np
import pytest

from cudnn_actor.engines.cuda.planning.tuning_rules import (
    TIE,
    Few,
    Gain,
    finalists,
    gain_of,
    is_gain,
    shortlist,
    worth_tuning,
)


def test_equal_pieces_are_one_and_those_that_take_the_most_together_come_first() -> None:
    times = [("once", 50.0), ("often", 20.0), ("often", 20.0), ("short", 10.0), ("often", 20.0)]
    assert worth_tuning(times) == ["often", "once", "short"]


def test_a_piece_that_takes_next_to_nothing_of_a_run_is_not_measured() -> None:
    assert worth_tuning([("long", 996.0), ("short", 4.0)]) == ["long"]
    assert worth_tuning([("long", 994.0), ("short", 3.0), ("short", 3.0)]) == ["long", "short"]


def test_nothing_is_worth_it_in_a_run_of_nothing() -> None:
    assert worth_tuning([]) == []


def test_each_kind_has_its_first_candidates_on_a_short_list() -> None:
    every = [("cudnn", f"c{n}") for n in range(9)] + [("cublas", f"b{n}") for n in range(9)] + [("own", "o")]
    assert shortlist(every, 5) == ["c0", "c1", "b0", "b1", "o"]


def test_a_kind_with_few_candidates_leaves_its_places_to_the_others() -> None:
    every = [("own", "o"), *(("cudnn", f"c{n}") for n in range(9))]
    assert shortlist(every, 4) == ["o", "c0", "c1", "c2"]
    assert shortlist(every[:2], 4) == ["o", "c0"]


def test_a_list_that_is_short_keeps_all_in_their_order() -> None:
    every = [("a", 1), ("b", 2), ("a", 3)]
    assert shortlist(every, 3) == [1, 2, 3]


def test_of_each_engine_the_first_few_that_can_be_built_are_built() -> None:
    names = "eng4_k24=1", "eng4_refused", "eng4_k24=2", "eng4", "eng7_k24=1", "eng7"
    assert built_of(*names) == ["eng4_k24=1", "eng4_k24=2", "eng7_k24=1"]


def test_with_one_engine_as_many_candidates_are_built_as_with_several() -> None:
    assert built_of("eng4_k24=1", "eng4_k24=2", "eng4_k24=3", "eng4") == [f"eng4_k24={n}" for n in (1, 2, 3)]


def built_of(*names: str) -> list[str]:
    """Which of the configurations are built, of two of an engine at most and three in all."""
    few, built = Few(names, of_each=2, most=3), []
    for name in names:
        if few.allows(name) and "refused" not in name:
            few.note(name)
            built.append(name)
    return built


def test_the_fastest_alone_are_tried_in_the_whole_also_if_they_are_a_little_slower_there() -> None:
    assert finalists(10.0, [9.0, 14.0, 16.0, 8.0, 11.0], most=3) == [0, 3, 4]


def test_a_candidate_that_is_much_slower_alone_is_not_tried_in_the_whole() -> None:
    assert finalists(10.0, [15.1, 40.0], most=3) == []


def runs(
    before: float, after: float, noise: float, *, drift: float = 0.0, count: int = 60
) -> list[tuple[float, float]]:
    """Times of runs in turns, of a device whose clock falls."""
    rng = np.random.default_rng(0)
    slower = 1.0 + drift * np.linspace(0.0, 1.0, count)
    pairs = np.stack([before * slower, after * slower], 1) + rng.normal(0.0, noise, (count, 2))
    return [(float(one), float(other)) for one, other in pairs]


def test_a_gain_is_seen_through_the_fall_of_the_clock() -> None:
    found = gain_of(runs(1000.0, 980.0, noise=2.0, drift=0.2))
    assert found.us == pytest.approx(22.0, abs=2.0)
    assert is_gain(found, of_us=100.0)


def test_two_runs_of_the_same_plan_are_a_tie() -> None:
    for us in (100.0, 1000.0, 5000.0):
        assert not is_gain(gain_of(runs(us, us, noise=5.0)), of_us=us / 10)


def test_one_that_gains_less_than_a_tie_of_the_pieces_time_keeps_the_first_choice() -> None:
    assert not is_gain(Gain(us=TIE * 100.0, error_us=0.01), of_us=100.0)
    assert is_gain(Gain(us=TIE * 100.0 + 0.1, error_us=0.01), of_us=100.0)


def test_a_gain_that_may_be_chance_is_none() -> None:
    assert not is_gain(Gain(us=8.0, error_us=3.0), of_us=100.0)
    assert is_gain(Gain(us=8.0, error_us=2.0), of_us=100.0)


def test_a_gain_below_what_the_device_can_count_is_none() -> None:
    assert not is_gain(Gain(us=0.4, error_us=0.0), of_us=2.0)


def test_a_loss_is_no_gain() -> None:
    assert not is_gain(gain_of(runs(1000.0, 1020.0, noise=1.0)), of_us=100.0)


def test_a_single_slow_run_decides_nothing() -> None:
    pairs = runs(100.0, 100.0, noise=0.1)
    assert not is_gain(gain_of([(5000.0, 100.0), *pairs]), of_us=50.0)
