"""Keeps values that take seconds to compute, and are the same in each run of the tests.

One process computes a value, and the others read it.
"""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["KEPT", "kept"]

T = TypeVar("T")

KEPT = Path(__file__).resolve().parents[1] / "build" / "kept-for-tests"
"""The folder of the values, for other processes and runs. `make clean` removes it."""


def kept(name: str, compute: Callable[[], T], folder: Path = KEPT) -> T:
    """The value that an earlier call has kept under this name, else the one that `compute` returns.

    The name says all that the value depends on, such as versions of packages. Blocks while another process
    computes it. A file that was not written to its end is computed again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.pickle"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            value: T = pickle.loads(file.read_bytes())
        except (OSError, EOFError, pickle.UnpicklingError):
            value = compute()
            unfinished = folder / f"{name}.{os.getpid()}"
            unfinished.write_bytes(pickle.dumps(value))
            unfinished.replace(file)
        return value
