"""Log lines of a worker, sent to its parent: there they are written, in the format that its user chose."""

from __future__ import annotations

import traceback
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

from cudnn_actor.workers.process.inbox import Inbox
from cudnn_actor.workers.process.outbox import Outbox
from cudnn_actor.workers.wire import Logged

__all__ = ["forward_logs"]

_LEVELS = {"debug", "info", "warning", "error", "critical"}
_LONGEST = 4000


def forward_logs(outbox: Outbox, inbox: Inbox, in_work: Callable[[], int]) -> None:
    """Send every line to the parent from now on; `in_work` says the number of the request at hand.

    A line of another thread than the actor's wakes that, which sends it.
    """

    def forward(logger: _Named, method: str, line: MutableMapping[str, Any]) -> Any:
        fields = dict(line)
        event = str(fields.pop("event", ""))
        if event == "actor.died":  # which the keeper says, once
            raise structlog.DropEvent
        _render_error(fields)
        level: Any = method if method in _LEVELS else "error"
        plain = {name: _plain(value) for name, value in fields.items()}
        outbox.log(Logged(in_work(), logger.name, level, event, plain))
        inbox.nudge()
        raise structlog.DropEvent

    structlog.configure(
        processors=[forward],
        wrapper_class=structlog.make_filtering_bound_logger(0),
        logger_factory=_Named,
        cache_logger_on_first_use=False,
    )


class _Named:
    """What structlog wraps: a logger's name, since nothing is written here."""

    def __init__(self, name: str = "cudnn_actor", *_: Any) -> None:
        self.name = name

    def __getattr__(self, _method: str) -> Any:
        return _written_elsewhere


def _render_error(fields: dict[str, Any]) -> None:
    """An exception as text: what it was raised by stays in this process."""
    error = fields.pop("exc_info", None)
    if isinstance(error, BaseException):
        fields["exception"] = "".join(traceback.format_exception(error))
    elif error:
        fields["exception"] = traceback.format_exc()


def _plain(value: Any) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)[:_LONGEST]


def _written_elsewhere(*_: Any, **__: Any) -> None:
    pass
