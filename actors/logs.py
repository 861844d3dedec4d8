"""Log lines that cannot fail whoever writes them."""

from __future__ import annotations

from typing import Any

import structlog

__all__ = ["Log"]


class Log:
    """A structlog logger for code that must go on: supervision, replies, the end of an actor.

    A sink that fails (stdout is a closed pipe, the disk is full) would raise into the writer, and an
    actor that dies of a log line about its death is never reported as dead. What cannot be written is lost.

    Parameters
    ----------
    name
        The logger's name.
    """

    def __init__(self, name: str) -> None:
        self._logger = structlog.get_logger(name)

    def debug(self, event: str, **fields: Any) -> None:
        """Write a line of level debug."""
        self._write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Write a line of level info."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Write a line of level warning."""
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Write a line of level error."""
        self._write("error", event, fields)

    def critical(self, event: str, **fields: Any) -> None:
        """Write a line of level critical."""
        self._write("critical", event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """Write a line of level error, with the traceback of the exception being handled."""
        self._write("exception", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        try:
            getattr(self._logger, level)(event, **fields)
        except Exception:  # noqa: BLE001 - see the class: there is nobody left to tell
            return
