"""The floor of a request and two devices, measured for a moment on the CPU engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks import floor, two_gpus

ROOT = Path(__file__).parents[2]
LIMIT_S = 110.0


def recorded(tmp_path: Path, *words: str) -> tuple[str, bytes]:
    """What a benchmark prints, and what it writes."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", *words, "--rounds", "1", "--seconds", "0.1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=True)
    return done.stdout, out.read_bytes()


def test_the_floor_is_measured_beside_a_ping_and_a_convolution(tmp_path: Path) -> None:
    printed, written = recorded(tmp_path, "benchmarks.floor")
    report = msgspec.json.decode(written, type=floor.Report)
    assert {"floor", "ping", "convolution", "ping, one", "ping, one, shared"} <= set(report.costs)
    assert all(
        cost.per_s[0] > 0 and cost.loop_us[0] > 0 and cost.other_us[0] > 0 for cost in report.costs.values()
    )
    assert all(name in printed for name in report.costs)


def test_two_devices_are_measured_alone_and_together_and_with_kills(tmp_path: Path) -> None:
    printed, written = recorded(tmp_path, "benchmarks.two_gpus", "--devices", "cpu", "cpu", "--kills", "1")
    report = msgspec.json.decode(written, type=two_gpus.Report)
    for found in (report.one_loop, report.two_loops):
        assert {*found.alone, *found.both} == {"left", "right"}
    assert len(report.kills.behind_ms) == len(report.kills_frozen.behind_ms) == 1
    assert "behind a kill" in printed
