"""The errors with which requests of the protocol are refused, and the status of each error in HTTP and
gRPC."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

from cudnn_actor.models import InvalidModel, UnsupportedModel
from cudnn_actor.protocol.errors import (
    CudnnActorError,
    DeadlineExceeded,
    InvalidRequest,
    MailboxFull,
    OutcomeUnknown,
    OutOfDescriptors,
    OutOfMemory,
    ServiceStopped,
)

__all__ = [
    "Busy",
    "Draining",
    "NotOffered",
    "NotServed",
    "Refused",
    "Status",
    "TooLarge",
    "Unauthorised",
    "require_known",
    "require_version",
    "status_of",
]


class _Versioned(Protocol):
    """A version of a model."""

    @property
    def version(self) -> str:
        """The version's name in the protocol."""


M = TypeVar("M")
V = TypeVar("V", bound=_Versioned)


class Refused(CudnnActorError, ValueError):
    """Raised when a request is not one of the protocol. Nothing ran. Carries `problem` and `fix`."""

    problem: str
    fix: str

    def __init__(self, *, problem: str, fix: str) -> None:
        super().__init__(f"{problem}; {fix}", problem=problem, fix=fix)


class TooLarge(Refused):
    """Raised when a request has more bytes than the server takes. Nothing ran."""


class Unauthorised(CudnnActorError):
    """Raised when a request has no token that the server knows. Nothing ran."""

    def __init__(self) -> None:
        super().__init__(
            "this server takes requests with a token only; send the header `Authorization: Bearer TOKEN`"
        )

    def __reduce__(self) -> tuple[type[Unauthorised], tuple[()]]:
        return type(self), ()


class NotServed(CudnnActorError, LookupError):
    """Raised when the server has no such model, or it is not ready. Nothing ran.

    Carries `model`, `version` ("" for any), `problem`, and `passing`: whether the model is being loaded.
    """

    model: str
    version: str
    problem: str
    passing: bool

    def __init__(self, *, model: str, version: str, problem: str, passing: bool = False) -> None:
        of = f" version {version!r}" if version else ""
        super().__init__(
            f"model {model!r}{of} {problem}; the repository index lists what is served",
            model=model,
            version=version,
            problem=problem,
            passing=passing,
        )
        self.retry_safe = passing


def require_known(name: str, found: M | None) -> M:
    """The object that a server has found for a model's name. Raises `NotServed` if it is None."""
    if found is None:
        raise NotServed(model=name[:200], version="", problem="is unknown")
    return found


def require_version(name: str, served: V | None, version: str, *, loading: bool) -> V:
    """The version of a model that answers. Raises `NotServed` if none does, or if another version is asked
    for.

    `version`: the version that is asked for; "" for any. `loading`: whether a version is being loaded.
    """
    if served is None:
        problem = "is being loaded" if loading else "is not loaded"
        raise NotServed(model=name, version="", problem=problem, passing=loading)
    if version not in ("", served.version):
        problem = f"is not served, but version {served.version!r}"
        raise NotServed(model=name, version=version[:40], problem=problem)
    return served


class Busy(CudnnActorError):
    """Raised when the requests under way have as many bytes as the server takes at a time. Nothing ran.
    Carries `most`."""

    retry_safe = True
    most: int

    def __init__(self, *, most: int) -> None:
        super().__init__(
            f"the requests that are under way have {most:,} bytes, which is all that this server takes; "
            "send it again later",
            most=most,
        )


class Draining(CudnnActorError):
    """Raised when the server is stopping, so that it takes no more requests. Nothing ran."""

    retry_safe = True

    def __init__(self) -> None:
        super().__init__("this server is stopping; send the request to another one")

    def __reduce__(self) -> tuple[type[Draining], tuple[()]]:
        return type(self), ()


class NotOffered(CudnnActorError):
    """Raised when a request needs a part of the protocol that this server does not have. Carries `what`, its
    name."""

    what: str

    def __init__(self, *, what: str) -> None:
        super().__init__(f"this server does not offer {what}", what=what)


class Status(NamedTuple):
    """The status of an answer: HTTP's number, gRPC's name, and whether to send the same request again."""

    http: int
    grpc: str
    again: bool = False


_BUSY = Status(503, "RESOURCE_EXHAUSTED", again=True)
_AWAY = Status(503, "UNAVAILABLE", again=True)
_STATUSES: tuple[tuple[type[CudnnActorError], Status], ...] = (
    (TooLarge, Status(413, "RESOURCE_EXHAUSTED")),
    (Refused, Status(400, "INVALID_ARGUMENT")),
    (InvalidRequest, Status(400, "INVALID_ARGUMENT")),
    (UnsupportedModel, Status(400, "INVALID_ARGUMENT")),
    (InvalidModel, Status(400, "INVALID_ARGUMENT")),
    (Unauthorised, Status(401, "UNAUTHENTICATED")),
    (NotServed, Status(404, "NOT_FOUND")),
    (NotOffered, Status(501, "UNIMPLEMENTED")),
    (DeadlineExceeded, Status(504, "DEADLINE_EXCEEDED")),
    (MailboxFull, _BUSY),
    (Busy, _BUSY),
    (OutOfDescriptors, _BUSY),
    (Draining, _AWAY),
    (ServiceStopped, _AWAY),
    (OutcomeUnknown, _AWAY),
)
"""The status of each class of errors. The first class that an error is an instance of counts."""


def status_of(error: CudnnActorError) -> Status:
    """The status of an error: 4xx if the sender can mend it, 503 if it will pass by itself, 500 for any other
    error."""
    if isinstance(error, NotServed) and error.passing:
        return _AWAY
    if isinstance(error, OutOfMemory):  # more than the service can ever hold, or than it can now
        return _BUSY if error.retry_safe else Status(413, "RESOURCE_EXHAUSTED")
    return next((status for cls, status in _STATUSES if isinstance(error, cls)), Status(500, "INTERNAL"))
