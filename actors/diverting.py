"""The log of a process that another one has started: its lines go to that one, as plain data."""

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
"""`logging`'s own names may have been changed by the program that we are in."""

Plain = str | int | float | bool | None
_LONGEST = 4000


class Line(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A log line on its way to another process. `level` is `logging`'s number."""

    logger: str
    level: int
    event: str
    fields: dict[str, Plain]


def divert_lines(take: Callable[[Line], None]) -> None:
    """Have `take` called with every line of ours from now on, on the thread that writes it, and nobody else.

    For a process of our own: what was configured before, or inherited by a fork, is taken off.
    """
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [_Diverted(take)]
    logger.setLevel(logging.DEBUG)  # who reads them knows better what he wants to see
    logger.propagate = False
    logger.disabled = False


def write_line(line: Line) -> None:
    """Write a line of another process here. Of a logger that is none of ours it is written under ours."""
    known = line.logger == ROOT or line.logger.startswith(f"{ROOT}.")
    Log(line.logger if known else ROOT).write(line.level, line.event, line.fields)


class _Diverted(logging.Handler):
    def __init__(self, take: Callable[[Line], None]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(_line_of(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the standard library's name
        """Nothing: what cannot be sent is lost."""


def _line_of(record: logging.LogRecord) -> Line:
    fields: dict[str, Any] = {}
    event = record.getMessage()
    if isinstance(record, EventRecord):
        fields, event = dict(record.fields), record.event
    if record.exc_info and record.exc_info[1] is not None:  # as text: what it was raised by stays here
        fields["exception"] = "".join(traceback.format_exception(record.exc_info[1]))
    plain = {name: _plain(value) for name, value in fields.items()}
    return Line(record.name, record.levelno, event, plain)


def _plain(value: Any) -> Plain:
    if value is None or type(value) in (bool, float) or (type(value) is int and abs(value) < 1 << 63):
        return value  # type: ignore[no-any-return]
    return str(value)[:_LONGEST]
