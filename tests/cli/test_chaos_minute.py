"""Seconds of chaos: a process is killed, stopped or poisoned four times a second; nobody is told a lie, or
waits for ever.

How long they wait is for the recorded runs to say (docs/performance.md): on a machine that has other work,
four faults a second leave no time to recover."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..whole import WHOLE
from .terminal import python

SECONDS = 15 if WHOLE else 8
"""Each kind of fault comes once within the first four, where a start takes no seconds."""
CHAOS = {
    "the CPU engine": ["cudnn_actor.cli", "chaos"],
    "one that works as a GPU does": ["tests.isolation.device_chaos"],
}


@pytest.mark.parametrize(("engine", "standby"), [("the CPU engine", 0), ("one that works as a GPU does", 1)])
def test_seconds_of_faults_lose_nothing(engine: str, standby: int, tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    words = ["--seconds", str(SECONDS), "--kill-every", "0.25"]
    words += ["--seed", str(standby), "--standby", str(standby)]
    done = python("-m", *CHAOS[engine], *words, "--out", str(out))
    assert out.exists(), done.stdout + done.stderr
    record = json.loads(out.read_text())
    counts = record["counts"]
    assert (counts["lost"], counts["wrong"], record["stuck"], record["stopped"]) == (0, 0, [], ""), (
        done.stdout
    )
    assert done.returncode == int(counts["stalls"] > 0)
    assert counts["requests"] == counts["answered"] > 0
    assert counts["faults"] > SECONDS
    for kind in ("kill", "hang", "poison", *(("kill-standby",) if standby else ())):
        assert record["recovery"][kind]["faults"] > 0
    forkserver = ("kill-forkserver", "hang-forkserver")
    assert sum(record["recovery"][kind]["faults"] for kind in forkserver) > 0
    assert sum(record["recovery"][kind]["faults"] for kind in ("kill-client", "kill-server")) > 0
    senders = {"tasks", "loops", "threads", "pykka", "alarms", "attached", "doomed"}
    assert set(record["senders"]) == senders
