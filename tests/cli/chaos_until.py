"""`cudnn-actor chaos` that ends as soon as it has had what a test needs, and not after a number of seconds.

A run of fixed seconds is too long on a quick machine, and too short on a slow one, which has fewer faults in
as many seconds. `chaos_until` runs this module as a program:

python -m tests.cli.chaos_until '{"kill": 1, "ModelRun": 4}' cudnn_actor.cli chaos --kill-every 0.25
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cudnn_actor.trials.chaos import harness
from cudnn_actor.trials.chaos.one_run import Outcome, run_once
from cudnn_actor.trials.chaos.settings import Settings
from cudnn_actor.trials.chaos.tally import Tally

from ..patience import PATIENCE_S
from .terminal import forked

__all__ = ["chaos_until"]

Done = subprocess.CompletedProcess[str]


def chaos_until(
    wanted: Mapping[str, int], out: Path, *words: str, program: Sequence[str] = ("cudnn_actor.cli", "chaos")
) -> tuple[Done, dict[str, Any]]:
    """Run `cudnn-actor chaos` until it has had what is wanted, and return how it ended and what it recorded.

    Parameters
    ----------
    wanted
        What there has to be of how many, by the names of `_seen`. Of names with | between them, any will do.
        "seconds" is how long load and faults last at least.
    out
        The file of the record.
    words
        Further options.
    program
        The command's module, and its first words.
    """
    limit_s = PATIENCE_S / 2
    asked = ["-m", "tests.cli.chaos_until", json.dumps(wanted), *program]
    done = forked(*asked, *words, "--seconds", f"{limit_s:g}", "--out", str(out))
    assert out.exists(), done.stdout + done.stderr
    record: dict[str, Any] = json.loads(out.read_text())
    assert record["seconds"] < limit_s, f"not all of {wanted} came:\n{done.stdout}"
    return done, record


def _seen(tally: Tally) -> Counter[str]:
    """What has come until now, by the names of kinds of faults, of senders and of messages, and others."""
    found: Counter[str] = Counter(fault.kind for fault in tally.faults)
    found.update(tally.senders)
    found.update(tally.messages)
    found["finished"] = tally.finished
    found["applied"] = tally.impure["applied"]
    found["restarts"] = tally.events["Restarting"]
    found["lives"] = len(tally.lives()) - 1  # those that have ended
    return found


def _until(wanted: Mapping[str, int]) -> Callable[..., Any]:
    """`run_once` that ends its load when all that is wanted has come. It looks a few times a second."""
    counts = {name: count for name, count in wanted.items() if name != "seconds"}

    async def run(
        settings: Settings,
        tally: Tally,
        ending: threading.Event,
        *,
        show: Callable[[], None],
        ready: Callable[[Any], None],
    ) -> Outcome:
        def look() -> None:
            show()
            seen = _seen(tally)
            enough = all(sum(seen[each] for each in names.split("|")) >= n for names, n in counts.items())
            if enough and tally.now_s >= wanted.get("seconds", 0):
                ending.set()

        return await run_once(settings, tally, ending, show=look, ready=ready)

    return run


if __name__ == "__main__":
    _, wanted, program, *words = sys.argv
    harness.run_once = _until(json.loads(wanted))  # type: ignore[attr-defined]
    sys.argv[1:] = words
    runpy.run_module(program, run_name="__main__", alter_sys=True)
