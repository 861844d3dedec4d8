"""Every error that a caller can see.

Besides what happened, each class states two things: whether the request ran
(`ran`: True, False, or None for unknown) and whether the same request may be
sent again unchanged (`retry_safe`). An error consists of facts: keyword
arguments that become attributes and from which the text is made. Facts are
plain data, so errors can be pickled and sent to other processes.

The file is long because it is the whole list of errors, each of a few lines.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import msgspec

# What users see; this package uses `ErrorRecord`, `Words` and `described_array` besides.
__all__ = [
    "ContextLost",
    "CudnnActorError",
    "DeadlineExceeded",
    "ExecutionFailed",
    "InvalidRequest",
    "MailboxFull",
    "MalformedMessage",
    "NoEventLoop",
    "NoValues",
    "NotDeployed",
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
]

_LONGEST = 200


class CudnnActorError(Exception):
    """Raised when this package reports an error to its caller: the base class of all such errors."""

    ran: bool | None = False
    """Whether the request ran: True, False, or None if that cannot be known."""
    retry_safe: bool = False
    """Whether the same request may be sent again unchanged: it can succeed, and cannot take effect twice."""

    def __init__(self, text: str, **facts: Any) -> None:
        super().__init__(text)
        self._facts = facts or {"text": text}  # without other facts, the text is the only fact
        for name, value in facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).of_facts, (self._facts,)

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The error with these facts: `cls(**facts)`. Subclasses override it if `__init__` differs."""
        return cls(**facts)

    def again(self) -> Self:
        """A new error with the same facts, for another waiter: waiters must not share a traceback."""
        return type(self).of_facts(self._facts)

    def to_record(self) -> ErrorRecord:
        """This error as plain data for the wire; `ErrorRecord.to_error` converts it back.

        A class from outside this module is sent as its nearest base class in this module.
        """
        kind = next(cls.__name__ for cls in type(self).__mro__ if cls.__name__ in _BY_NAME)
        return ErrorRecord(kind=kind, facts=self._facts)


class OperationError(CudnnActorError):
    """Raised when an error is about operations of a graph: the base of the classes that can name them.

    Carries `operations`: their numbers in the graph; and `where`: what they are and the user's lines that
    added them, "relu at model.py:12", or empty if that is unknown.
    """

    operations: tuple[int, ...]
    where: str

    def at(self, operations: Iterable[int], where: str = "") -> Self:
        """A copy of this error that names these operations."""
        return type(self).of_facts({**self._facts, "operations": tuple(operations), "where": where})


def _at(where: str) -> str:
    return f"{where}: " if where else ""


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An error as sent between processes: the class's name and its facts."""

    kind: str
    facts: dict[str, str | int | float | bool | tuple[int, ...] | None]

    def to_error(self) -> CudnnActorError:
        """The error, of its own class. Raises `MalformedMessage` for an unknown class or wrong facts."""
        cls = _BY_NAME.get(self.kind)
        if cls is None:
            raise MalformedMessage(detail=f"unknown error class {self.kind!r}")
        try:
            return cls.of_facts(self.facts)
        except (TypeError, ValueError) as error:
            raise MalformedMessage(detail=f"wrong facts for {self.kind}: {error}") from error


class Words(str):
    """Text that describes a value, as in `dtype complex64`: shown without the quotes of a string value."""

    __slots__ = ()


class InvalidRequest(CudnnActorError, ValueError):
    """Raised when a request is invalid: wrong shape, dtype, padding, layout or overlap, for example.

    Nothing reached the engine. Carries `field`, `value` (as shown in the text: `'tpu'`, with its quotes),
    `problem` and `fix`.
    """

    field: str
    value: str
    problem: str
    fix: str

    def __init__(self, *, field: str, value: object, problem: str, fix: str) -> None:
        shown = _show(value)
        super().__init__(
            f"{field}={shown}: {problem}; {fix}", field=field, value=shown, problem=problem, fix=fix
        )

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The error with these facts. `value` is already quoted, so it is not quoted again."""
        value = facts.get("value")
        return cls(**{**facts, "value": Words(value) if isinstance(value, str) else value})

    def about(self, field: str) -> Self:
        """A copy of this error about an argument of another name."""
        return type(self).of_facts({**self._facts, "field": field})


def _show(value: object) -> str:
    """A value as shown in an error's text, of bounded length: an array's type, dtype and dims; what says by
    itself how it is shown, by `str`; else its repr."""
    if isinstance(value, str):  # also a member of a string enum, shown by its value
        value = value if isinstance(value, Words) else repr(str(value))
        return str(value) if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
    array = described_array(value)
    if array is not None:
        return array
    try:
        text = repr(value) if type(value).__str__ is object.__str__ else str(value).split("\n", 1)[0]
    except Exception:  # noqa: BLE001 - too many digits, a half-constructed object: the text must not fail
        text = object.__repr__(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def described_array(value: Any) -> str | None:
    """An array of any library: its type, dtype and dims. None for anything else, and for what is ours."""
    dims: Any = None if isinstance(value, type) else getattr(value, "shape", None)
    if type(value).__module__.startswith(f"{__name__.partition('.')[0]}."):  # ours show themselves
        dims = None
    scalar = dims == () and not hasattr(value, "__setitem__")  # one of NumPy's
    if dims is None or scalar or not hasattr(value, "dtype"):
        return None
    return f"{type(value).__name__} of {value.dtype} {tuple(dims)}"


class NoValues(CudnnActorError, TypeError):
    """Raised when NumPy, or arithmetic, is to read what holds no values: a reference, a graph's tensor.

    Carries `what`, as shown in the text, and `fix`.
    """

    what: str
    fix: str

    def __init__(self, *, what: str, fix: str) -> None:
        super().__init__(f"{what} holds no values that NumPy could read; {fix}", what=what, fix=fix)


class ReentrantAsk(InvalidRequest):
    """Raised when code on the actor's own thread asks that actor: the actor could never answer."""


class MalformedMessage(CudnnActorError, ValueError):
    """Raised when bytes from the wire are not a message of this protocol. Carries `detail`."""

    detail: str

    def __init__(self, *, detail: str) -> None:
        super().__init__(
            f"malformed message: {detail}; check that both ends run the same release",
            detail=detail,
        )


class StaleReason(enum.StrEnum):
    """Why a buffer reference is stale."""

    FREED = "freed"
    TORN = "torn"
    CONTEXT_LOST = "context lost"
    FOREIGN = "foreign"


_STALE_FIX = {
    StaleReason.FREED: "nothing can use it after its free; allocate a new one if you need one",
    StaleReason.TORN: "a crash interrupted a write to it; upload or compute it again",
    StaleReason.CONTEXT_LOST: "its device context died and its memory is lost; upload it again",
    StaleReason.FOREIGN: "another service created it (was spawn called again?), or this one did before its "
    "supervisor started it anew; upload it here",
}


class StaleBufferError(CudnnActorError, LookupError):
    """Raised when a reference's generation is not its slot's: freed, torn by a crash, lost, or foreign.

    Carries `slot`, `generation`, `reason` (a `StaleReason`) and `field` (the message's field).
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


class NotDeployed(CudnnActorError, LookupError):
    """Raised when a service has no model of this reference, or the model no graph for a run's inputs.

    Nothing ran. Carries `model` (its number), `inputs` (as shown in the text; empty if there is no such
    model) and `unloaded`: whether the model itself is missing.
    """

    model: int
    inputs: str
    unloaded: bool

    def __init__(self, *, model: int, inputs: str, unloaded: bool) -> None:
        text = (
            f"model={model}: this service has no such model; it was unloaded, or belongs to another service"
            if unloaded
            else f"model={model}: no graph is deployed for {inputs}; add one: send WarmModel, or run it by "
            "`await gpu.run(model, ...)`, which does"
        )
        super().__init__(text, model=model, inputs=inputs, unloaded=unloaded)


class UnsupportedGraph(OperationError):
    """Raised when the engine cannot run a valid operation graph.

    The refusal is cached: the same request fails again, without another attempt to build a plan.
    Carries `engine`, `digest` (of the graph), `detail` and `reproduce`: the graph itself, as the token that
    `cudnn-actor reproduce` takes, or empty.
    """

    engine: str
    digest: str
    detail: str
    reproduce: str

    def __init__(
        self,
        *,
        engine: str,
        digest: str,
        detail: str,
        reproduce: str = "",
        operations: Sequence[int] = (),
        where: str = "",
    ) -> None:
        super().__init__(
            f"the {engine} engine cannot run graph {digest[:12]}: {_at(where)}{detail}; "
            f"`cudnn-actor docs support` lists what is supported{_command(reproduce)}",
            engine=engine,
            digest=digest,
            detail=detail,
            reproduce=reproduce,
            operations=tuple(operations),
            where=where,
        )


def _command(token: str) -> str:
    """The end of an error's text: how to reproduce it without the service and its data."""
    return f"; to reproduce: cudnn-actor reproduce {token}" if token else ""


class OutOfMemory(OperationError, MemoryError):
    """Raised when a buffer or a workspace does not fit. Nothing changed.

    Host memory may also run out in the middle of a plan of the CPU engine. Then what it writes is invalid.

    If it fits into what the limit allows at all, free something and send again: the error is `retry_safe`.
    If it does not, it never will.

    Carries, all in bytes, `requested`; `in_use`, which buffers take, and `arena_bytes`, which the service has
    taken from the system for them; `limit`, the limit that was met (None: the system, or the device, has no
    more); `most`, the largest that this limit, or the machine, allows (None: no limit, or not known), and
    `largest`, the largest that fits now (None: not known). `workspace` says whether it is about a plan's
    workspace; then the limit is `workspace_limit`, else `memory_limit`. `ulimit` is the letter of the
    process's own limit that may be the cause: "v", address space, or "f", the size of files, which holds for
    files in memory, too. It is empty if that is unlimited, or not known. `injected` says whether a fault plan
    asked for the error, so that no memory was short.
    """

    retry_safe = True
    requested: int
    in_use: int
    arena_bytes: int
    limit: int | None
    most: int | None
    largest: int | None
    workspace: bool
    ulimit: str
    injected: bool

    def __init__(
        self,
        *,
        requested: int,
        in_use: int,
        limit: int | None,
        arena_bytes: int = 0,
        most: int | None = None,
        largest: int | None = None,
        workspace: bool = False,
        operations: Sequence[int] = (),
        where: str = "",
        ulimit: str = "",
        injected: bool = False,
    ) -> None:
        requested = min(requested, (1 << 63) - 1)  # more does not fit into a record for the wire
        most = limit if most is None else most
        facts: dict[str, Any] = {
            "requested": requested,
            "in_use": in_use,
            "arena_bytes": arena_bytes,
            "limit": limit,
            "most": most,
            "largest": largest,
            "workspace": workspace,
            "ulimit": ulimit,
        }
        super().__init__(
            f"out of memory: {_at(where)}{_INJECTED if injected else _of_memory(**facts)}",
            **facts,
            injected=injected,
            operations=tuple(operations),
            where=where,
        )
        self.retry_safe = most is None or requested <= most

    def as_part_of(self, requested: int, *, in_use: int, where: str) -> Self:
        """A copy of this error about the whole of which the request was a part, with `in_use` bytes in other
        buffers."""
        facts = {**self._facts, "requested": requested, "in_use": in_use, "where": where, "largest": None}
        return type(self).of_facts(facts)

    def beside(self, *, in_use: int, arena_bytes: int) -> Self:
        """A copy of this error, with the bytes that the service's buffers take, and those of its arenas."""
        return type(self).of_facts({**self._facts, "in_use": in_use, "arena_bytes": arena_bytes})


_INJECTED = "injected by the fault plan; no memory is short, so send it again"


def _of_memory(
    *,
    requested: int,
    in_use: int,
    arena_bytes: int,
    limit: int | None,
    most: int | None,
    largest: int | None,
    workspace: bool,
    ulimit: str,
) -> str:
    """The text of an `OutOfMemory`: the buffer that does not fit, why, and the fix."""
    what = f"a workspace of {requested:,} bytes" if workspace else f"{requested:,} bytes"
    option = "workspace_limit" if workspace else "memory_limit"
    less = "send less at once (a smaller batch)"
    if most is not None and requested > most:
        if limit is None:
            return f"{what} requested, and the machine has {most:,}; {less}"
        return f"{what} requested, and {option}={limit:,} allows {most:,} at most; raise {option}, or {less}"
    if workspace and limit is None:
        return f"{what} requested, and the device or the system has no more; free buffers, or {less}"
    arenas = f" in arenas of {arena_bytes:,}" if arena_bytes else ""
    now = f", and at most {largest:,} fit now" if largest is not None else ""
    said = f"{what} requested; buffers take {in_use:,} bytes{arenas}"
    if limit is None:
        fixes = ["free buffers"] if in_use else []
        fixes += [f"raise the process's own limit (ulimit -{ulimit})"] if ulimit else []
        return f"{said}, and the system has no more{now}; {', or '.join([*fixes, less])}"
    return f"{said}, {option} is {limit:,}{now}; free buffers or raise {option}"


class OutOfDescriptors(CudnnActorError):
    """Raised when a buffer or a transfer needs a file descriptor and none is left. Nothing changed.

    Carries `limit`, how many files a process may have open; None if the machine's limit is reached.
    """

    retry_safe = True
    limit: int | None

    def __init__(self, *, limit: int | None) -> None:
        of = "the machine allows (fs.file-max)" if limit is None else f"a process may have, {limit:,}"
        super().__init__(
            f"out of file descriptors: as many files are open as {of}; close some, "
            "or raise the limit (ulimit -n, RLIMIT_NOFILE), and send again",
            limit=limit,
        )


class NoEventLoop(CudnnActorError, RuntimeError):
    """Raised when a method for asyncio code is called where no asyncio event loop runs. Nothing was started.

    Carries `library`, whose event loop runs in its place, like "trio"; None if none does, or it is unknown.
    """

    library: str | None

    def __init__(self, *, library: str | None) -> None:
        instead = "" if library is None else f", but one of {library}"
        super().__init__(
            f"no asyncio event loop runs in this thread{instead}; call this in a coroutine that "
            "asyncio.run(...) runs, or use cudnn_actor.start(...) and its actor_ref, "
            "which need no event loop and block",
            library=library,
        )


class MailboxFull(CudnnActorError):
    """Raised when `submit` or `tell` finds the mailbox full; `ask` would have waited.

    Carries `capacity`, in messages, and `batched`: whether it is that of a batched model, in requests.
    """

    retry_safe = True
    capacity: int
    batched: bool

    def __init__(self, *, capacity: int, batched: bool = False) -> None:
        super().__init__(
            f"{capacity} requests wait for a batch; await endpoint(...) to wait, too, or raise max_waiting"
            if batched
            else f"the mailbox is full ({capacity} messages); await ask() to wait for room, "
            "or spawn with a larger mailbox",
            capacity=capacity,
            batched=batched,
        )


class DeadlineExceeded(CudnnActorError, TimeoutError):
    """Raised when no reply came within the caller's timeout.

    Carries `timeout_s`, in seconds, and `started`: False if the request was dropped before it ran, True if
    it had started and may still finish.
    """

    ran = None
    timeout_s: float
    started: bool

    def __init__(self, *, timeout_s: float, started: bool) -> None:
        what = (
            "the request had started and may still take effect"
            if started
            else "the request had not started, and was dropped"
        )
        super().__init__(
            f"no reply within {timeout_s:g} s: {what}; allow more time or send less at once",
            timeout_s=timeout_s,
            started=started,
        )
        self.ran = None if started else False
        self.retry_safe = not started


class ServiceStopped(CudnnActorError):
    """Raised when the service stopped before it started the request, or had already stopped.

    Carries `reason`; `interrupted`: whether the request was running at a crash and was waiting to run again;
    and `forked`: whether it was sent from a process forked from the service's process, where the service
    goes on. If `forked`, `retry_safe` is False: the buffers are the parent's, so the request cannot be sent
    unchanged.
    """

    retry_safe = True
    reason: str
    interrupted: bool
    forked: bool

    def __init__(self, *, reason: str, interrupted: bool = False, forked: bool = False) -> None:
        super().__init__(
            "this process was forked from the one that started the service, and cannot use that service; "
            "start a service in this process: spawn after the fork"
            if forked
            else f"the service has stopped ({reason}); spawn a new one, or connect to one again, and "
            "send the request there",
            reason=reason,
            interrupted=interrupted,
            forked=forked,
        )
        self.ran = None if interrupted else False
        self.retry_safe = not forked


class StartFailed(CudnnActorError):
    """Raised when a service could not become ready, or none is where `connect` looks for it.

    Carries `detail` and `fix`.
    """

    detail: str
    fix: str

    def __init__(self, *, detail: str, fix: str = "run `cudnn-actor doctor`") -> None:
        super().__init__(f"the service did not start: {detail}; {fix}", detail=detail, fix=fix)


class ExecutionFailed(OperationError):
    """Raised when the engine reported a failure but its device context is still healthy.

    The request's outputs are invalid. Carries `status` (the library's own name for the failure), `detail`,
    `plan` (the tag of the plan that failed, or the kind of request), `reproduce`: its graph, as the token
    that `cudnn-actor reproduce` takes, or empty; and `of_model`: whether it was a run of a model. That is
    `retry_safe`, because a run changes nothing but the buffers that are to get its outputs.
    """

    ran = True
    status: str
    detail: str
    plan: str
    reproduce: str
    of_model: bool

    def __init__(
        self,
        *,
        status: str,
        detail: str,
        plan: str,
        reproduce: str = "",
        of_model: bool = False,
        operations: Sequence[int] = (),
        where: str = "",
    ) -> None:
        what = f"request {plan}" if plan.isalpha() else f"plan {plan}"  # a tag has a digest
        left = "its outputs are invalid, write them again before you read them"
        if of_model:
            what = f"a run of a model, by {what},"
            left = "there are no outputs, and it may be sent again"
        super().__init__(
            f"{what} failed with {status}: {_at(where)}{detail}; {left}{_command(reproduce)}",
            status=status,
            detail=detail,
            plan=plan,
            reproduce=reproduce,
            of_model=of_model,
            operations=tuple(operations),
            where=where,
        )
        self.retry_safe = of_model

    def of_run(self) -> Self:
        """A copy of this error for a run of a model."""
        return type(self).of_facts({**self._facts, "of_model": True})


class ContextLost(CudnnActorError):
    """Raised when the device context died while the request ran; its memory is lost.

    Carries `status` and `detail`.
    """

    ran = None
    status: str
    detail: str

    def __init__(self, *, status: str, detail: str) -> None:
        super().__init__(
            f"the device context was lost ({status}): {detail}; upload again once the service has restarted",
            status=status,
            detail=detail,
        )


class OutcomeUnknown(CudnnActorError):
    """Raised when a crash interrupted a request that does not run again.

    Either it accumulates (`beta` is not 0), so running it again could apply it twice, or the thread that
    runs it could not be stopped and may still write, or it is a `RunModel(again=False)`. Carries
    `request_id`, `cause` (of the crash), `why` (the reason it was not run again) and `torn`: whether a buffer
    is torn, because the request writes it. A `RunModel` without `into` writes none.
    """

    ran = None
    request_id: int
    cause: str
    why: str
    torn: bool

    def __init__(self, *, request_id: int, cause: str, why: str, torn: bool = True) -> None:
        fix = (
            "its output is torn: upload or compute it again, and continue from there"
            if torn
            else "it writes no buffer, so none is torn: send it again, unless it may have caused the crash"
        )
        super().__init__(
            f"request {request_id} was running at a crash ({cause}) and was not run again, because {why}; "
            f"{fix}",
            request_id=request_id,
            cause=cause,
            why=why,
            torn=torn,
        )


class QuarantinedRequest(CudnnActorError):
    """Raised when a request was running at two crashes, and for every later request with the same plan.

    Carries `request_id`, `digest` (of the graph), `cause` and `reproduce`: the graph, as the token that
    `cudnn-actor reproduce` takes. Both are empty if the request runs no plan; then `message` is its class,
    like "WriteWeights", and later requests are not affected.
    """

    ran = None
    request_id: int
    digest: str
    cause: str
    reproduce: str
    message: str

    def __init__(
        self, *, request_id: int, digest: str, cause: str, reproduce: str = "", message: str = ""
    ) -> None:
        what = f"this {message}" if message else f"plan {digest[:12]}"
        fix = "change the request (shapes, dtypes, layouts)"
        if message:
            fix = "find the cause before you send another like it"
        super().__init__(
            f"request {request_id} is quarantined: {what} was running at two crashes ({cause}); {fix}, or "
            f"report the crash{_command(reproduce)}",
            request_id=request_id,
            digest=digest,
            cause=cause,
            reproduce=reproduce,
            message=message,
        )


def _subclasses(cls: type[CudnnActorError]) -> dict[str, type[CudnnActorError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found |= _subclasses(sub)
    return found


_BY_NAME = _subclasses(CudnnActorError)
