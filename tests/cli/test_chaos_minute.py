"""Seconds of chaos: a process is killed, stopped or poisoned four times a second; nobody is told a lie, or
waits for ever.

How long they wait is for the recorded runs to say (docs/performance.md): on a machine that has other work,
four faults a second leave no time to recover."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..whole import WHOLE
from .chaos_until import chaos_until

SECONDS = 15 if WHOLE else 0
"""How long faults come at least; in any case until each kind has come."""
PROGRAMS = {
    "the CPU engine": (["cudnn_actor.cli", "chaos"], [] if WHOLE else ["--problems", "10"]),
    "one that works as a GPU does": (
        ["tests.isolation.device_chaos"],
        ["--problems", "40" if WHOLE else "10"],
    ),
}
"""The command for each engine, and how many problems are computed: their uploads take most of a short run."""
SENDERS = ("tasks", "loops", "threads", "pykka", "alarms", "attached", "doomed")


@pytest.mark.parametrize(("engine", "standby"), [("the CPU engine", 0), ("one that works as a GPU does", 1)])
def test_seconds_of_faults_lose_nothing(engine: str, standby: int, tmp_path: Path) -> None:
    """A slow machine has fewer faults in as many seconds: the run goes on until each kind has come."""
    wanted = ["kill", "hang", "poison", "kill-forkserver|hang-forkserver", "kill-client|kill-server"]
    wanted += ["kill-standby"] if standby else []
    program, problems = PROGRAMS[engine]
    done, record = chaos_until(
        dict.fromkeys([*wanted, *SENDERS], 1) | {"seconds": SECONDS},
        tmp_path / "chaos.json",
        *("--kill-every", "0.25", "--seed", str(standby), "--standby", str(standby), *problems),
        program=program,
    )
    counts = record["counts"]
    assert (counts["lost"], counts["wrong"], record["stuck"], record["stopped"]) == (0, 0, [], ""), (
        done.stdout
    )
    assert done.returncode == int(counts["stalls"] > 0)
    assert counts["requests"] == counts["answered"] > 0
    assert set(record["senders"]) == set(SENDERS)
    faults = {kind for kind, found in record["recovery"].items() if found["faults"]}
    assert all(faults.intersection(names.split("|")) for names in wanted)
