"""The benchmark of pools, measured for a moment on the CPU."""

from __future__ import annotations

import io

from rich.console import Console

from benchmarks.pool import Asked, rows, sheet


def test_one_member_and_two_are_measured_and_a_kill() -> None:
    asked = Asked(
        devices=["cpu", "cpu"],
        model=None,
        convolution=True,
        batch=2,
        callers=[2],
        seconds=0.02,
        rounds=1,
        kills=1,
    )
    found = list(rows(asked))
    assert [row["what"] for row in found] == ["one member, its handle", "one member", "2 members", "killed"]
    assert all(row["per_s"] > 0 for row in found[:3])
    assert found[3]["slowest_ms"][0] > 0
    assert found[3]["kills"] == len(found[3]["down_ms"]) - 1 == 1
    printed = io.StringIO()
    Console(file=printed, width=200).print(sheet(found))
    assert "one member, its handle" in printed.getvalue()
