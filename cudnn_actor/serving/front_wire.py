"""The frames between the process that owns the service (the owner) and serving processes. Does no I/O.

They go over a socket pair that the owner makes for each process. Inferences take another way: a serving
process is attached to the service (`cudnn_actor.attached`), as any client on this machine may be.

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
        """The error, of its own class, or of the base class if this process does not know its class."""
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
        The process's row in the table of limits, and how many rows there are.
    most_running, most_bytes
        The limits for all processes together.
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
        The owner's number for the version. Each version has another number.
    version
        Its name in the protocol.
    loaded
        The model that runs it: see `attached.ServedModel`.
    batched
        Whether its requests are put into batches, so that their leading dim counts samples.
    metadata, config
        The protocol's records of the model.
    """

    key: int
    version: str
    loaded: LoadedModel
    batched: bool
    metadata: dict[str, Any]
    config: dict[str, Any]


class ModelRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A model that the server knows by name: the version that answers, or None, and whether a version is
    being loaded."""

    name: str
    loading: bool
    served: Version | None


class Served(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """All models, as they are from now on, and whether the server is still starting. `Took` is the reply."""

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
    """Forget a region of shared memory, or, for "", all regions. `Took` is the reply."""

    number: int
    name: str


class Listen(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Listen now. The answer to `Prepared`.

    Frames keep their order. So the process has handled all earlier frames, for which the owner has not
    waited. From this frame on, the owner waits for `Took`.
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
    """Take no more inferences, wait up to these seconds until those under way are answered, and end."""

    seconds: float


# From a serving process.


class Prepared(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The process is attached to the service, and could listen."""


class Listens(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The process listens on its ports."""


class Failed(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The process cannot serve. `address`: whether that is because of an address or a certificate."""

    text: str
    address: bool


class Ask(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A call of a method of `Administration`, by its name. `Reply` is the answer."""

    number: int
    method: str
    arguments: dict[str, Any]


class Took(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The process has handled the owner's frame with this number."""

    number: int


class Released(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """No request of this process uses these versions any more, and none will."""

    keys: list[int]


class Counts(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The counts of requests that this process has answered since its last `Counts`, by the model's name.

    `number`: the number of the `GiveCounts` that asked for them; 0 if none did.
    """

    number: int
    counts: dict[str, ModelCounts]


FROM_OWNER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Begin | Served | AddRegion | DropRegions | Listen | Reply | GiveCounts | Drain
)
FROM_FRONT: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Prepared | Listens | Failed | Ask | Took | Released | Counts
)
