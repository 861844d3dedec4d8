"""Runs a benchmark in this process, whose forkserver has its imports already: that takes a third as long."""

from __future__ import annotations

import contextlib
import importlib
import io
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

__all__ = ["ROOT", "measured"]

ROOT = Path(__file__).parents[2]


def measured(name: str, words: str | Sequence[str], out: Path | None = None) -> tuple[int, str]:
    """The status of `python -m benchmarks.NAME WORDS --out OUT`, and what it prints. Blocks until it ends.

    `words`: with spaces between them, or one by one.
    Raises what the benchmark raises, and leaves SIGTERM as it was: to some it is ^C until they end.
    """
    module = importlib.import_module(f"benchmarks.{name}")
    argv = [
        name,
        *(words.split() if isinstance(words, str) else words),
        *([] if out is None else ["--out", str(out)]),
    ]
    output, before = io.StringIO(), signal.getsignal(signal.SIGTERM)
    try:
        with mock.patch.object(sys, "argv", argv), contextlib.chdir(ROOT), contextlib.redirect_stdout(output):
            status = module.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    return status or 0, output.getvalue()
