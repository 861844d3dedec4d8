"""Log lines: structlog's calls, the standard library's loggers, nothing printed unless somebody asks for it.

A line is an event with fields: `log.info("standby.ready", pid=7)`. Its record's `msg` is the event, its
fields are attributes, and its message reads `standby.ready service=left pid=7`. Where an attribute of that
name is the record's own (`message`), the field's has an underscore behind it (`message_`). Context variables
that structlog's users have bound are fields too; `structlog.configure` is neither needed nor touched.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from structlog.contextvars import get_contextvars

__all__ = ["ROOT", "EventRecord", "Log", "carrying", "service_here", "speak_for", "speaking_for"]

ROOT = "cudnn_actor"
"""The logger above all of ours."""

logging.getLogger(ROOT).addHandler(logging.NullHandler())

_RECORDS_OWN = frozenset({*dir(logging.makeLogRecord({})), "message", "asctime", "event", "fields"})
_PLAIN = re.compile(r"[^\s\"'=]+")
_FRAMES = 4
"""From where a line is written to where its record is made."""

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None] | None


class Log:
    """A logger for code that must go on: supervision, replies, the end of an actor.

    A handler that fails (stderr is a closed pipe, the disk is full) would raise into the writer, and an
    actor that dies of a log line about its death is never reported as dead. What cannot be written is lost.
    A line of a level that is switched off costs the look at the level.

    Parameters
    ----------
    name
        The logger's name.
    """

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: Any) -> None:
        """Write a line of level debug."""
        self.write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        """Write a line of level info."""
        self.write(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        """Write a line of level warning."""
        self.write(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        """Write a line of level error. `exc_info`: an exception whose traceback goes with it."""
        self.write(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: Any) -> None:
        """Write a line of level error, with the traceback of the exception being handled."""
        self.write(logging.ERROR, event, {"exc_info": True, **fields})

    def write(self, level: int, event: str, fields: Mapping[str, Any]) -> None:
        """Write a line of a level of `logging`'s."""
        try:
            if self._logger.isEnabledFor(level):
                self._logger.handle(self._record(level, event, dict(fields)))
        except Exception:  # noqa: BLE001 - see the class: there is nobody left to tell
            return

    def _record(self, level: int, event: str, fields: dict[str, Any]) -> EventRecord:
        logger = self._logger
        exc_info = _exc_info(fields.pop("exc_info", None))
        path, line, function, _ = logger.findCaller(stacklevel=_FRAMES)
        made = logger.makeRecord(logger.name, level, path, line, event, (), exc_info, function)
        return EventRecord(made, event, _with_surroundings(fields))


class EventRecord(logging.LogRecord):
    """The record of a line. Made of one that the program's own record factory has made.

    Parameters
    ----------
    made
        That record.
    event, fields
        The line. `exception` is the text of a traceback of another process.
    """

    __slots__ = ("fields",)  # beside the attributes that formatters look through: there they stand one by one

    fields: dict[str, Any]

    def __init__(self, made: logging.LogRecord, event: str, fields: dict[str, Any]) -> None:
        self.__dict__.update(vars(made))
        self.event = event
        self.fields = fields
        self.exc_text = fields.get("exception", self.exc_text)
        for name, value in fields.items():
            setattr(self, f"{name}_" if name in _RECORDS_OWN else name, value)

    def getMessage(self) -> str:  # noqa: N802 - the standard library's name
        """The event and its fields as one line. What a handler has put in place of the event, as it is."""
        if self.msg != self.event:  # a QueueHandler's: the line as it formatted it
            return super().getMessage()
        shown = (f"{name}={_shown(value)}" for name, value in self.fields.items() if name != "exception")
        return " ".join((self.event, *shown))


def _shown(value: object) -> str:
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else repr(value)


def _exc_info(given: Any) -> ExcInfo:
    if isinstance(given, BaseException):
        return type(given), given, given.__traceback__
    return sys.exc_info() if given else None


# Which service a line belongs to is noted for each thread, since a thread belongs to one service or to none.
# A context variable would not do: handlers run in the context of whoever has asked.


class _Speaker(threading.local):
    service: str | None = None


_speaker = _Speaker()


def service_here() -> str | None:
    """The service that this thread's lines are of, if they are of one."""
    return _speaker.service


def speak_for(service: str | None) -> None:
    """Have all lines of this thread, from here on, say that they are of a service."""
    _speaker.service = service


@contextlib.contextmanager
def speaking_for(service: str | None) -> Iterator[None]:
    """Have the lines of this thread say so for a while, on a thread that is not the service's own."""
    before, _speaker.service = _speaker.service, service
    try:
        yield
    finally:
        _speaker.service = before


def carrying(run: Callable[[], None]) -> Callable[[], None]:
    """What a new thread is to run, so that it speaks for the same service as this one."""
    service = _speaker.service

    def run_for_it() -> None:
        speak_for(service)
        run()

    return run_for_it


def _with_surroundings(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line: the service first, then its own, then the context variables that are bound."""
    found = fields if _speaker.service is None else {"service": _speaker.service, **fields}
    for name, value in sorted(get_contextvars().items()):
        found.setdefault(name, value)
    return found
