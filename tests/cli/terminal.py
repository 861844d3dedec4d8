"""Runs the command line: in a process of its own, as a shell would, or quicker in this process."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

from cudnn_actor.cli import main

from ..forked_programs import run
from ..patience import PATIENCE_S

__all__ = ["CLONE", "cudnn_actor", "cudnn_actor_here", "forked", "python"]

CLONE = Path(__file__).resolve().parents[2]
"""Where this runs from: what is missing is installed from there."""


def cudnn_actor(*words: str, spare: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command in a forked process; `spare` is not for `chaos`, which would not find its forkserver."""
    return forked("-m", "cudnn_actor.cli", *words, spare=spare)


def cudnn_actor_here(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process: what it says and its status are those of a process of its own."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            status = main(words)
        except SystemExit as end:
            status = int(end.code or 0)
    return subprocess.CompletedProcess(words, status, output.getvalue(), errors.getvalue())


def forked(*words: str, spare: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a program, which may rely on what `forked_programs` says, also of a `spare` process."""
    return run(["-W", "error", *words], timeout=PATIENCE_S, spare=spare)


def python(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter of its own: what it does before its imports, and in them, counts."""
    command = [sys.executable, "-W", "error", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
