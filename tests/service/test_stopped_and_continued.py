"""A process that is stopped with its workers and goes on later: nobody hangs who could not run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..forked_programs import Program
from ..patience import PATIENCE_S
from .stopped_program import HANG_AFTER_S


@pytest.mark.parametrize(
    ("isolation", "standby"),
    [("thread", 0), ("process", 0), ("process", 1)],
    ids=["thread", "process", "standby"],
)
def test_time_in_which_the_watchdog_did_not_run_does_not_count(isolation: str, standby: int) -> None:
    words = ["-m", "tests.service.stopped_program", isolation, str(standby)]
    pipe = subprocess.PIPE
    with Program(words, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, spare=True) as process:
        try:
            assert heard(process) == "in work"
            processes = [process.pid, *descendants(process.pid)]
            for pid in processes:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(1.5 * HANG_AFTER_S)  # it is time that must pass
            for pid in reversed(processes):
                os.kill(pid, signal.SIGCONT)
            process.stdin.write("go on\n")
            process.stdin.flush()
            assert heard(process) == "7.0 1 1 0", "it was taken for hung"
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def heard(process: Program) -> str:
    """What the program says next. Blocks."""
    said = ""
    lines: Iterator[str] = process.stderr
    for line in lines:
        if line.startswith("said "):
            return line.removeprefix("said ").strip()
        said += line
    raise AssertionError(said)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found
