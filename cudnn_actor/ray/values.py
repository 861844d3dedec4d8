"""The values of requests: the caller's side checks them, and copies large arrays to where replicas find
them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError

from cudnn_actor.actors import forks
from cudnn_actor.actors.kept_threads import KeptThreads
from cudnn_actor.pool.pure_requests import overwritten_inputs, parts_of
from cudnn_actor.processes.process_state import ProcessName
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.ray.held import Held
from cudnn_actor.ray.node_memory import ArrayPlace, MemoryName, NodeMemory, Piece
from cudnn_actor.ray.packing import INLINE_ARRAYS, INLINE_BYTES, Given, nbytes_of_results

__all__ = ["RequestValues", "Sending", "Values", "not_held", "require_held", "require_pure"]

_THREADS = 4
"""How many threads of a pool put arrays into Ray's object store. Each copies one array, or waits."""
_ON_LOOP_BYTES = 1 << 20
"""Arrays of a request that have up to this many bytes together are copied on the event loop: that takes less
than waking a thread."""
_STRIDED = 4
"""How often the bytes of an array count that is not in C order. To copy it takes several times as long."""
_KINDS = 256
"""For how many kinds of requests the size of their results is kept."""


def require_pure(what: Any, given: Mapping[str, Any], held: Collection[Held]) -> None:
    """Raise `InvalidRequest` for a buffer that not every replica has, or that would be overwritten on one
    replica alone.

    Parameters
    ----------
    what
        A graph, or the class of an operation; a model's runs overwrite nothing.
    given
        The arrays and fields, by name.
    held
        The `Held` objects of the pool.
    """
    overwritten = overwritten_inputs(what)
    for name, value in given.items():
        for each in parts_of(value):
            if isinstance(each, BufferRef):
                raise InvalidRequest(
                    field=name,
                    value=each,
                    problem="is a buffer of one replica, and any replica may run this",
                    fix="pass an array, an object of Ray's, or what pool.upload gave",
                )
            if isinstance(each, Held):
                require_held(name, each, held)
                if name in overwritten:
                    raise InvalidRequest(
                        field=name,
                        value=each,
                        problem="would be overwritten on one replica alone",
                        fix="pass an array, which is copied",
                    )


def require_held(field: str, value: object, held: Collection[Held]) -> None:
    """Raise `InvalidRequest` unless `value` is a `Held` that all replicas have."""
    if value not in held:
        raise not_held(field, value)


def not_held(field: str, value: object) -> InvalidRequest:
    """The error for a value that is no `Held` of this pool."""
    return InvalidRequest(
        field=field,
        value=value,
        problem="is nothing that this pool has: it was freed or unloaded, or is another pool's",
        fix="upload or load it with this pool",
    )


Kept = dict[ProcessName | None, list[Piece]]
"""Pieces that processes of replicas may use. With None, nobody will know when a process has ended."""


class Sending(NamedTuple):
    """The values of a request, as one replica gets them.

    Parameters
    ----------
    args
        The last arguments of the replica's method: `Given`, and the values.
    pieces
        The pieces of the pool's memory that the arguments name.
    results
        The piece that is the room for results.
    kept
        See `Values.kept`.
    """

    args: tuple[Any, ...]
    pieces: Sequence[Piece]
    results: Piece | None
    kept: Kept

    def keep_until(self, answer: ray.ObjectRef[Any], process: ProcessName | None) -> None:
        """Keep the pieces until a replica's process has answered or ended, though nobody waits for the
        answer."""
        if self.pieces:
            answer.future().add_done_callback(partial(_let_go, self, process))

    def keep_while_lives(self, process: ProcessName | None) -> None:
        """Keep the pieces while a replica's process lives, since nobody else tells when it uses them no
        more. Any thread."""
        if self.pieces:
            self.kept.setdefault(process, []).extend(self.pieces)


def _let_go(sending: Sending, process: ProcessName | None, answer: Future[Any]) -> None:
    """Let the pieces go, to which the callback has referred until now. On a thread of Ray's."""
    if not answer.cancelled() and isinstance(answer.exception(), ActorUnavailableError):
        sending.keep_while_lives(process)


class Values:
    """Makes the values of requests ready for replicas. Used on the pool's event loop."""

    def __init__(self) -> None:
        threads = KeptThreads(_THREADS, "ray-put")
        self._threads: KeptThreads | None = threads
        self.memory: NodeMemory | None = None
        """The memory that replicas of this machine map; None without one."""
        self.kept: Kept = {}
        """Pieces that a replica may still write. Ray says only that a replica cannot be reached, whether its
        process has ended or not, so these are kept until the process is known to have ended."""
        self._results: dict[Hashable, int] = {}
        """For kinds of requests whose results are large: the bytes of the largest ones."""
        forks.finalize(self, threads.end).atexit = False  # for a pool that nobody closes

    def begin(self) -> MemoryName | None:
        """Make the memory that replicas of this machine map. Returns its name; None if there is no room.

        Called on a thread of its own, because that reads files.
        """
        try:
            self.memory = NodeMemory()
        except (OSError, MemoryError):
            return None
        return self.memory.name

    def of(self, kind: Hashable, given: Mapping[str, Any]) -> RequestValues:
        """The values of a request of this kind. Copies nothing yet."""
        return RequestValues(self, kind, given)

    async def copy(self, arrays: Sequence[np.ndarray]) -> list[tuple[ArrayPlace, Piece] | None]:
        """Copy arrays to the memory that replicas of this machine map. Returns None for those that have no
        room."""
        pieces = [self._take(each.nbytes) for each in arrays]
        found = [(piece, each) for piece, each in zip(pieces, arrays, strict=True) if piece is not None]
        if self._threads is None or sum(_weight(each) for _, each in found) <= _ON_LOOP_BYTES:
            _write(found)
        else:
            await self._threads.run(_write, found)
        return [
            None if piece is None else (ArrayPlace(piece.offset, each.shape, each.dtype), piece)
            for piece, each in zip(pieces, arrays, strict=True)
        ]

    async def put(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        """Put arrays into Ray's object store, and return the references. After `end`, it returns the arrays.

        A thread does it, because that copies the arrays, and waits for room. The arrays are freed with the
        references.
        """
        return arrays if self._threads is None else await self._threads.run(_put, arrays)

    def room_for_results(self, kind: Hashable) -> Piece | None:
        """A piece for results as large as the largest of a kind; None if these are small, or not known."""
        nbytes = self._results.get(kind)
        return None if nbytes is None else self._take(nbytes)

    def _take(self, nbytes: int) -> Piece | None:
        """A piece of the memory; None if there is no room."""
        if self.memory is None:
            return None
        piece = self.memory.take(nbytes)
        if piece is None and self.let_go():
            piece = self.memory.take(nbytes)
        return piece

    def let_go(self) -> bool:
        """Let the pieces go that were kept for processes which have ended by now. Returns whether there were
        any."""
        ended = [each for each in tuple(self.kept) if each is not None and each.has_ended()]
        for each in ended:
            del self.kept[each]
        return bool(ended)

    def note_results(self, kind: Hashable, found: Any) -> None:
        """Note how large the results of a kind are."""
        nbytes = nbytes_of_results(found)
        if nbytes > self._results.get(kind, 0):
            self._results.pop(kind, None)
            self._results[kind] = nbytes
            if len(self._results) > _KINDS:
                del self._results[next(iter(self._results))]

    def end(self) -> None:
        """End the threads, and the memory once no array is in it. The pool refuses requests from then on."""
        self.memory = None
        if self._threads is not None:
            self._threads.end()
            self._threads = None


class RequestValues:
    """The values of one request, which may be sent several times.

    Parameters
    ----------
    values
        The object that makes them ready.
    kind
        The kind of the request.
    given
        The values as the caller gave them, by name.
    """

    def __init__(self, values: Values, kind: Hashable, given: Mapping[str, Any]) -> None:
        self._values, self._kind = values, kind
        self._names, self._given = tuple(given), [*given.values()]
        arrays = [(each.nbytes, k) for k, each in enumerate(self._given) if isinstance(each, np.ndarray)]
        self._large = [k for nbytes, k in arrays if nbytes > INLINE_BYTES]
        self._many = _beside_inline([(nbytes, k) for nbytes, k in arrays if nbytes <= INLINE_BYTES])
        self._copies: dict[int, tuple[ArrayPlace, Piece]] = {}
        self._objects: dict[int, Any] = {}

    async def make_ready(self, *, near: bool) -> Sending:
        """Copy large arrays to where a replica finds them. Each array is copied once, and once more if the
        request is sent to a replica of the other sort.

        A replica that is near, because it maps the pool's memory, finds them there, if it has room, and so
        it does smaller ones that would not all go with the call. Else large arrays are in Ray's store.
        """
        args, pieces = [*self._given], list[Piece]()
        if near:
            await self._copy()
            for k, (place, piece) in self._copies.items():
                args[k] = place
                pieces.append(piece)
        left = [k for k in self._large if not (near and k in self._copies)]
        if missing := [k for k in left if k not in self._objects]:
            objects = await self._values.put([self._given[k] for k in missing])
            self._objects |= zip(missing, objects, strict=True)
        for k in left:
            args[k] = self._objects[k]
        results = self._values.room_for_results(self._kind) if near else None
        if results is not None:
            pieces.append(results)
        first = Given(self._names, None if results is None else results.room)
        return Sending((first, *args), pieces, results, self._values.kept)

    async def _copy(self) -> None:
        """Copy to the pool's memory what fits there, and is not there yet."""
        wanted = (*self._large, *self._many)
        missing = [k for k in wanted if k not in self._copies and _is_copied(self._given[k])]
        if missing:
            copied = await self._values.copy([self._given[k] for k in missing])
            self._copies |= {k: each for k, each in zip(missing, copied, strict=True) if each is not None}

    def note(self, found: Any) -> Any:
        """Note how large the results are, and return them."""
        self._values.note_results(self._kind, found)
        return found


def _beside_inline(arrays: Sequence[tuple[int, int]]) -> list[int]:
    """Of arrays that could each go with a call, given as sizes and numbers: the numbers of those that do not
    go with it, because there are too many. Ray would serialise each by itself, which takes longer than to
    copy it."""
    left = INLINE_ARRAYS
    if sum(nbytes for nbytes, _ in arrays) <= left:
        return []
    beside = list[int]()
    for nbytes, k in sorted(arrays):
        left -= nbytes
        if left < 0:
            beside.append(k)
    return sorted(beside)


def _is_copied(array: np.ndarray) -> bool:
    """Whether a copy of the values has all that a replica needs of an array. A subclass would be lost."""
    return type(array) is np.ndarray and not array.dtype.hasobject


def _weight(array: np.ndarray) -> int:
    """How many bytes in C order take as long to copy as this array."""
    return array.nbytes if array.flags.c_contiguous else _STRIDED * array.nbytes


def _write(found: Sequence[tuple[Piece, np.ndarray]]) -> None:
    for piece, array in found:
        piece.write(array)


def _put(arrays: Sequence[np.ndarray]) -> list[ray.ObjectRef[np.ndarray]]:
    return [ray.put(each) for each in arrays]
