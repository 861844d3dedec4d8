"""The expected behaviour of the service: a model of each buffer, and a judge of each answer.

A buffer's model is the list of contents that it may have: one if all its requests ended in receipts; more
if a caller gave up on a request that may have run; anything if an error says that the contents are
unreliable. The model also records whether a crash may have torn the buffer. After it is read back, one is
left.

=================================  ==================================  =====================================
a request that ended in            did to what it writes               is right only if
=================================  ==================================  =====================================
a receipt, or an array             what it says, once                  nothing that it names is torn
`OutcomeUnknown`                   tore it                             it accumulates, or a later request of
                                                                       its burst writes what it reads, or
                                                                       another may have torn what it names
`QuarantinedRequest`               anything, and perhaps tore it       always; the task gives its plan up
`StaleBufferError`                 nothing                             it says torn, and the buffer may be
`ExecutionFailed`                  anything                            this fault is being injected
`OutOfMemory`                      nothing                             this fault is being injected
`DeadlineExceeded`, not started    nothing                             the request had a timeout
`DeadlineExceeded`, started        perhaps what it says; perhaps torn  the request had a timeout
`asyncio.CancelledError`           the same                            its caller cancelled it
`Alarmed`                          the same, or was never sent         its caller set an alarm
=================================  ==================================  =====================================

Everything else is wrong. Requests of a burst are judged in the order in which they were sent, with one
exception: a crash may tear what request 2 writes, and request 1, which was running too and runs again, then
finds the buffer torn. So a buffer that any request of a burst may have torn excuses the other requests.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cudnn_actor.protocol import (
    BufferRef,
    DeadlineExceeded,
    ExecutionFailed,
    MailboxFull,
    Message,
    OutcomeUnknown,
    OutOfMemory,
    QuarantinedRequest,
    Receipt,
    StaleBufferError,
    StaleReason,
    TensorSpec,
)
from cudnn_actor.protocol.messages import Download

__all__ = ["Alarmed", "Contents", "Deed", "Model", "Oracle", "Torn", "Wrong", "both", "describe", "text"]

Contents = tuple[np.ndarray, ...] | None
"""What a buffer may hold: one of these; None: anything."""

_Finding = tuple[str, str] | None
"""What was expected and what came, if that is wrong."""

_REMEMBERED = 12
_MOST = 8
"""The most alternatives that are tracked; more count as anything."""


class Alarmed(Exception):
    """Raised by an alarm's handler in the middle of a call: it is unknown whether the request was sent."""


class Torn(enum.Enum):
    """Whether a crash has torn a buffer."""

    NO = "no"
    MAYBE = "maybe"
    YES = "yes"


@dataclass(slots=True, eq=False)
class Model:
    """The expected contents of a buffer."""

    ref: BufferRef
    contents: Contents = None
    torn: Torn = Torn.NO
    owned: bool = True
    """Whether it belongs to one task. Shared buffers are never written."""
    story: deque[tuple[Deed, object]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """The last requests that named it, each with its outcome."""


@dataclass(slots=True, eq=False)
class Deed:
    """A request, and its effect on the models.

    Parameters
    ----------
    message
        The message.
    uses
        The buffers that it names.
    writes
        The buffer that it writes, if any.
    after
        Computes what that buffer holds once the request has run, from the models at the time of the call.
    accumulates
        Whether it reads what it writes: then it must not run twice.
    timeout_s, cancel_after_s
        When its caller gives up; None for never.
    alarmed
        Whether an alarm may interrupt the call that sends it.
    """

    message: Message
    uses: tuple[Model, ...]
    writes: Model | None = None
    after: Callable[[], Contents] = lambda: None
    accumulates: bool = False
    timeout_s: float | None = None
    cancel_after_s: float | None = None
    alarmed: bool = False

    @property
    def reads(self) -> tuple[Model, ...]:
        """The buffers that it names and does not write."""
        return tuple(model for model in self.uses if model is not self.writes)


@dataclass(frozen=True, slots=True)
class Wrong:
    """An answer that the service should not have given."""

    request: str
    expected: str
    got: str
    story: tuple[str, ...] = ()
    """The history of the buffer: its last requests and their outcomes."""


def both(one: Contents, other: Contents) -> Contents:
    """The contents of a buffer that holds either the one or the other."""
    if one is None or other is None or len(one) + len(other) > _MOST:
        return None
    return one + other


class Oracle:
    """Judges the answers of one service.

    Parameters
    ----------
    injected
        The errors that are being injected.
    excusable
        Whether a request that could run again may be refused instead: in thread isolation, where a hung
        thread cannot be ended.
    """

    def __init__(self, injected: Container[type[Exception]] = (), *, excusable: bool = False) -> None:
        self._injected = injected
        self._excusable = excusable

    def judge(self, burst: Sequence[Deed], outcomes: Sequence[object]) -> list[Wrong]:
        """Update the models after a burst. Returns the wrong answers.

        Each outcome is an answer or an exception.
        """
        shaken: dict[
            int, bool
        ] = {}  # by a model's id: whether a request that was not itself refused for it may have torn it
        for deed, outcome in zip(burst, outcomes, strict=True):
            if deed.writes is not None and _may_have_torn(outcome):
                shaken[id(deed.writes)] = shaken.get(id(deed.writes), False) or not _was_refused(outcome)
        wrongs = []
        for place, (deed, outcome) in enumerate(zip(burst, outcomes, strict=True)):
            found = self._take(deed, outcome, shaken, burst[place + 1 :])
            if found is not None:
                wrongs.append(Wrong(describe(deed), *found, _story(deed)))
                for model in deed.uses if deed.writes is None else (deed.writes,):
                    model.contents = None  # report one wrong answer only once
            for model in deed.uses:
                if model.owned:
                    model.story.append((deed, outcome))
        return wrongs

    def _take(
        self, deed: Deed, outcome: object, shaken: Mapping[int, bool], later: Sequence[Deed]
    ) -> _Finding:
        match outcome:
            case OutcomeUnknown():
                torn = any(model.torn is not Torn.NO or shaken.get(id(model)) for model in deed.uses)
                refused = _was_refused(outcome) and (torn or OutOfMemory in self._injected)
                _tear(deed.writes, Torn.YES)
                if not (deed.accumulates or self._excusable or refused or _overwritten(deed, later)):
                    return "to be run again, being pure", text(outcome)
                return None
            case QuarantinedRequest():
                _tear(deed.writes, Torn.MAYBE)
                _forget(deed.writes)
                return None
            case StaleBufferError():
                return _stale(deed, outcome, shaken)
            case BaseException():
                return self._refused(deed, outcome)
            case _:
                return _answered(deed, outcome)

    def _refused(self, deed: Deed, error: BaseException) -> _Finding:
        match error:
            case ExecutionFailed() if ExecutionFailed in self._injected:
                _forget(deed.writes)
            case OutOfMemory() if OutOfMemory in self._injected:
                pass
            case MailboxFull():
                pass
            case DeadlineExceeded() if deed.timeout_s is not None:
                if error.started:
                    _perhaps(deed)
            case asyncio.CancelledError() if deed.cancel_after_s is not None:
                _perhaps(deed)
            case Alarmed() if deed.alarmed:
                _perhaps(deed)
            case _:
                return "an answer", text(error)
        return None


def _may_have_torn(outcome: object) -> bool:
    match outcome:
        case OutcomeUnknown() | QuarantinedRequest() | asyncio.CancelledError() | Alarmed():
            return True
        case DeadlineExceeded(started=True):
            return True
    return False


def _was_refused(outcome: object) -> bool:
    """Whether the second run was refused, because another request had torn what it names."""
    return isinstance(outcome, OutcomeUnknown) and "refused" in outcome.why


def _overwritten(deed: Deed, later: Sequence[Deed]) -> bool:
    written = [other.writes for other in later if other.writes is not None]
    return any(model is other for model in deed.reads for other in written)


def _tear(model: Model | None, torn: Torn) -> None:
    if model is not None and model.torn is not Torn.YES:
        model.torn = torn


def _forget(model: Model | None) -> None:
    if model is not None:
        model.contents = None


def _perhaps(deed: Deed) -> None:
    """Update for a request that may have run to its end, or not at all, or may have been interrupted."""
    if deed.writes is not None:
        deed.writes.contents = both(deed.writes.contents, deed.after())
        _tear(deed.writes, Torn.MAYBE)


def _stale(deed: Deed, error: StaleBufferError, shaken: Container[int]) -> _Finding:
    for model in deed.uses:
        if model.ref.slot == error.slot and error.reason is StaleReason.TORN:
            expected = model.torn is not Torn.NO or id(model) in shaken
            if model.owned:
                model.torn = Torn.YES
            if expected:
                return None
    return "buffers that nothing has torn or freed", text(error)


def _answered(deed: Deed, answer: object) -> _Finding:
    for model in deed.uses:
        if model.torn is Torn.YES:
            return f"StaleBufferError, for {model.ref} is torn", text(answer)
        model.torn = Torn.NO
    if deed.writes is not None:
        deed.writes.contents = deed.after()
        if not isinstance(answer, Receipt):
            return "a Receipt", text(answer)
    if type(deed.message) is Download:
        return _read_back(deed.uses[0], answer)
    return None


def _read_back(model: Model, answer: object) -> _Finding:
    if not isinstance(answer, np.ndarray) or answer.shape != model.ref.spec.dims:
        return f"an array of dims {model.ref.spec.dims}", text(answer)
    if model.contents is None:
        return None
    for candidate in model.contents:
        if np.array_equal(candidate, answer):
            model.contents = (candidate,)
            return None
    return " or ".join(map(text, model.contents)) + _difference(model.contents[0], answer), text(answer)


def _difference(wanted: np.ndarray, got: np.ndarray) -> str:
    """Where two arrays differ, as text."""
    differs = np.argwhere(wanted != got)
    first = tuple(int(index) for index in differs[0])
    where = f"at {first} {wanted[first]:g}, not {got[first]:g}"
    return f" (of {wanted.size} elements {len(differs)} differ; {where})"


def _story(deed: Deed) -> tuple[str, ...]:
    """The history of the buffer that an answer was wrong about."""
    model = deed.uses[0] if deed.writes is None else deed.writes
    return tuple(f"{describe(earlier)}: {text(outcome)}" for earlier, outcome in model.story)


def describe(deed: Deed) -> str:
    """A request as one line of text."""
    message, words = deed.message, [type(deed.message).__name__]
    for name in message.__struct_fields__:
        given = getattr(message, name)
        if isinstance(given, (BufferRef, TensorSpec)):
            words.append(f"{name}={given}")
    words += ["beta=1"] if deed.accumulates else []
    words += [] if deed.timeout_s is None else [f"timeout={deed.timeout_s:g}"]
    words += [] if deed.cancel_after_s is None else [f"cancelled after {deed.cancel_after_s:g} s"]
    return " ".join(words)


def text(outcome: object) -> str:
    """An outcome as one line of text."""
    if isinstance(outcome, np.ndarray):
        head = ", ".join(f"{value:g}" for value in outcome.ravel()[:6])
        return f"[{head}{', ...' if outcome.size > 6 else ''}]"
    if isinstance(outcome, BaseException):
        return f"{type(outcome).__name__}: {outcome}"
    return repr(outcome)
