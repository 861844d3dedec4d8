"""Log lines of a child process: they are sent as plain data to the process that started it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from cudnn_actor.actors.logs import ROOT, EventRecord, Log

__all__ = ["LEVELS", "Line", "divert_lines", "write_line"]

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
"""Our own table: the program that we run in may have renamed `logging`'s levels."""

Plain = str | int | float | bool | None
_LONGEST = 4000


class Line(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A log line sent to another process. `level` is `logging`'s number."""

    logger: str
    level: int
    event: str
    fields: dict[str, Plain]


def divert_lines(take: Callable[[Line], None]) -> None:
    """Pass every log line of this package to `take`, and to no other handler.

    `take` is called on the thread that writes the line. For a process that we have started: handlers that
    were configured before, or inherited by a fork, are removed.
    """
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [_Diverted(take)]
    logger.setLevel(logging.DEBUG)  # the receiving process filters by level
    logger.propagate = False
    logger.disabled = False


def write_line(line: Line) -> None:
    """Write a line of another process here. A line of a logger outside this package goes to our root
    logger."""
    known = line.logger == ROOT or line.logger.startswith(f"{ROOT}.")
    Log(line.logger if known else ROOT).write(line.level, line.event, line.fields)


class _Diverted(logging.Handler):
    def __init__(self, take: Callable[[Line], None]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(_line_of(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the standard library's name
        """Do nothing: a line that cannot be sent is lost."""


def _line_of(record: logging.LogRecord) -> Line:
    fields: dict[str, Any] = {}
    event = record.getMessage()
    if isinstance(record, EventRecord):
        fields, event = dict(record.fields), record.event
    if record.exc_info and record.exc_info[1] is not None:  # as text: the exception object stays here
        fields["exception"] = "".join(traceback.format_exception(record.exc_info[1]))
    plain = {name: _plain(value) for name, value in fields.items()}
    return Line(record.name, record.levelno, event, plain)


def _plain(value: Any) -> Plain:
    if value is None or type(value) in (bool, float) or (type(value) is int and abs(value) < 1 << 63):
        return value  # type: ignore[no-any-return]
    return str(value)[:_LONGEST]
