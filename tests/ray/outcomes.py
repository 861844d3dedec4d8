"""What has become of the scenarios, which run once, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..once import once
from .cluster import ENVIRONMENT, kill_session, of_session

__all__ = ["check", "outcomes_of"]


def outcomes_of(paths: pytest.TempPathFactory) -> Path:
    """The folder of what they have left. Blocks while they run, in whichever process of pytest."""
    return once(paths, "ray", _run_all)


def check(name: str, outcomes: Path) -> None:
    """Fail if a scenario has failed, with its traceback."""
    found = json.loads((outcomes / "outcomes").read_text())
    assert name in found, (outcomes / "said").read_text()
    assert not found[name], found[name]


def _run_all(folder: Path) -> None:
    """Run all scenarios. Whatever becomes of them, no process is left."""
    with (folder / "said").open("w") as said:
        program = subprocess.Popen(
            [sys.executable, "-m", "tests.ray.program", str(folder / "outcomes")],
            env=os.environ | ENVIRONMENT,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            program.wait()
            (folder / "left").write_text(json.dumps(of_session(program.pid)))
        finally:
            program.kill()
            program.wait()
            kill_session(program.pid)
