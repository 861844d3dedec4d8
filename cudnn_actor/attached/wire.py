"""The frames between a service's process and the processes that are attached to it. Does no I/O.

`processes.frames` has the framing. Decoding runs no code that the sender chooses. A frame that cannot be
decoded, is too long, or breaks the order below ends only its own connection. A message that cannot be
decoded, in a valid frame, fails only its own request.

=============  ==========================================================================================
client sends   `Attach` first, once; `MapSegment`, with one descriptor, and `DropSegment`; `KnowGraph`
               before the first request with that graph, `ForgetGraph`; `Requests`; `ForgetMessages`;
               `Withdraw`; `Room`, after a `NeedsRoom`; and the one that may move buffers, `ExportBuffer`, and
               `ImportBuffer`, with one descriptor
server sends   `Attached` or `Refusal` first; `Happened`, for each lifecycle event; `Status`; `Lent`;
               `Answers`, or `Receipts` for several answers that are receipts; `Near`; `Exported`, with one
               descriptor, as the answer to an `ExportBuffer`
=============  ==========================================================================================

Arrays of up to `INLINE_BYTES` travel in the frame. Larger arrays lie in segments: memory that both processes
map, and that the client has made and sealed against a change of its size.

Requests are numbered one by one. A message that the client may send again has a number, too: the client gives
it one when it sends its bytes, and names it by that number from then on. The client sees to it that no more
than `MOST_KEPT` messages of `KEPT_BYTES` together have numbers: it takes all numbers back by a
`ForgetMessages`, as a `ForgetGraph` does. A number that no message has is no valid frame.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from cudnn_actor.isolation.known_graphs import ForgetGraph, KnowGraph, LoopKnown, RunKnown
from cudnn_actor.models import Feature
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.protocol.errors import ErrorRecord, MalformedMessage
from cudnn_actor.protocol.messages import codec
from cudnn_actor.protocol.messages.messages import Travelling
from cudnn_actor.protocol.messages.model_messages import ModelRef
from cudnn_actor.protocol.messages.receipts import Receipt
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.service.health import Health
from cudnn_actor.service.metrics import Metrics
from cudnn_actor.supervision import LifecycleEvent

__all__ = [
    "FROM_CLIENT",
    "FROM_SERVER",
    "INLINE_BYTES",
    "KEPT_BYTES",
    "LONGEST",
    "LONGEST_MESSAGE",
    "MOST_KEPT",
    "VERSION",
    "Answer",
    "Answers",
    "Arrays",
    "Attach",
    "Attached",
    "Done",
    "DropSegment",
    "Dropped",
    "ExportBuffer",
    "Exported",
    "ForgetGraph",
    "ForgetMessages",
    "Given",
    "Happened",
    "ImportBuffer",
    "KnowGraph",
    "Lent",
    "LoadedModel",
    "MapSegment",
    "Near",
    "NeedsRoom",
    "Place",
    "Reading",
    "Receipts",
    "Refusal",
    "Refused",
    "Request",
    "Requests",
    "Room",
    "Status",
    "WireArray",
    "Withdraw",
    "Withdrawn",
    "digest_of",
    "writing",
]

VERSION: Final = 8
"""The version of the frames. Both sides must have the same."""
LONGEST: Final = 16 << 20
"""The bytes of the longest frame that a server accepts from a client."""
LONGEST_MESSAGE: Final = LONGEST - (4 << 10)
"""The bytes of the longest message, and of the longest graph, that fit into a frame with its other fields."""
INLINE_BYTES: Final = 16 << 10
"""The most bytes of an array that travels in the frame: copying it there is faster than finding a place for
it."""
MOST_KEPT: Final = 1024
"""How many messages of a client may have numbers at a time."""
KEPT_BYTES: Final = 3 << 20
"""The bytes of all messages of a client that have numbers."""


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The place of bytes: a segment, and the offset in it."""

    segment: int
    offset: int


class WireArray(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A C-contiguous array: its bytes, or their place."""

    dtype: DType
    dims: tuple[int, ...]
    data: bytes | Place

    @property
    def nbytes(self) -> int:
        """The array's size in bytes. Raises `ValueError` for a negative dim."""
        nbytes = self.dtype.numpy.itemsize
        for dim in self.dims:
            if dim < 0:
                raise ValueError(f"dims {self.dims} contain a negative size")
            nbytes *= dim
        return nbytes

    def inline(self) -> np.ndarray:
        """The array of the bytes in this record, read-only. Raises `ValueError` if they do not fit the dims
        and dtype."""
        if len(self.dims) > _MOST_DIMS:
            raise ValueError(f"an array of {len(self.dims)} dims")
        if not isinstance(self.data, bytes) or len(self.data) != self.nbytes:
            raise ValueError(f"an array of dims {self.dims} that has other bytes")
        return np.frombuffer(self.data, self.dtype.numpy).reshape(self.dims)

    @classmethod
    def of(cls, array: np.ndarray, place: Place | None = None) -> WireArray:
        """The record of an array, with its values, unless `place` says where they lie. Raises `TypeError`."""
        dtype = DType.of(array.dtype)
        if dtype is None:
            raise TypeError(f"arrays of {array.dtype} cannot be encoded")
        data = np.ascontiguousarray(array).tobytes() if place is None else place
        return cls(dtype, array.shape, data)


_MOST_DIMS = 32


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


# From the client.


class Attach(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The first frame: the client's version of the protocol, and its name for log lines."""

    version: int
    name: str


class MapSegment(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Map a segment, whose descriptor comes with the frame."""

    number: int
    nbytes: int


class DropSegment(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Forget a segment, which has no array any more."""

    number: int


class Request(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, omit_defaults=True, gc=False
):
    """A client's request.

    Parameters
    ----------
    body
        The message as bytes, or its number.
    room
        The place to which the arrays of the answer may be written; None for none yet.
    room_bytes
        How many bytes the place has.
    timeout_s
        Seconds after which the request is no longer started; None for no limit.
    share
        For an `Allocate` whose buffer is only read, and which clients with the same values may share: the
        SHA-256 of the values, as hexadecimal digits. Empty for a buffer of its own.
    headers
        The headers of W3C's Trace Context that name the client's span of the request; None if spans are off.
    keep
        The number that the message gets, by which later requests name it; None for none. Only with bytes.
    """

    body: bytes | int
    room: Place | None = None
    room_bytes: int = 0
    timeout_s: float | None = None
    share: str = ""
    headers: dict[str, str] | None = None
    keep: int | None = None


class Requests(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Requests in order.

    Parameters
    ----------
    first
        The client's number for the first of them: larger than all earlier ones. The others have the numbers
        behind it.
    requests
        The requests. One that has nothing but a message with a number is that number.
    """

    first: Annotated[int, msgspec.Meta(le=2**63 - 1)]  # so the numbers behind it can be encoded, too
    requests: list[Request | int]


class ForgetMessages(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """No message has a number any more. Requests that were sent earlier still run."""


class Withdraw(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Do not start a request, if it has not started. It is answered in any case.

    `tells`: whether the client wants a `Withdrawn`, too, unless the request has been answered.
    """

    number: int
    tells: bool


class Room(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The place to which the arrays of an answer may be written; None if there is no room, so that they are
    dropped."""

    number: int
    place: Place | None
    nbytes: int


class ExportBuffer(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A request for the place of a buffer's bytes: see `broker.service_state.Export`. `Exported` answers it.

    `number`, `timeout_s`: as in `Request`.
    """

    number: int
    buffer: BufferRef
    timeout_s: float | None


class ImportBuffer(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A request to map a buffer of another service for reading. Its descriptor comes with the frame.

    The answer is a reference that only a `Copy` may read.

    Parameters
    ----------
    number, timeout_s
        As in `Request`.
    arena_bytes, offset
        The size of the arena, and the offset of the buffer in it.
    spec
        The buffer's dims, strides and dtype.
    """

    number: int
    arena_bytes: int
    offset: int
    spec: TensorSpec
    timeout_s: float | None


FromClient = (
    Attach
    | MapSegment
    | DropSegment
    | KnowGraph
    | ForgetGraph
    | Requests
    | ForgetMessages
    | Withdraw
    | Room
    | ExportBuffer
    | ImportBuffer
)


# From the server.


class LoadedModel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A model that the server's process has loaded: its reference for clients, its inputs and outputs."""

    ref: ModelRef
    inputs: tuple[Feature, ...]
    defaults: tuple[Feature, ...]
    outputs: tuple[Feature, ...]


class Attached(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The first frame: the service's facts, and the client's limits.

    Parameters
    ----------
    service, device, isolation
        The service's name, device and isolation.
    worker_pid
        The process id of the service's worker; None for none.
    window
        How many requests the client may have in flight.
    nbytes
        The bytes of buffers that the client may have; None for no limit.
    operations
        How many operations a graph may have.
    graphs
        The bytes of the server's memory, approximately, that the client's graphs may take.
    models
        The names by which clients may load files, and the files.
    loaded
        The models of the server's process that clients may run, by their names.
    """

    service: str
    device: str
    isolation: str
    worker_pid: int | None
    window: int
    nbytes: int | None
    operations: int
    graphs: int
    models: dict[str, str]
    loaded: dict[str, LoadedModel]


class Refusal(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The server does not accept the client. The connection ends."""

    error: ErrorRecord


class Happened(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A lifecycle event of the service."""

    event: LifecycleEvent
    worker_pid: int | None


class Status(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The service's state and metrics at the moment."""

    health: Health
    metrics: Metrics


class Lent(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The models of the server's process that clients may run from now on, by their names."""

    loaded: dict[str, LoadedModel]


class _Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0, gc=False):
    number: int


class Done(_Answer, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1, gc=False):
    """The answer is a receipt."""

    receipt: Receipt


class Given(_Answer, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2, gc=False):
    """The answer, as `protocol.messages.codec.encode_reply` writes it."""

    body: bytes


class Arrays(_Answer, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """The answer is arrays by name, or one array, under the name None."""

    arrays: list[tuple[str | None, WireArray]]


class NeedsRoom(_Answer, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4, gc=False):
    """The answer has arrays of `nbytes` bytes, for which the server has no room yet. `Room` is the reply."""

    nbytes: int


class Refused(_Answer, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """The request has failed with this error."""

    error: ErrorRecord


class Dropped(_Answer, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6, gc=False):
    """The request was withdrawn. Nothing reads its arrays any more."""


class Withdrawn(_Answer, frozen=True, array_like=True, forbid_unknown_fields=True, tag=7, gc=False):
    """The reply to a `Withdraw`. `started`: whether the request may have started. Its answer is still to
    come."""

    started: bool


Answer = Done | Given | Arrays | NeedsRoom | Refused | Dropped | Withdrawn


class Answers(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Answers, in the order in which requests finished."""

    answers: list[Answer]


class Receipts(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Answers that are receipts of one incarnation, in the order in which requests finished. Each list has
    one element for each of them.

    Parameters
    ----------
    numbers
        The numbers of the requests.
    generation
        That of the receipts.
    plans
        Their plans; one text if all are the same.
    request_ids, queue_us, run_us
        As in `Receipt`.
    """

    numbers: list[int]
    generation: int
    plans: str | list[str]
    request_ids: list[int]
    queue_us: list[float]
    run_us: list[float]

    def receipts(self) -> list[Receipt]:
        """The receipts, in order. Raises `BadFrame` if the lists have several lengths."""
        ids, plans, waits, runs = self.request_ids, self.plans, self.queue_us, self.run_us
        each_plan = itertools.repeat(plans) if type(plans) is str else plans
        lengths = {len(self.numbers), len(ids), len(waits), len(runs)}
        if len(lengths) != 1 or (each_plan is plans and len(plans) not in lengths):
            raise BadFrame("lists of several lengths")
        return list(map(Receipt, ids, itertools.repeat(self.generation), each_plan, waits, runs))

    @classmethod
    def of(cls, answers: list[Done]) -> Receipts | None:
        """The frame of some answers; None if their receipts are of several incarnations."""
        fields: Iterator[Any] = zip(*map(_as_tuple, map(_receipt_of, answers)), strict=True)
        ids, generations, plans, waits, runs = map(list, fields)
        generation, plan = generations[0], plans[0]
        if generations.count(generation) != len(answers):
            return None
        all_plans = plan if plans.count(plan) == len(plans) else plans
        return cls(list(map(_number_of, answers)), generation, all_plans, ids, waits, runs)


_number_of, _receipt_of, _as_tuple = attrgetter("number"), attrgetter("receipt"), msgspec.structs.astuple


class Near(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The answer to the client's only request is near: in some 100 us. It is said of long runs on a device,
    while nothing else is in work."""


class Exported(_Frame, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The place of a buffer's bytes: in the arena of `arena_bytes` whose descriptor comes with this frame."""

    number: int
    arena_bytes: int
    offset: int


FromServer = Attached | Refusal | Happened | Status | Lent | Answers | Receipts | Near | Exported

FROM_CLIENT: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromClient)
FROM_SERVER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromServer)


def digest_of(array: np.ndarray) -> str:
    """The SHA-256 of the values of a C-contiguous array, as hexadecimal digits. Takes some 2 ms for each
    MB."""
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).data).hexdigest()


def writing(put: Callable[[np.ndarray], Place | None]) -> Callable[[Any], bytes]:
    """A function that encodes messages. `put` finds a place for an array, or returns None for an array that
    travels in the frame.

    The function raises the errors of `put`, and `TypeError` for objects that the protocol cannot encode.
    """

    def pack(value: Any) -> object:
        return WireArray.of(value, put(value)) if isinstance(value, np.ndarray) else codec.pack(value)

    encode = msgspec.msgpack.Encoder(enc_hook=pack).encode

    def write(message: Any) -> bytes:
        try:
            return encode(message)
        except OverflowError as error:
            raise TypeError(str(error)) from error

    return write


class Reading:
    """Decodes messages of clients, as `known_form` gives them.

    Only one thread may use it, since the function that finds arrays is set for each call. A decoder of all
    messages takes tens of milliseconds to make, so all clients share one.
    """

    def __init__(self) -> None:
        self._find: Callable[[WireArray], np.ndarray] = WireArray.inline
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            Travelling | RunKnown | LoopKnown, dec_hook=self._array
        )

    def message(self, body: bytes, find: Callable[[WireArray], np.ndarray]) -> Any:
        """The message in `body`. Raises `MalformedMessage`."""
        with self._finding(find):
            try:
                return self._decoder.decode(body)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise MalformedMessage(detail=str(error)) from error

    @contextlib.contextmanager
    def _finding(self, find: Callable[[WireArray], np.ndarray]) -> Iterator[None]:
        self._find = find
        try:
            yield
        finally:
            self._find = WireArray.inline

    def _array(self, wanted: type, value: object) -> object:
        if wanted is not np.ndarray:
            raise TypeError(f"{wanted.__name__} cannot be decoded")
        return self._find(msgspec.convert(value, WireArray))
