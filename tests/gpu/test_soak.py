"""Mixed traffic, in a process of its own so that what it leaves behind can be measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("CUDNN_ACTOR_SOAK", "20"))


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.timeout(int(SECONDS) + 120)
def test_nothing_is_wrong_lost_or_left_behind_by_mixed_traffic(seed: int, isolation: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.soak", "--seconds", str(SECONDS), "--seed", str(seed)]
    command += ["--isolation", isolation]
    if "PYTEST_XDIST_WORKER" in os.environ:
        command.append("--beside-others")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)  # noqa: T201 - what it did, in one line, and what went wrong
    assert done.returncode == 0, done.stdout + done.stderr
