"""Every error that a caller can see.

Each class says, beside what happened, the two things that a caller must know
to go on: whether the request ran (`ran`: True, False, or None for unknown) and
whether the same request may be sent again as it is (`retry_safe`). An error is
its facts: keyword arguments that become attributes, from which the text is
made. Facts are plain data, so an error survives pickling and the wire.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Self

import msgspec

__all__ = [
    "ContextLost",
    "CudnnActorError",
    "DeadlineExceeded",
    "ErrorRecord",
    "ExecutionFailed",
    "InvalidRequest",
    "MailboxFull",
    "MalformedMessage",
    "OutOfDescriptors",
    "OutOfMemory",
    "OutcomeUnknown",
    "QuarantinedRequest",
    "ReentrantAsk",
    "ServiceStopped",
    "StaleBufferError",
    "StaleReason",
    "StartFailed",
    "UnsupportedGraph",
    "Words",
]

_LONGEST = 200


class CudnnActorError(Exception):
    """Raised when anything that this package knows goes wrong; the root of the hierarchy."""

    ran: bool | None = False
    """Whether the request ran: True, False, or None when nobody can know."""
    retry_safe: bool = False
    """Whether the same request may be sent again as it is, with a chance of success and no double effect."""

    def __init__(self, text: str, **facts: Any) -> None:
        super().__init__(text)
        self._facts = facts or {"text": text}  # an error without facts is its text
        for name, value in facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._facts)

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The error that has these facts: `cls(**facts)`, unless a fact is not what `__init__` takes."""
        return cls(**facts)

    def again(self) -> Self:
        """A new error with the same facts, for another waiter: tracebacks are not to be shared."""
        return type(self).of_facts(self._facts)

    def to_record(self) -> ErrorRecord:
        """This error as plain data for the wire; `ErrorRecord.to_error` is the way back.

        A class from outside this module travels as the nearest of its bases that stands here.
        """
        kind = next(cls.__name__ for cls in type(self).__mro__ if cls.__name__ in _BY_NAME)
        return ErrorRecord(kind=kind, facts=self._facts)


def _rebuild(cls: type[CudnnActorError], facts: Mapping[str, Any]) -> CudnnActorError:
    return cls.of_facts(facts)


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An error as it travels between processes: the class's name and its facts."""

    kind: str
    facts: dict[str, str | int | float | bool | None]

    def to_error(self) -> CudnnActorError:
        """The error again, of its own class. Raises `MalformedMessage` for an unknown class or bad facts."""
        cls = _BY_NAME.get(self.kind)
        if cls is None:
            raise MalformedMessage(detail=f"unknown error class {self.kind!r}")
        try:
            return _rebuild(cls, self.facts)
        except (TypeError, ValueError) as error:
            raise MalformedMessage(detail=f"wrong facts for {self.kind}: {error}") from error


class Words(str):
    """Text that describes a value, as in `dtype complex64`: shown without the quotes of a string value."""

    __slots__ = ()


class InvalidRequest(CudnnActorError, ValueError):
    """Raised when a request cannot mean anything: wrong shape, dtype, padding, layout, overlap.

    Nothing reached the engine. Carries `field`, `value` (as it stands in the text: `'tpu'`, with its quotes),
    `problem` and `fix`.
    """

    field: str
    value: str
    problem: str
    fix: str

    def __init__(self, *, field: str, value: object, problem: str, fix: str) -> None:
        shown = _shown(value)
        super().__init__(
            f"{field}={shown}: {problem}; {fix}", field=field, value=shown, problem=problem, fix=fix
        )

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The error again: what stands for its value is not quoted a second time."""
        value = facts.get("value")
        return cls(**{**facts, "value": Words(value) if isinstance(value, str) else value})


def _shown(value: object) -> str:
    """A value in an error's text: an array by its type and dims, all else by a repr of bounded length."""
    if isinstance(value, str):  # an enum's member too: by its value
        value = value if isinstance(value, Words) else repr(str(value))
        return str(value) if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} of {value.dtype} {tuple(value.shape)}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a number of too many digits, an object half made: the text must not fail
        text = object.__repr__(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


class ReentrantAsk(InvalidRequest):
    """Raised when code on the actor's own thread asks that same actor, which could never answer."""


class MalformedMessage(CudnnActorError, ValueError):
    """Raised when bytes from the wire are no message of this protocol. Carries `detail`."""

    detail: str

    def __init__(self, *, detail: str) -> None:
        super().__init__(
            f"malformed message: {detail}; are both ends of the same release?",
            detail=detail,
        )


class StaleReason(enum.StrEnum):
    """Why a buffer reference no longer names its bytes."""

    FREED = "freed"
    TORN = "torn"
    CONTEXT_LOST = "context lost"
    FOREIGN = "foreign"


_STALE_FIX = {
    StaleReason.FREED: "it was freed; allocate a new one",
    StaleReason.TORN: "a crash interrupted a write to it; upload or compute it again",
    StaleReason.CONTEXT_LOST: "its device context died with its memory; upload it again",
    StaleReason.FOREIGN: "another service gave it out, or this one before it started anew; upload it here",
}


class StaleBufferError(CudnnActorError, LookupError):
    """Raised when a reference's generation is not its slot's: freed, torn by a crash, lost, or foreign.

    Carries `slot`, `generation`, `reason` (a `StaleReason`) and `field`, the message's.
    """

    slot: int
    generation: int
    reason: StaleReason
    field: str

    def __init__(self, *, slot: int, generation: int, reason: str, field: str = "buffer") -> None:
        reason = StaleReason(reason)
        super().__init__(
            f"{field}=<buffer {slot}.{generation & 0xFFFFFFFF}> is stale ({reason}): {_STALE_FIX[reason]}",
            slot=slot,
            generation=generation,
            reason=reason,
            field=field,
        )


class UnsupportedGraph(CudnnActorError):
    """Raised when the engine has no way to run a valid operation graph.

    The answer is remembered, so asking again is cheap and as negative.
    Carries `engine`, `digest` (of the graph), `detail` and `reproduce`: the graph itself, as the token that
    `cudnn-actor reproduce` takes, or empty.
    """

    engine: str
    digest: str
    detail: str
    reproduce: str

    def __init__(self, *, engine: str, digest: str, detail: str, reproduce: str = "") -> None:
        super().__init__(
            f"the {engine} engine cannot run graph {digest[:12]}: {detail}; "
            f"docs/support.md says what runs{_command(reproduce)}",
            engine=engine,
            digest=digest,
            detail=detail,
            reproduce=reproduce,
        )


def _command(token: str) -> str:
    """The end of an error's text: how to see it again without the service and its data."""
    return f"; to reproduce: cudnn-actor reproduce {token}" if token else ""


class OutOfMemory(CudnnActorError, MemoryError):
    """Raised when a buffer or a workspace does not fit. Nothing changed; free something and send again.

    Carries `requested`, `in_use` and `limit`, all in bytes (`limit` None: the machine's own).
    """

    retry_safe = True
    requested: int
    in_use: int
    limit: int | None

    def __init__(self, *, requested: int, in_use: int, limit: int | None) -> None:
        of = "" if limit is None else f" of {limit:,}"
        more = ", or the process's own limit (ulimit -v)" if limit is None else ""
        super().__init__(
            f"out of memory: {requested:,} bytes asked for, {in_use:,}{of} bytes in use; "
            f"free buffers or raise memory_limit or workspace_limit{more}",
            requested=requested,
            in_use=in_use,
            limit=limit,
        )


class OutOfDescriptors(CudnnActorError):
    """Raised when a process may open no more files, and a buffer or a transfer needs one. Nothing changed.

    Carries `limit`, how many a process may have open at once; None where the whole machine has no more.
    """

    retry_safe = True
    limit: int | None

    def __init__(self, *, limit: int | None) -> None:
        of = "the machine may have (fs.file-max)" if limit is None else f"a process may have, {limit:,}"
        super().__init__(
            f"out of file descriptors: as many files are open as {of}; close some, "
            "or raise the limit (ulimit -n, RLIMIT_NOFILE), and send again",
            limit=limit,
        )


class MailboxFull(CudnnActorError):
    """Raised when `submit` or `tell` finds no place in the mailbox; `ask` would have waited.

    Carries `capacity`, in messages.
    """

    retry_safe = True
    capacity: int

    def __init__(self, *, capacity: int) -> None:
        super().__init__(
            f"the mailbox holds its {capacity} messages already; await ask() to wait for room, "
            "or spawn with a larger mailbox",
            capacity=capacity,
        )


class DeadlineExceeded(CudnnActorError, TimeoutError):
    """Raised when no reply came within the time that the caller gave.

    Carries `timeout_s`, in seconds, and `started`: False when the request was dropped unrun, True when
    it had begun and may yet finish.
    """

    ran = None
    timeout_s: float
    started: bool

    def __init__(self, *, timeout_s: float, started: bool) -> None:
        what = (
            "it had started, so its effect may still come"
            if started
            else "it had not started, and was dropped"
        )
        super().__init__(
            f"no reply within {timeout_s:g} s: {what}; allow more time or send less at once",
            timeout_s=timeout_s,
            started=started,
        )
        self.ran = None if started else False
        self.retry_safe = not started


class ServiceStopped(CudnnActorError):
    """Raised when the service ended before it took the request up, or was no longer there to take it.

    Carries `reason`, `interrupted`: whether the request had been running at a crash and was to run again, and
    `forked`: whether it was sent from a child that was forked from the service's process, where the service
    goes on. `retry_safe` is False then: its buffers are the parent's, so the request cannot be sent as it is.
    """

    retry_safe = True
    reason: str
    interrupted: bool
    forked: bool

    def __init__(self, *, reason: str, interrupted: bool = False, forked: bool = False) -> None:
        super().__init__(
            "this process was forked from the one that started the service, and has no part in it; "
            "start a service in this process: spawn after the fork"
            if forked
            else f"the service has stopped ({reason}); spawn a new one and send the request there",
            reason=reason,
            interrupted=interrupted,
            forked=forked,
        )
        self.ran = None if interrupted else False
        self.retry_safe = not forked


class StartFailed(CudnnActorError):
    """Raised when a service could not become ready. Carries `detail`."""

    detail: str

    def __init__(self, *, detail: str) -> None:
        super().__init__(f"the service did not start: {detail}; run `cudnn-actor doctor`", detail=detail)


class ExecutionFailed(CudnnActorError):
    """Raised when the engine reported a failure and was found healthy after it.

    The outputs of the request are not to be trusted. Carries `status` (the library's own name for the
    failure), `detail`, `plan` (the tag of the plan that failed) and `reproduce`: its graph, as the token
    that `cudnn-actor reproduce` takes, or empty.
    """

    ran = True
    status: str
    detail: str
    plan: str
    reproduce: str

    def __init__(self, *, status: str, detail: str, plan: str, reproduce: str = "") -> None:
        super().__init__(
            f"plan {plan} failed with {status}: {detail}; its outputs hold no result, "
            f"write them anew before they are read{_command(reproduce)}",
            status=status,
            detail=detail,
            plan=plan,
            reproduce=reproduce,
        )


class ContextLost(CudnnActorError):
    """Raised when the device context died while the request ran, and its memory with it.

    Carries `status` and `detail`.
    """

    ran = None
    status: str
    detail: str

    def __init__(self, *, status: str, detail: str) -> None:
        super().__init__(
            f"the device context was lost ({status}): {detail}; upload again to a restarted service",
            status=status,
            detail=detail,
        )


class OutcomeUnknown(CudnnActorError):
    """Raised when a crash interrupted a request that is not safe to run twice.

    Either it accumulates (`beta` is not 0), so running it again could apply it twice, or the thread that
    runs it could not be ended and may still write. What it writes is torn. Carries `request_id`, `cause` (of
    the crash) and `why` (it was not run again).
    """

    ran = None
    request_id: int
    cause: str
    why: str

    def __init__(self, *, request_id: int, cause: str, why: str) -> None:
        super().__init__(
            f"request {request_id} was running at a crash ({cause}) and was not run again, because {why}; "
            "its output is torn: upload or compute it again and repeat from there",
            request_id=request_id,
            cause=cause,
            why=why,
        )


class QuarantinedRequest(CudnnActorError):
    """Raised when a request was running at two crashes, and for every later request of its plan.

    Carries `request_id`, `digest` (of the graph) and `cause`.
    """

    ran = None
    request_id: int
    digest: str
    cause: str

    def __init__(self, *, request_id: int, digest: str, cause: str) -> None:
        super().__init__(
            f"request {request_id} is quarantined: plan {digest[:12]} was running at two crashes ({cause}); "
            "change the problem, or report it with this digest",
            request_id=request_id,
            digest=digest,
            cause=cause,
        )


def _subclasses(cls: type[CudnnActorError]) -> dict[str, type[CudnnActorError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found |= _subclasses(sub)
    return found


_BY_NAME = _subclasses(CudnnActorError)
