"""Log lines of a command: kept, and shown when they matter.

A log line in the middle of a progress bar garbles both. So lines are kept, and printed when the command
fails; `--verbose` prints each as it is written instead.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from types import TracebackType
from typing import Any, Self

import structlog
from structlog.typing import EventDict, Processor

__all__ = ["LogBook"]

_MOST_LINES = 200


class LogBook:
    """Takes structlog's lines for as long as it is entered, then puts back what was configured before.

    Parameters
    ----------
    live
        Print each line on stderr as it is written. A progress bar on a terminal makes room for it.
    """

    def __init__(self, *, live: bool = False) -> None:
        self._live = live
        self._events: deque[EventDict] = deque(maxlen=_MOST_LINES)  # appended to from any thread
        self._render = structlog.dev.ConsoleRenderer(colors=False)

    def __enter__(self) -> Self:
        self._before = structlog.get_config()
        processors: list[Processor] = [
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
            self._take,
        ]
        structlog.configure(
            processors=processors,
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
            cache_logger_on_first_use=False,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        structlog.configure(**self._before)

    def print(self) -> None:
        """Print on stderr what was kept, unless it has been printed already."""
        if not self._live:
            for event in tuple(self._events):
                self._show(event)

    def _take(self, _logger: Any, _method: str, event: EventDict) -> EventDict:
        self._events.append(event)
        if self._live:
            self._show(event)
        raise structlog.DropEvent

    def _show(self, event: EventDict) -> None:
        # sys.stderr is looked up now: while a progress bar is up, it is rich's, which prints above the bar.
        print(self._render(None, "", dict(event)), file=sys.stderr)
