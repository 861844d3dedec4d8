"""Keeps values that take seconds to compute, and are the same in each run of the tests.

One process computes a value, and the others read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

__all__ = ["KEPT", "kept"]

T = TypeVar("T")

KEPT = Path(__file__).resolve().parents[1] / "build" / "kept-for-tests"
"""The folder of the values, for other processes and runs. `make clean` removes it."""


def kept(name: str, compute: Callable[[], T], folder: Path = KEPT) -> T:
    """The value that an earlier call has kept under this name, else the one that `compute` returns.

    The name says all that the value depends on, such as versions of packages. Blocks while another process
    computes it. A file that cannot be read is computed again. Where no file can be written, none is.
    """
    file = folder / f"{name}.pickle"
    with contextlib.suppress(Exception):  # a damaged file may raise any error
        return cast("T", pickle.loads(file.read_bytes()))
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((folder / f"{name}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            return compute()
        with contextlib.suppress(Exception):  # it has been computed meanwhile
            return cast("T", pickle.loads(file.read_bytes()))
        value = compute()
        with contextlib.suppress(OSError):  # the disk may be full
            unfinished = folder / f"{name}.{os.getpid()}"
            unfinished.write_bytes(pickle.dumps(value))
            unfinished.replace(file)
        return value
