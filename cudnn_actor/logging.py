"""Prints log lines to a stream, for programs that do not configure logging themselves.

Without this, or a configuration of the standard library's logging, no line is printed: the loggers are
`logging.getLogger("cudnn_actor")` and those below it, with a `NullHandler`.
"""

from __future__ import annotations

import datetime
import json as _json
import logging
import sys
from typing import Any, TextIO

from cudnn_actor.actors.logs import ROOT, EventRecord

__all__ = ["JsonFormatter", "TextFormatter", "configure"]


def configure(*, json: bool = False, level: int | str = "INFO", stream: TextIO | None = None) -> None:
    """Print the log lines of this process's services and of their workers. A second call replaces the first.

    The program's other loggers stay unchanged. Its handlers no longer get these lines.

    Parameters
    ----------
    json
        Whether to print one JSON object per line (`JsonFormatter`) instead of text (`TextFormatter`).
    level
        The lowest level to print: "DEBUG", "INFO", "WARNING", "ERROR", or a number of `logging`.
    stream
        Where to print; None for `sys.stderr`, looked up for each line.

    Raises
    ------
    ValueError, TypeError
        `level` is not a level.
    """
    logger = logging.getLogger(ROOT)
    logger.setLevel(level)  # first: it raises for what is not a level
    for handler in tuple(logger.handlers):
        if isinstance(handler, _StreamHandler):
            logger.removeHandler(handler)
    handler = _StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if json else TextFormatter())
    logger.addHandler(handler)
    logger.propagate = False


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 WARNING service.restarting service=cudnn child=cudnn ...`, in local time."""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")


class JsonFormatter(logging.Formatter):
    """One object per line: timestamp (ISO 8601, UTC), level, logger, event, the fields, an exception's text.

    A value that JSON cannot represent is written as `str(value)`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "timestamp": moment.isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        if isinstance(record, EventRecord):
            line |= {**record.fields, **line, "event": record.event}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _json.dumps(line, default=str)


class _StreamHandler(logging.Handler):
    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        stream = self._stream or sys.stderr
        stream.write(f"{self.format(record)}\n")
        stream.flush()
