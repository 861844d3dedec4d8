"""Runs the command line in an interpreter of its own, as a shell would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["CLONE", "cudnn_actor", "python"]

CLONE = Path(__file__).resolve().parents[2]
"""Where this runs from: what is missing is installed from there."""

_LIMIT_S = 100.0


def cudnn_actor(*words: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "cudnn_actor.cli", *words)


def python(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
