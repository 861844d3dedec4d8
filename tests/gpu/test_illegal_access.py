"""A real illegal memory access, in a process of its own: everybody is told, and nothing is made up."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
EXITS_WITHIN_S = 15.0


class Aftermath(NamedTuple):
    """What the process said, how it ended, and how long it took to end once it had said so."""

    verdict: dict[str, Any]
    status: int
    lingered_s: float
    errors: str


@pytest.fixture(scope="module")
def aftermath() -> Aftermath:
    command = [sys.executable, "-m", "tests.gpu.illegal_access"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        try:
            said, start = _verdict(process), time.monotonic()
            _, errors = process.communicate(timeout=EXITS_WITHIN_S)
        finally:
            process.kill()
    return Aftermath(said, process.returncode, time.monotonic() - start, errors)


def _verdict(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            verdict: dict[str, Any] = json.loads(line)
            return verdict
    _, errors = process.communicate(timeout=EXITS_WITHIN_S)
    raise AssertionError(f"it ended with {process.returncode} and no verdict:\n{errors}")


def test_every_pending_request_ends_and_none_in_a_receipt(aftermath: Aftermath) -> None:
    verdict = aftermath.verdict
    assert verdict["receipts_before"] >= 500
    assert verdict["unanswered"] == 0
    assert set(verdict["after"]) <= {"ContextLost", "ServiceStopped"}
    assert verdict["after"]["ContextLost"] > 0
    assert sum(verdict["after"].values()) == 64  # one error for each task, and no answer behind it


def test_every_buffer_is_stale(aftermath: Aftermath) -> None:
    assert aftermath.verdict["buffers"] == {"context lost": 66}


def test_the_service_gives_up_at_once_and_says_so(aftermath: Aftermath) -> None:
    verdict = aftermath.verdict
    assert verdict["raised"].startswith("ServiceStopped: ")
    assert verdict["escalated"]
    assert verdict["restarts"] == 0
    assert verdict["asked_afterwards"] == "ServiceStopped"


def test_the_process_ends_by_itself(aftermath: Aftermath) -> None:
    assert aftermath.status == 0, aftermath.errors
    assert aftermath.lingered_s < EXITS_WITHIN_S
