"""Runs a benchmark in this process, whose forkserver has its imports already: that takes a third as long.

The processes of Python that it starts are forked, too: see `forked_programs`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from ..forked_programs import Program, run

__all__ = ["ROOT", "forked_processes", "measured"]

ROOT = Path(__file__).parents[2]


_FORKING = (
    "benchmarks.attached",
    "benchmarks.gpu.__main__",
    "benchmarks.gpu.cold",
    "benchmarks.killed_clients",
    "benchmarks.models",
    "benchmarks.serving",
    "benchmarks.shared_service",
)
"""Modules that start processes of Python, from which they read text. One that is not imported starts none."""


class _Forking:
    """What these modules use of `subprocess`."""

    PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
    SubprocessError, CalledProcessError = subprocess.SubprocessError, subprocess.CalledProcessError

    @staticmethod
    def Popen(command: Sequence[str], *, text: bool = True, **how: Any) -> Program:  # noqa: N802
        return Program(_words(command), spare=True, **how)

    @staticmethod
    def run(
        command: Sequence[str], *, text: bool, capture_output: bool = False, **how: Any
    ) -> subprocess.CompletedProcess[str]:
        return run(_words(command), spare=True, **how)


def _words(command: Sequence[str]) -> Sequence[str]:
    assert command[0] == sys.executable, "this program is not one of this interpreter"
    return command[1:]


@contextlib.contextmanager
def forked_processes() -> Iterator[None]:
    """Have the processes of benchmarks forked."""
    with contextlib.ExitStack() as stack:
        for module in filter(None, map(sys.modules.get, _FORKING)):
            stack.enter_context(mock.patch.object(module, "subprocess", _Forking))
        yield


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
        with (
            mock.patch.object(sys, "argv", argv),
            contextlib.chdir(ROOT),
            contextlib.redirect_stdout(output),
            forked_processes(),
        ):
            status = module.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    return status or 0, output.getvalue()
