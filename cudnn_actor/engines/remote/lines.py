"""Log lines of a builder process: sent to its parent, and written there."""

from __future__ import annotations

from typing import Protocol

from cudnn_actor.actors.diverting import divert_lines, write_line
from cudnn_actor.engines.remote.frames import Answer, Logged

__all__ = ["send_lines", "written"]


class _Channel(Protocol):
    def send(self, answer: Answer) -> None: ...


def send_lines(channel: _Channel) -> None:
    """Send every line of this process to the parent from now on. They are all of the thread that builds."""
    divert_lines(lambda line: channel.send(Logged(line)))


def written(frame: object) -> bool:
    """Whether a frame from a child was a line of its log, which has been written here then."""
    if not isinstance(frame, Logged):
        return False
    write_line(frame.line)
    return True
