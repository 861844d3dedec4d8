"""The benchmark of moves, measured for a moment on the CPU."""

from __future__ import annotations

from benchmarks.pool_moves import rows, sheet
from cudnn_actor.pool import moving


def test_both_ways_and_both_halves_are_measured_for_each_size() -> None:
    before = moving.DIRECT_BYTES
    found = list(rows(["cpu", "cpu"], [64, 1 << 20], rounds=1))
    moves = [f"move {to}, {way}" for way in ("directly", "by the host") for to in ("0 to 1", "1 to 0")]
    assert [row["what"] for row in found] == 2 * [*moves, "download", "upload"]
    assert [row["bytes"] for row in found] == 6 * [64] + 6 * [1 << 20]
    assert all(row["ms"] > 0 for row in found)
    assert sheet(found).row_count == 12
    assert before == moving.DIRECT_BYTES
