"""A minute of chaos: a worker is killed, stopped or poisoned twice a second, and nobody is told a lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .chaos_rigs import in_processes
from .terminal import cudnn_actor


@in_processes
@pytest.mark.parametrize("standby", [0, 1])
def test_half_a_minute_of_faults_loses_nothing(standby: int, tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    words = ("--seconds", "30", "--engine", "cpu", "--kill-every", "0.5", "--seed", str(standby))
    done = cudnn_actor("chaos", *words, "--standby", str(standby), "--out", str(out))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    record = json.loads(out.read_text())
    counts = record["counts"]
    assert counts["lost"] == counts["wrong"] == 0
    assert counts["requests"] == counts["answered"] > 0
    assert counts["faults"] > 50
    for kind in ("kill", "hang", "poison"):
        assert record["recovery"][kind]["struck"] > 0
