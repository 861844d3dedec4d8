"""The frames between the process that owns the service and those that serve in front of it. Does no I/O.

They go over a socket pair that the owner makes for each process. Inferences do not: a serving process is
attached to the service (`cudnn_actor.attached`), as any client on this machine.

==============  =========================================================================================
owner sends     `Begin` first; `AddRegion`, with one descriptor, and `DropRegions`; `Served`; `Listen`;
                `Reply`; `GiveCounts`; `Drain`
process sends   `Prepared`; then `Listens`; or `Failed`; `Ask`; `Took`; `Released`; `Counts`
==============  =========================================================================================
"""

from __future__ import annotations

from typing import Any

import msgspec

import cudnn_actor.protocol.errors as protocol_errors
from cudnn_actor import models
from cudnn_actor.attached.wire import LoadedModel
from cudnn_actor.protocol.errors import CudnnActorError
from cudnn_actor.serving import failures
from cudnn_actor.serving.listening import Listening
from cudnn_actor.serving.statistics import ModelCounts

__all__ = [
    "FROM_FRONT",
    "FROM_OWNER",
    "AddRegion",
    "Ask",
    "Begin",
    "Counts",
    "Drain",
    "DropRegions",
    "ErrorOnWire",
    "Failed",
    "GiveCounts",
    "Listen",
    "Listens",
    "ModelRecord",
    "Prepared",
    "Released",
    "Reply",
    "Served",
    "Took",
    "Version",
]


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


class ErrorOnWire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An error of this package: its class's name, its facts, and its text."""

    kind: str
    facts: dict[str, Any]
    text: str

    @classmethod
    def of(cls, error: CudnnActorError) -> ErrorOnWire:
        """The record of an error."""
        return cls(type(error).__name__, error._facts, str(error))

    def to_error(self) -> CudnnActorError:
        """The error, of its class; of the base class, with its text, if that is unknown here."""
        for module in (failures, models, protocol_errors):
            found = getattr(module, self.kind, None)
            if isinstance(found, type) and issubclass(found, CudnnActorError):
                try:
                    return found.of_facts(self.facts)
                except (TypeError, ValueError):
                    break
        return CudnnActorError(self.text)


# From the owner.


class Begin(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Begin to serve.

    Parameters
    ----------
    path
        The socket by which to attach to the service.
    at
        Where to listen.
    row, rows
        Which row of the table of limits is the process's, of how many.
    most_running, most_bytes
        The limits, of all processes together.
    tokens
        The digests of the tokens; None if requests need none.
    """

    path: str
    at: Listening
    row: int
    rows: int
    most_running: int
    most_bytes: int
    tokens: list[bytes] | None


class Version(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A version of a model that answers.

    Parameters
    ----------
    key
        The owner's number for it, unlike that of any other.
    version
        As the protocol names it.
    loaded
        What runs it: see `attached.ServedModel`.
    batched
        Whether its requests are put into batches, so that their leading dim counts samples.
    metadata, config
        What the protocol says of it.
    """

    key: int
    version: str
    loaded: LoadedModel
    batched: bool
    metadata: dict[str, Any]
    config: dict[str, Any]


class ModelRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A model that the server knows by name: the version that answers, or None, and whether one is loaded."""

    name: str
    loading: bool
    served: Version | None


class Served(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """All models, as they are from now on, and whether the server starts. `Took` is the reply."""

    number: int
    starting: bool
    models: list[ModelRecord]


class AddRegion(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A region of shared memory, with its descriptor. `Took` is the reply."""

    number: int
    name: str
    key: str
    offset: int
    nbytes: int


class DropRegions(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Forget a region of shared memory; for "", all. `Took` is the reply."""

    number: int
    name: str


class Listen(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Listen now. The answer to `Prepared`.

    Frames keep their order, so the process knows by then all that the owner has sent without waiting for it.
    From this frame on, the owner waits until the process knows what it is told.
    """


class Reply(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The answer to an `Ask`."""

    number: int
    value: Any = None
    error: ErrorOnWire | None = None


class GiveCounts(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Send the `Counts` now, with this number."""

    number: int


class Drain(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Take no more inferences, answer those that are under way, for up to these seconds, and end."""

    seconds: float


# From a serving process.


class Prepared(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """It is attached to the service, and could listen."""


class Listens(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """It listens on its ports."""


class Failed(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """It cannot serve. `address`: whether that is because of an address or a certificate."""

    text: str
    address: bool


class Ask(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A call of a method of `Administration`, by its name. `Reply` is the answer."""

    number: int
    method: str
    arguments: dict[str, Any]


class Took(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """What the owner has sent with this number holds here from now on."""

    number: int


class Released(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """None of this process's requests uses these versions any more, and none will."""

    keys: list[int]


class Counts(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """What requests this process has answered since it last said so, by the model's name.

    `number`: that of the `GiveCounts`; 0 if none has asked.
    """

    number: int
    counts: dict[str, ModelCounts]


FROM_OWNER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Begin | Served | AddRegion | DropRegions | Listen | Reply | GiveCounts | Drain
)
FROM_FRONT: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Prepared | Listens | Failed | Ask | Took | Released | Counts
)
