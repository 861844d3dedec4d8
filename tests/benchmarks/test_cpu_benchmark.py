"""The CPU engine's benchmark on convolutions too small to say anything about speed."""

from __future__ import annotations

import asyncio
import io
import math

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("onnxruntime")

from benchmarks.cpu import turns
from benchmarks.cpu.cases import Case, Conv, by_data, forward
from benchmarks.cpu.page import section
from benchmarks.cpu.profile import profiled
from benchmarks.cpu.sheets import sheets, shown
from benchmarks.cpu.sides import Side
from benchmarks.cpu.turns import apart, compared, timed
from benchmarks.recording import Row

SMALL = Conv(4, 6, 8, 3, stride=2, dilation=2, groups=2)


def row(case: Case, *sides: str) -> Row:
    found = compared(case, sides, 1, 0.0)
    return {"part": "small", "most": 4.0, "most_extra": 1.0, "rival": "onnxruntime", **found}


@pytest.fixture(autouse=True)
def all_runs_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine that is so busy that they are not."""
    monkeypatch.setattr(turns, "_SHORT_MS", math.inf)


def test_sides_take_turns_and_their_ratio_is_in_the_table() -> None:
    found = row(forward(SMALL), "thread", "buffers", "onnxruntime")
    assert {name: len(turns) for name, turns in found["wall_ms"].items()} == {
        "thread": 5,
        "buffers": 5,
        "onnxruntime": 5,
    }
    assert all(ms > 0 for times in ("wall_ms", "cpu_ms") for of in found[times].values() for ms in of)
    assert max(found["apart"].values()) < 1e-5
    output = io.StringIO()
    Console(width=100, file=output).print(shown([found]))
    assert output.getvalue().count("small  ") == 4


def test_a_service_is_also_timed_with_requests_in_flight_and_its_rival_one_run_after_the_other() -> None:
    found = row(forward(SMALL), "thread", "onnxruntime")
    for times in (found["flight_ms"], found["flight_cpu_ms"]):
        assert [*times] == ["thread", "onnxruntime"]
        assert all(len(turns) == 5 and min(turns) > 0 for turns in times.values())
    wall = {"thread": [8.0, 9.0, 40.0], "onnxruntime": [2.0, 3.0, 4.0]}
    cpu = {"thread": [9.0, 9.0, 9.0], "onnxruntime": [2.0, 2.0, 2.0]}
    *_, last = sheets([found | {"flight_ms": wall, "flight_cpu_ms": cpu}])
    cells = dict(zip(last.columns, last.rows[0], strict=True))
    assert {name: cells[name] for name in ("thread", "thread, CPU", "extra")} == {
        "thread": "4.00",
        "thread, CPU": "4.50",
        "extra": "–",
    }


def test_requests_in_flight_are_sent_as_soon_as_others_are_answered() -> None:
    under_way = most = 0

    async def run() -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1

    async def result() -> list[np.ndarray]:
        return []

    found = asyncio.run(timed({"service": Side(run, result)}, 0.0))
    assert most == 8
    assert all(turn.flight is not None for turn in found["service"])


def test_an_aim_is_met_or_missed_by_the_median_of_the_turns_ratios() -> None:
    wall = {"thread": [8.0, 9.0, 40.0], "onnxruntime": [2.0, 3.0, 4.0]}
    least = {"thread": [6.0], "onnxruntime": [2.0]}
    found: Row = {"part": "small", "most": 4.0, "most_extra": 1.0, "rival": "onnxruntime"}
    found |= {"wall_ms": wall, "cpu_ms": wall, "least_ms": least}
    _, ratios, aims = sheets([found, {**found, "most": 3.9}, {**found, "most": 9.0, "rival": None}])
    columns = [dict(zip(aims.columns, row, strict=True)) for row in aims.rows]
    assert [row["thread, aim"] for row in columns] == ["4, met", "3.9, missed", "9 ms, met"]
    assert [columns[0][f"thread, {name}"] for name in ("CPU", "shortest")] == ["4.00", "3.00"]
    assert columns[0]["extra, aim"] == "1"
    assert dict(zip(ratios.columns, ratios.rows[0], strict=True))["thread"] == "4.00"


def test_the_section_of_the_page_names_the_record_and_has_all_tables() -> None:
    times = {"thread": [8.0], "onnxruntime": [2.0]}
    row: Row = {"part": "small", "most": 4.0, "most_extra": 1.0, "rival": "onnxruntime"}
    row |= {"wall_ms": times, "cpu_ms": times, "least_ms": times}
    record = {"date": "2026-01-02T03:04:05", "threads": 2, "machine": {"cpu": "EPYC"}, "found": [row]}
    text = section({**record, "versions": {"numpy": "2.4"}}, "cpu-engine-1.json")
    assert "`benchmarks/results/cpu-engine-1.json` on 2026-01-02, EPYC,\n2 threads for" in text
    assert text.count("| small |") == 3


def test_a_side_that_cannot_compute_a_case_is_said_to_be_missing() -> None:
    found = row(by_data(SMALL), "thread", "onnxruntime")
    assert list(found["wall_ms"]) == ["thread"]
    assert found["without"] == {"onnxruntime": "it has no gradients"}


def test_results_that_are_apart_are_no_measurement() -> None:
    right, wrong = [np.ones(3)], [np.array([1, 1, 1.01])]
    assert apart({"thread": right, "onnxruntime": right}) == {"thread": 0.0, "onnxruntime": 0.0}
    with pytest.raises(ArithmeticError, match="apart"):
        apart({"thread": wrong, "onnxruntime": right})


def test_a_profile_has_the_time_of_each_kind_of_operation() -> None:
    found = asyncio.run(profiled(forward(SMALL), 1))
    assert sum(kind["us"] for kind in found["kinds"]) <= 1.01 * found["run_us"]
    assert {kind["kind"].split(",")[0] for kind in found["kinds"]} >= {"conv_fwd"}
