"""Sends a worker's log lines to its parent, whose loggers, as the user has configured them, write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cudnn_actor.actors.diverting import LEVELS, Line, divert_lines
from cudnn_actor.isolation.process.child.inbox import Inbox
from cudnn_actor.isolation.process.child.outbox import Outbox
from cudnn_actor.isolation.process.wire import Logged

__all__ = ["forward_logs"]


def forward_logs(outbox: Outbox, inbox: Inbox, in_work: Callable[[], int]) -> None:
    """Send every line to the parent from now on. `in_work` returns the number of the current request.

    The main thread sends the lines. A line of any other thread wakes it.
    """

    def forward(line: Line) -> None:
        outbox.log(Logged(in_work(), line.logger, _level(line.level), line.event, line.fields))
        inbox.nudge()

    divert_lines(forward)


def _level(number: int) -> Any:
    """The name of the highest of `logging`'s levels that does not exceed this number."""
    return next((name for name, level in reversed(LEVELS.items()) if level <= number), "debug")
