"""The simulation of a pool: what goes in comes out, and the known ways have their known order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.recording import keep
from benchmarks.routing.__main__ import rows, sheet
from benchmarks.routing.service_times import Mix, mixes
from benchmarks.routing.simulation import Failures, Found, Setting, simulate
from benchmarks.routing.ways import WAYS

from ..whole import more

ONE = Mix(name="one", times_us=(1000.0,), sigma=0.0)
FAILING = st.builds(
    Failures,
    mtbf_us=st.floats(3e4, 5e5),
    noticed_us=st.floats(0, 2e4),
    restart_us=st.floats(1, 1e5),
    elsewhere=st.booleans(),
)
SETTINGS = st.builds(
    Setting,
    members=st.integers(1, 9),
    mix=st.builds(
        Mix,
        name=st.just("any"),
        times_us=st.lists(st.floats(10, 5000), min_size=1, max_size=4).map(tuple),
        sigma=st.floats(0, 0.5),
    ),
    load=st.floats(0.1, 1.2),
    requests=st.integers(1, 120),
    failures=st.none() | FAILING,
    slow=st.integers(0, 2),
)


@settings(max_examples=more(60), deadline=None)
@given(setting=SETTINGS, way=st.sampled_from(sorted(WAYS)), seed=st.integers(0, 99))
def test_each_request_is_answered_once_and_a_member_that_is_down_gets_none(
    setting: Setting, way: str, seed: int
) -> None:
    found = simulate(setting, WAYS[way](), seed)
    assert found.runs == [1] * setting.requests
    assert found.unanswered == []
    assert found.given_while_down == 0
    assert len(found.waits_us) == setting.requests
    whole = setting.members * found.span_us
    assert found.useful_us + found.thrown_away_us + found.down_us <= whole * (1 + 1e-9)
    if setting.failures is None:
        assert found.thrown_away_us == found.down_us == found.failures == 0
    assert found == simulate(setting, WAYS[way](), seed)


def test_a_queue_of_one_server_waits_as_long_as_theory_says() -> None:
    """M/D/1 at load 0.5: the mean wait is 0.5 runs before the run. (Pollaczek and Khinchine.)"""
    setting = Setting(members=1, mix=ONE, load=0.5, requests=30_000)
    found = simulate(setting, WAYS["random"](), seed=1)
    assert sum(found.waits_us) / len(found.waits_us) == pytest.approx(1500, rel=0.03)
    assert found.useful_us / found.span_us == pytest.approx(0.5, rel=0.03)


def test_two_choices_are_better_than_one_and_all_are_better_than_two() -> None:
    setting = Setting(members=8, mix=mixes()[0], load=0.8, requests=8000)
    p99 = {way: simulate(setting, made(), seed=2).percentile_us(99) for way, made in WAYS.items()}
    assert p99["least time of all"] < p99["least time of 2"] < p99["round robin"] < p99["random"]
    assert p99["least time of 8"] == p99["least time of all"]


def test_what_a_failed_member_had_runs_elsewhere_sooner_than_it_is_back() -> None:
    failures = Failures(mtbf_us=1e6, noticed_us=1e3, restart_us=1e6)
    longest = {}
    for elsewhere in (True, False):
        changed = Failures(**{**vars(failures), "elsewhere": elsewhere})
        setting = Setting(members=8, mix=ONE, load=0.3, requests=4000, failures=changed)
        longest[elsewhere] = max(simulate(setting, WAYS["least time of 8"](), seed=3).waits_us)
    assert longest[True] < 1e5
    assert longest[False] > 9e5


def test_a_percentile_is_of_the_sorted_waits_behind_the_first_tenth() -> None:
    found = Found(waits_us=[1e9] * 10 + [float(each) for each in range(90)])
    assert [found.percentile_us(percent) for percent in (50, 99, 100)] == [44.0, 89.0, 89.0]


def test_the_benchmark_has_a_row_for_each_setting_and_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(rows([2], 100, 0), sheet, tmp_path, "routing", seed=0)
    (written,) = tmp_path.glob("routing-*.json")
    found = json.loads(written.read_text())["found"]
    assert {row["way"] for row in found} == set(WAYS)
    assert len(found) == 12 * len(WAYS)
    assert "least time of 2" in " ".join(capsys.readouterr().out.split())
