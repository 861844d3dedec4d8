"""Log lines: calls in structlog's style on the standard library's loggers; nothing is printed by default.

A line is an event with fields: `log.info("standby.ready", pid=7)`. The record's `msg` is the event, the
fields are attributes of the record, and the message reads `standby.ready service=left pid=7`. If the record
has an attribute of a field's name already (`message`), the field gets a trailing underscore (`message_`).
Context variables bound through structlog are fields too. `structlog.configure` is neither needed nor called.
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

__all__ = ["ROOT", "EventRecord", "Log", "carry_service", "service_here", "speak_for", "speaking_for"]

ROOT = "cudnn_actor"
"""The root of this package's loggers."""

logging.getLogger(ROOT).addHandler(logging.NullHandler())

_RECORDS_OWN = frozenset({*dir(logging.makeLogRecord({})), "message", "asctime", "event", "fields"})
_PLAIN = re.compile(r"[^\s\"'=]+")
_FRAMES = 4
"""Stack frames between the call that writes a line and the call that makes its record."""

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None] | None


class Log:
    """A logger for code that must not fail: supervision, replies, the end of an actor.

    If a log handler failed (stderr is a closed pipe, the disk is full), its exception would reach the code
    that logs. An actor that dies while it logs its own death is never reported as dead. So a line that cannot
    be written is lost. A line of a disabled level costs only the check of the level.

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
        """Write a line of level error. `exc_info`: an exception whose traceback is added."""
        self.write(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: Any) -> None:
        """Write a line of level error, with the traceback of the exception being handled."""
        self.write(logging.ERROR, event, {"exc_info": True, **fields})

    def write(self, level: int, event: str, fields: Mapping[str, Any]) -> None:
        """Write a line. `level` is one of `logging`'s numbers."""
        try:
            if self._logger.isEnabledFor(level):
                self._logger.handle(self._record(level, event, dict(fields)))
        except Exception:  # noqa: BLE001 - see the class: there is nowhere to report it
            return

    def _record(self, level: int, event: str, fields: dict[str, Any]) -> EventRecord:
        logger = self._logger
        exc_info = _exc_info(fields.pop("exc_info", None))
        path, line, function, _ = logger.findCaller(stacklevel=_FRAMES)
        made = logger.makeRecord(logger.name, level, path, line, event, (), exc_info, function)
        return EventRecord(made, event, _with_surroundings(fields))


class EventRecord(logging.LogRecord):
    """The record of a line. It copies a record that the program's record factory made.

    Parameters
    ----------
    made
        The copied record.
    event, fields
        The line. The field `exception` is the text of a traceback of another process.
    """

    __slots__ = ("fields",)  # not in __dict__, which formatters list: the fields are there one by one

    fields: dict[str, Any]

    def __init__(self, made: logging.LogRecord, event: str, fields: dict[str, Any]) -> None:
        self.__dict__.update(vars(made))
        self.event = event
        self.fields = fields
        self.exc_text = fields.get("exception", self.exc_text)
        for name, value in fields.items():
            setattr(self, f"{name}_" if name in _RECORDS_OWN else name, value)

    def getMessage(self) -> str:  # noqa: N802 - the standard library's name
        """The event and its fields as one line. If a handler has replaced `msg`, its text unchanged."""
        if self.msg != self.event:  # a QueueHandler has stored the formatted line
            return super().getMessage()
        shown = (f"{name}={_show(value)}" for name, value in self.fields.items() if name != "exception")
        return " ".join((self.event, *shown))


def _show(value: object) -> str:
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else repr(value)


def _exc_info(given: Any) -> ExcInfo:
    if isinstance(given, BaseException):
        return type(given), given, given.__traceback__
    return sys.exc_info() if given else None


# The service of a line is stored per thread: a thread belongs to one service or to none. A context variable
# would be wrong: message handlers run in the sender's context.


class _Speaker(threading.local):
    service: str | None = None


_speaker = _Speaker()


def service_here() -> str | None:
    """The service that this thread's log lines name; None for none."""
    return _speaker.service


def speak_for(service: str | None) -> None:
    """Put this service's name on all further log lines of this thread; None for none."""
    _speaker.service = service


@contextlib.contextmanager
def speaking_for(service: str | None) -> Iterator[None]:
    """Put a service's name on this thread's log lines within a `with` block."""
    before, _speaker.service = _speaker.service, service
    try:
        yield
    finally:
        _speaker.service = before


def carry_service(run: Callable[[], None]) -> Callable[[], None]:
    """Wrap a new thread's function, so that its log lines name the same service as this thread's."""
    service = _speaker.service

    def run_for_it() -> None:
        speak_for(service)
        run()

    return run_for_it


def _with_surroundings(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line: the service first, then its own, then the bound context variables."""
    found = fields if _speaker.service is None else {"service": _speaker.service, **fields}
    for name, value in sorted(_bound_through_structlog().items()):
        found.setdefault(name, value)
    return found


def _bound_through_structlog() -> dict[str, Any]:
    """The context variables that the program has bound. To import structlog takes as long as all of ours: as
    long as nobody else has, nothing is bound."""
    of_structlog = getattr(sys.modules.get("structlog.contextvars"), "get_contextvars", None)
    return {} if of_structlog is None else of_structlog()
