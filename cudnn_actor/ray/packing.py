"""How requests are packed for their way to a replica, and their results for the way back.

- A graph is packed once, and unpacked once in each replica. Otherwise it would be pickled with each request,
  and its objects made again, which takes some hundred microseconds.
- Ray serialises each argument of a call by itself, and each result, in some thirty microseconds on each side.
  It takes bytes as they are. So all small arguments are sent as one argument of bytes, arrays included, and
  small results come back as bytes: a plain pickle takes a few microseconds.
- Large arrays, and Ray's objects, are arguments of their own: they go by Ray's store. If the replica is on
  the caller's node, large arrays lie in memory that both map (`node_memory`), and the bytes say where. So do
  small ones that are too many for one argument.
- A plain pickle names classes and functions, where Ray's pickle sends those that a replica may not have. So
  arguments that may contain such things are left to Ray.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray

from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.ray.node_memory import MappedMemory, Piece, Room

__all__ = [
    "INLINE_ARRAYS",
    "INLINE_BYTES",
    "Given",
    "Head",
    "PackedResults",
    "join",
    "nbytes_of_results",
    "pack",
    "pack_results",
    "split",
    "unpack",
    "unpack_results",
]

INLINE_BYTES = 100 * 1024
"""The most bytes of an argument or a result that Ray sends with its call (Ray's
`max_direct_call_object_size`). Larger ones go by its object store."""
INLINE_ARRAYS = INLINE_BYTES - 4096
"""The most bytes of arrays in such an argument or result. The other bytes are for what is beside them."""
_KEPT = 256
_APART = (np.ndarray, ray.ObjectRef)
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_OWN = __name__.partition(".")[0]


class Head(NamedTuple):
    """The first argument of a request.

    Parameters
    ----------
    incarnation
        The incarnation of the replica for which the request is meant.
    small
        The request's arguments, with None for those that are sent as arguments of their own.
    apart
        The indices of these arguments, in order.
    """

    incarnation: str
    small: tuple[Any, ...]
    apart: tuple[int, ...]


@dataclass(frozen=True)
class Given:
    """The argument that precedes the values of a pure request.

    Parameters
    ----------
    names
        The names of the values, in order.
    room
        The place for large results in the pool's memory; None for Ray's store.
    """

    names: tuple[str, ...]
    room: Room | None

    def by_name(self, values: Iterable[Any]) -> dict[str, Any]:
        """The values by name."""
        return dict(zip(self.names, values, strict=True))


def split(incarnation: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a request, as they are sent: a `Head`, as bytes if it can be, and the arguments that
    are sent on their own."""
    inline = _is_small(args)
    apart = [
        place
        for place, each in enumerate(args)
        if isinstance(each, _APART) and not (inline and _is_plain(each))
    ]
    small = tuple([None if place in apart else each for place, each in enumerate(args)])
    head = Head(incarnation, small, tuple(apart))
    as_bytes = (inline or _is_small(small)) and _is_plain(small)
    return pickle.dumps(head, protocol=5) if as_bytes else head, *[args[place] for place in apart]


def join(first: Head | bytes, apart: Sequence[Any]) -> tuple[str, list[Any]]:
    """The incarnation and the arguments of a request, from the form that `split` gives them."""
    incarnation, small, places = pickle.loads(first) if isinstance(first, bytes) else first
    args = [*small]
    for place, each in zip(places, apart, strict=True):
        args[place] = each
    return incarnation, args


def _is_small(values: Iterable[Any]) -> bool:
    """Whether Ray sends these with a call if they are one argument or result of bytes."""
    return _nbytes([*values]) <= INLINE_ARRAYS


def _nbytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, tuple | list):
        return sum(map(_nbytes, value))
    return len(value) if isinstance(value, bytes) else 0


def _is_plain(value: Any) -> bool:
    """Whether a plain pickle of a value is the same to a replica as one of Ray's."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is np.ndarray:
        return not value.dtype.hasobject
    if kind is tuple or kind is list:
        return all(map(_is_plain, value))
    named = value if isinstance(value, type) else kind
    return named.__module__.partition(".")[0] == _OWN


class PackedResults(bytes):
    """Results as bytes, which Ray takes as they are."""

    __slots__ = ()


@dataclass(frozen=True)
class _InPiece:
    """Results whose arrays lie in a piece of the caller's memory.

    Parameters
    ----------
    data
        The pickle of the results, without the values of the arrays.
    spans
        The place of each array's values in the piece: its offset, and its size.
    """

    data: bytes
    spans: list[tuple[int, int]]


def pack_results(found: Any, memory: MappedMemory | None = None, room: Room | None = None) -> Any:
    """Results as `PackedResults`: an array, a named tuple of arrays, or arrays by name. Large ones are copied
    to `room`, a place in `memory`; without such a place, and if it is too small, they are returned as they
    are."""
    if _is_small(_arrays(found)):
        return PackedResults(pickle.dumps(found, protocol=5))
    if memory is not None and room is not None:
        parts = list[pickle.PickleBuffer]()
        data = pickle.dumps(found, protocol=5, buffer_callback=parts.append)
        if len(data) <= INLINE_ARRAYS:  # else an array was pickled whole: its dtype has no buffers
            spans = memory.write([each.raw() for each in parts], room)
            if spans is not None:
                return PackedResults(pickle.dumps(_InPiece(data, spans), protocol=5))
    return found


def unpack_results(data: bytes, piece: Piece | None = None) -> Any:
    """The results that `pack_results` packed. `piece`: the piece whose place the replica was told."""
    found = pickle.loads(data)
    if isinstance(found, _InPiece):
        assert piece is not None, "a replica copies results only to a place that it was told"
        return pickle.loads(found.data, buffers=piece.read(found.spans))
    return found


def nbytes_of_results(found: Any) -> int:
    """The bytes that a piece needs for results; 0 if they are small enough to be packed without one."""
    arrays = [*_arrays(found)]
    return 0 if _is_small(arrays) else Room.nbytes_for([_nbytes(each) for each in arrays])


def _arrays(found: Any) -> Iterable[Any]:
    if isinstance(found, Mapping):
        return found.values()
    return found if isinstance(found, tuple) else (found,)


def pack(what: Any) -> Any:
    """A graph as bytes. The class of an operation is returned as it is: it is pickled by its name."""
    return _pack(what) if isinstance(what, Graph) else what


def unpack(what: Any) -> Any:
    """The graph or the class that was packed."""
    return _unpack(what) if isinstance(what, bytes) else what


@functools.lru_cache(maxsize=_KEPT)
def _pack(graph: Graph) -> bytes:
    return pickle.dumps(graph, protocol=5)


@functools.lru_cache(maxsize=_KEPT)
def _unpack(data: bytes) -> Any:
    return pickle.loads(data)
