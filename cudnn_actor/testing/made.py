"""The buffers and models that a test's requests have made on its service, and the lines of the test."""

from __future__ import annotations

import itertools
import sys
from types import FrameType

from cudnn_actor.models import Model
from cudnn_actor.protocol.messages.messages import Message
from cudnn_actor.protocol.messages.model_messages import ModelRef
from cudnn_actor.protocol.types.buffers import BufferRef

__all__ = ["Made", "line_of_caller"]

_OURS = __name__.partition(".")[0]
_LOOPS = frozenset({"asyncio", "uvloop", "anyio", "threading", "concurrent"})


class Made:
    """The buffers and models that a test was given, and its requests that have no answer yet.

    Any thread may note: each note is one operation on a dict.
    """

    def __init__(self) -> None:
        self._lines: dict[object, str | None] = {}
        self._models: dict[ModelRef, Model] = {}
        self._of_models: set[tuple[int, int]] = set()
        self._requests: dict[int, tuple[str, str | None]] = {}
        self._numbers = itertools.count()

    def note(self, what: BufferRef | ModelRef | Model, line: str | None) -> None:
        """Note a buffer or a model that a test was given, and the line that made it; None for an unknown
        line.

        A model is held until the service has ended. Otherwise it would be collected and unloaded before the
        check could notice that it was not closed.
        """
        if isinstance(what, Model):
            self._models[what.ref] = what
        self._lines[_key(what)] = line

    def note_of_model(self, buffer: BufferRef) -> None:
        """Note a buffer that a model has allocated for itself."""
        self._of_models.add((buffer.slot, buffer.generation))

    def begin(self, message: Message, line: str | None) -> int:
        """Note a request that was sent. Returns its number, for `end`."""
        number = next(self._numbers)
        self._requests[number] = (type(message).__name__, line)
        return number

    def end(self, number: int) -> None:
        """Note that a request was answered."""
        self._requests.pop(number, None)

    def is_of_a_model(self, buffer: BufferRef) -> bool:
        """Whether a model has allocated it for itself."""
        return (buffer.slot, buffer.generation) in self._of_models

    def line_of(self, what: BufferRef | ModelRef) -> str | None:
        """The line that made it; None if it is not known."""
        return self._lines.get(_key(what))

    def describe(self, model: ModelRef) -> str:
        """A model's name, with its inputs and outputs if they are known."""
        known = self._models.get(model)
        return repr(model) if known is None else f"{model!r} {known!r}"

    def unanswered_requests(self) -> list[tuple[str, str | None]]:
        """The message classes and lines of requests that have no answer yet, as far as they are known."""
        return list(self._requests.values())


def line_of_caller() -> str | None:
    """The innermost line of this thread's stack outside this package, as "file:line in function".

    None if an event loop has called it: the code that made the task is not on the stack.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in _LOOPS:
            return None
        if package != _OURS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None


def _key(what: BufferRef | ModelRef | Model) -> object:
    if isinstance(what, BufferRef):
        return what.slot, what.generation
    return what.ref if isinstance(what, Model) else what
