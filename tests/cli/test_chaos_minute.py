"""Seconds of chaos: a process is killed, stopped or poisoned four times a second; nobody is told a lie, or
waits for ever.

How long they wait is for the recorded runs to say (docs/performance.md): on a machine that has other work,
four faults a second leave no time to recover."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..whole import WHOLE
from .terminal import forked

SECONDS = 15 if WHOLE else 5
"""Each kind of fault comes once within the first four, where a start takes no seconds; see below."""
MOST_SECONDS = 32 * SECONDS
"""Of a run. All together are some minutes, half of what a test may take."""
CHAOS = {
    "the CPU engine": ["cudnn_actor.cli", "chaos"],
    "one that works as a GPU does": ["tests.isolation.device_chaos", "--problems", "40"],
}


SENDERS = {"tasks", "loops", "threads", "pykka", "alarms", "attached", "doomed"}


@pytest.mark.parametrize(("engine", "standby"), [("the CPU engine", 0), ("one that works as a GPU does", 1)])
def test_seconds_of_faults_lose_nothing(engine: str, standby: int, tmp_path: Path) -> None:
    """A slow machine has fewer faults in as many seconds. Further runs, each twice as long, have only the
    kinds that have not come yet, until each has come, and each sender has had an answer."""
    missing = [
        {"kill"},
        {"hang"},
        {"poison"},
        {"kill-forkserver", "hang-forkserver"},
        {"kill-client", "kill-server"},
        *({sender} for sender in SENDERS),
    ]
    missing += [{"kill-standby"}] if standby else []
    seconds = SECONDS
    faults: set[str] = set()
    while missing and seconds <= MOST_SECONDS:
        record = _record(engine, standby, seconds, faults, tmp_path / f"{seconds}.json")
        seen = {kind for kind, found in record["recovery"].items() if found["faults"]} | {*record["senders"]}
        missing = [each for each in missing if not each & seen]
        faults = set().union(*missing) - SENDERS or {"kill"}
        seconds *= 2
    assert not missing


def _record(engine: str, standby: int, seconds: int, faults: set[str], out: Path) -> dict[str, Any]:
    """What is recorded of seconds in which nothing was lost. Without `faults`, those of all kinds come."""
    words = ["--seconds", str(seconds), "--kill-every", "0.25"]
    words += ["--seed", str(standby), "--standby", str(standby)]
    words += ["--faults", ",".join(sorted(faults))] if faults else []
    done = forked("-m", *CHAOS[engine], *words, "--out", str(out))
    assert out.exists(), done.stdout + done.stderr
    record: dict[str, Any] = json.loads(out.read_text())
    counts = record["counts"]
    assert (counts["lost"], counts["wrong"], record["stuck"], record["stopped"]) == (0, 0, [], ""), (
        done.stdout
    )
    assert done.returncode == int(counts["stalls"] > 0)
    assert counts["requests"] == counts["answered"] > 0
    assert set(record["senders"]) <= SENDERS
    return record
