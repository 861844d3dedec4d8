"""What services log, for tests to look at."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cudnn_actor.actors.logs import ROOT, EventRecord

from .patience import PATIENCE_S

if TYPE_CHECKING:
    from structlog.typing import EventDict  # which takes programs of the tests a while to import

__all__ = ["Taking", "capture_logs", "handled_by", "line"]


class Taking(logging.Handler):
    """Hands every record to a function."""

    def __init__(self, take: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record)


@contextmanager
def handled_by(take: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    """Have `take` called with every record of ours, of any level, and nobody above.

    At the end the logger is as it was: handlers that were added meanwhile (by an example that runs in this
    process and calls `cudnn_actor.logging.configure`) are taken off.
    """
    logger = logging.getLogger(ROOT)
    before = logger.level, logger.propagate, tuple(logger.handlers)
    logger.addHandler(Taking(take))
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        level, logger.propagate, logger.handlers[:] = before
        logger.setLevel(level)


@contextmanager
def capture_logs() -> Iterator[list[EventDict]]:
    """Every line as a dict: its fields, `event` and `log_level`; of an error only that there was one."""
    lines: list[EventDict] = []

    def take(record: logging.LogRecord) -> None:
        assert isinstance(record, EventRecord)
        line = {"event": record.event, "log_level": record.levelname.lower(), **record.fields}
        lines.append({**line, "exc_info": True} if record.exc_info else line)

    with handled_by(take):
        yield lines


async def line(logs: Sequence[EventDict], event: str, times: int = 1) -> EventDict:
    """The `times`-th line about an event, once it is there."""
    async with asyncio.timeout(PATIENCE_S):
        while len(found := [entry for entry in logs if entry["event"] == event]) < times:  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # the log has no event to wait for
    return found[times - 1]
