"""The expected behaviour of the service: a model of each buffer, and a judge of each answer.

A buffer's model is the list of contents that it may have: one if all its requests ended in receipts; more
if a caller gave up on a request that may have run; anything if an error says that the contents are
unreliable. The model also records whether a crash may have torn the buffer. After it is read back, one is
left.

=================================  ==================================  =====================================
a request that ended in            did to what it writes               is right only if
=================================  ==================================  =====================================
a receipt, an array, or buffers    what it says, once                  nothing that it names is torn
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

A request may write several buffers, and a crash tears all or none of them. So if only one request can have
torn a torn buffer, that request's other outputs are torn too. And an answer that used one of the outputs of a
request shows that this request has torn none of them.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

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
from cudnn_actor.protocol.messages.messages import Allocate, Download
from cudnn_actor.protocol.messages.operands import operands
from cudnn_actor.protocol.messages.run_loop import RunLoop

__all__ = [
    "MOST_CONTENTS",
    "After",
    "Alarmed",
    "Contents",
    "Deed",
    "Model",
    "Oracle",
    "Torn",
    "Wrong",
    "both",
    "describe",
    "text",
    "was_refused",
]

Contents = tuple[np.ndarray, ...] | None
"""The arrays of which a buffer may hold one; None if it may hold anything."""

_Finding = tuple[str, str] | None
"""The expected answer and the one that came, as texts; None if the answer is right."""

_Shaken = dict["Model", list[tuple["Deed", object]]]
"""The requests of a burst that may have torn a buffer, with their outcomes."""

_REMEMBERED = 12
MOST_CONTENTS = 8
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
    tolerance: float = 0.0
    """The allowed error of its contents, relative to the largest element."""
    suspects: list[Deed] = field(default_factory=list)
    """The requests that may have torn it."""
    story: deque[tuple[Deed, object]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """The last requests that named it, each with its outcome."""


After = Callable[[], Contents]
"""Computes what a buffer holds once a request has run, from the models at the time of the call."""


@dataclass(frozen=True, slots=True)
class ModelRun:
    """A run of a whole model, which sends several requests. `case`: the number of its inputs."""

    case: int
    accumulates: ClassVar[bool] = False

    @property
    def message(self) -> ModelRun:
        """This run itself: the counters name a request by the type of its `message`."""
        return self


class BatchedRun(ModelRun):
    """A request to a batched model."""


class WeightWrite(ModelRun):
    """A write of all weights of a model. `case`: the version that is written."""


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
        The buffers that it writes, and what each holds afterwards.
    gives
        For an operation that is sent by `apply`, not by `ask`: the specs of all its outputs, of which the
        service allocates those that the message leaves out.
    also
        For such an operation: the optional outputs that are allocated too.
    accumulates
        Whether it reads what it writes, so that it must not run twice.
    timeout_s, cancel_after_s
        When its caller gives up; None for never.
    alarmed
        Whether an alarm may interrupt the call that sends it.
    """

    message: Message
    uses: tuple[Model, ...]
    writes: Mapping[Model, After] = field(default_factory=dict)
    gives: tuple[TensorSpec, ...] = ()
    also: tuple[str, ...] = ()
    accumulates: bool = False
    timeout_s: float | None = None
    cancel_after_s: float | None = None
    alarmed: bool = False
    harmless: bool = False
    """Whether a later answer shows that it has torn nothing."""

    @property
    def reads(self) -> tuple[Model, ...]:
        """The buffers that it names and does not write."""
        return tuple(model for model in self.uses if model not in self.writes)


class Wrong(NamedTuple):
    """An answer that the service should not have given."""

    request: str
    expected: str
    got: str
    story: tuple[str, ...] = ()
    """The history of the buffer: its last requests and their outcomes."""


def both(one: Contents, other: Contents) -> Contents:
    """The contents of a buffer that holds either the one or the other."""
    if one is None or other is None or len(one) + len(other) > MOST_CONTENTS:
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
        shaken: _Shaken = {}
        for deed, outcome in zip(burst, outcomes, strict=True):
            if _may_have_torn(outcome):
                for model in deed.writes:
                    shaken.setdefault(model, []).append((deed, outcome))
        wrongs = []
        for place, (deed, outcome) in enumerate(zip(burst, outcomes, strict=True)):
            found = self._take(deed, outcome, shaken, burst[place + 1 :])
            if found is not None:
                wrongs.append(Wrong(describe(deed), *found, _story(deed)))
                for model in deed.writes or deed.uses:
                    model.contents = None  # report one wrong answer only once
            for model in deed.uses:
                if model.owned:
                    model.story.append((deed, outcome))
        _convict(model for deed in burst for model in deed.uses)
        return wrongs

    def _take(self, deed: Deed, outcome: object, shaken: _Shaken, later: Sequence[Deed]) -> _Finding:
        match outcome:
            case OutcomeUnknown():
                torn = any(model.torn is not Torn.NO or _shook(shaken, model) for model in deed.uses)
                refused = was_refused(outcome) and (torn or OutOfMemory in self._injected)
                _tear(deed, Torn.YES)
                if not (deed.accumulates or self._excusable or refused or _is_overwritten(deed, later)):
                    return "to be run again, being pure", text(outcome)
                return None
            case QuarantinedRequest():
                _tear(deed, Torn.MAYBE)
                _forget(deed)
                return None
            case StaleBufferError():
                return _stale(deed, outcome, shaken)
            case BaseException():
                return self._judge_refusal(deed, outcome)
            case _:
                return _judge_answer(deed, outcome)

    def _judge_refusal(self, deed: Deed, error: BaseException) -> _Finding:
        match error:
            case ExecutionFailed() if ExecutionFailed in self._injected:
                _forget(deed)
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


def was_refused(outcome: object) -> bool:
    """Whether a second run was refused: what it names was torn by another request, or memory was short."""
    return isinstance(outcome, OutcomeUnknown) and "refused" in outcome.why


def _shook(shaken: _Shaken, model: Model) -> bool:
    """Whether a request of the burst may have torn a buffer. One whose second run was refused has not."""
    return any(not (deed.harmless or was_refused(outcome)) for deed, outcome in shaken.get(model, ()))


def _is_overwritten(deed: Deed, later: Sequence[Deed]) -> bool:
    return any(model in other.writes for model in deed.reads for other in later)


def _tear(deed: Deed, torn: Torn) -> None:
    for model in deed.writes:
        model.suspects.append(deed)
        if model.torn is not Torn.YES:
            model.torn = torn


def _convict(models: Iterable[Model]) -> None:
    """If only one request can have torn a torn buffer, mark all that this request writes as torn."""
    for model in models:
        if model.torn is Torn.YES and len(model.suspects) == 1:
            for other in model.suspects[0].writes:
                other.torn = Torn.YES


def _acquit(model: Model) -> None:
    """Note that a buffer is not torn, as an answer shows, and that its suspects have torn nothing."""
    for deed in tuple(model.suspects):
        deed.harmless = True
        for other in deed.writes:
            other.suspects.remove(deed)
            if other.torn is Torn.MAYBE and not other.suspects:
                other.torn = Torn.NO
    model.torn = Torn.NO


def _forget(deed: Deed) -> None:
    for model in deed.writes:
        model.contents = None


def _perhaps(deed: Deed) -> None:
    """Update the models for a request that may have run to its end, in part, or not at all.

    A loop whose caller has left ends between two turns, so what it writes may hold anything.
    """
    if isinstance(deed.message, RunLoop):
        _forget(deed)
    held = [(model, both(model.contents, after())) for model, after in deed.writes.items()]
    for model, contents in held:
        model.contents = contents
    _tear(deed, Torn.MAYBE)


def _stale(deed: Deed, error: StaleBufferError, shaken: _Shaken) -> _Finding:
    for model in deed.uses:
        if model.ref.slot == error.slot and error.reason is StaleReason.TORN:
            suspects = [other for other, _ in shaken.get(model, ())]
            expected = model.torn is not Torn.NO or any(not other.harmless for other in suspects)
            if model.owned:
                model.torn = Torn.YES
            if expected:
                return None
    return "buffers that nothing has torn or freed", text(error)


def _judge_answer(deed: Deed, answer: object) -> _Finding:
    for model in deed.uses:
        if model.torn is Torn.YES:
            return f"StaleBufferError, for {model.ref} is torn", text(answer)
        _acquit(model)
    held = [(model, after()) for model, after in deed.writes.items()]
    for model, contents in held:
        model.contents = contents
    if deed.gives:
        return _judge_allocation(deed, answer)
    if deed.writes and not isinstance(answer, Receipt):
        return "a Receipt", text(answer)
    if type(deed.message) is Download:
        return _read_back(deed.uses[0], answer)
    return None


def _judge_allocation(deed: Deed, answer: object) -> _Finding:
    refs = answer if isinstance(answer, tuple) else (answer,)
    if tuple(getattr(ref, "spec", None) for ref in refs) == deed.gives:
        return None
    return f"buffers {', '.join(map(str, deed.gives))}", text(answer)


def _read_back(model: Model, answer: object) -> _Finding:
    if not isinstance(answer, np.ndarray) or answer.shape != model.ref.spec.dims:
        return f"an array of dims {model.ref.spec.dims}", text(answer)
    if model.contents is None:
        return None
    for candidate in model.contents:
        if _agrees(candidate, answer, model.tolerance):
            model.contents = (candidate,)
            return None
    return " or ".join(map(text, model.contents)) + _difference(model.contents[0], answer), text(answer)


def _agrees(wanted: np.ndarray, got: np.ndarray, tolerance: float) -> bool:
    if not tolerance or wanted.dtype.kind != "f" or np.array_equal(wanted, got):
        return np.array_equal(wanted, got)
    allowed = tolerance * np.max(np.abs(wanted), where=np.isfinite(wanted), initial=0)
    return np.allclose(got, wanted, rtol=0, atol=allowed, equal_nan=True)


def _difference(wanted: np.ndarray, got: np.ndarray) -> str:
    """The first difference between two arrays, as text."""
    differs = np.argwhere(wanted != got)
    first = tuple(int(index) for index in differs[0])
    where = f"at {first} {wanted[first]:g}, not {got[first]:g}"
    return f" (of {wanted.size} elements {len(differs)} differ; {where})"


def _story(deed: Deed) -> tuple[str, ...]:
    """The history of the buffer that an answer was wrong about."""
    model = next(iter(deed.writes or deed.uses))
    return tuple(f"{describe(earlier)}: {text(outcome)}" for earlier, outcome in model.story)


def describe(deed: Deed | ModelRun) -> str:
    """A request as one line of text."""
    if isinstance(deed, ModelRun):
        return str(deed)
    message, words = deed.message, [type(deed.message).__name__]
    words += [f"{name}={ref}" for name, ref in operands(message).items()]
    words += [f"spec={message.spec}"] if isinstance(message, Allocate) else []
    words += ["applied"] if deed.gives else []
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
