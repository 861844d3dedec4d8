"""Stores the log lines of a command, and prints them if it fails.

A log line in the middle of a progress bar garbles both. So lines are stored, and printed when the command
fails; with `--verbose`, each is printed as it is written.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from types import TracebackType
from typing import Self

from cudnn_actor.actors.logs import ROOT
from cudnn_actor.logging import TextFormatter

__all__ = ["LogBook"]

_MOST_LINES = 200


class LogBook(logging.Handler):
    """Takes the log lines of all services within a `with` block, then restores the previous handlers.

    Parameters
    ----------
    live
        Print each line on stderr as it is written. A progress bar on a terminal makes room for it.
    """

    def __init__(self, *, live: bool = False) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(TextFormatter())
        self._live = live
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)  # appended to from any thread

    def __enter__(self) -> Self:
        logger = logging.getLogger(ROOT)
        self._before = logger.level, logger.propagate
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logger = logging.getLogger(ROOT)
        logger.removeHandler(self)
        level, logger.propagate = self._before
        logger.setLevel(level)

    def print(self) -> None:
        """Print the stored lines on stderr, unless they have been printed already."""
        if not self._live:
            for line in tuple(self._lines):
                self._show(line)

    def emit(self, record: logging.LogRecord) -> None:
        """Store a line, or print it."""
        line = self.format(record)
        self._lines.append(line)
        if self._live:
            self._show(line)

    def _show(self, line: str) -> None:
        # Looks up sys.stderr each time: while a progress bar is shown, it is rich's, which prints above the
        # bar.
        print(line, file=sys.stderr)
