"""The benchmark of moves, measured for a moment on the CPU."""

from __future__ import annotations

from benchmarks.pool_moves import rows, sheet


def test_both_ways_and_both_halves_are_measured_for_each_size() -> None:
    found = list(rows(["cpu", "cpu"], [64, 1 << 20], rounds=1))
    assert [row["what"] for row in found] == 2 * ["move 0 to 1", "move 1 to 0", "download", "upload"]
    assert [row["bytes"] for row in found] == 4 * [64] + 4 * [1 << 20]
    assert all(row["ms"] > 0 for row in found)
    assert sheet(found).row_count == 8
