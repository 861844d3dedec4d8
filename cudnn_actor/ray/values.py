"""The values of requests: the caller's side checks them, and puts large arrays into Ray's object store."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from cudnn_actor.actors import forks
from cudnn_actor.actors.kept_threads import KeptThreads
from cudnn_actor.pool.pure_requests import overwritten_inputs, parts_of
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.ray.held import Held
from cudnn_actor.ray.packing import INLINE_BYTES

__all__ = ["Values", "not_held", "require_held", "require_pure"]

_THREADS = 4
"""How many threads of a pool put arrays into Ray's object store. Each copies one array, or waits."""


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


class Values:
    """Puts the large arrays of requests into Ray's object store. Used on the pool's event loop."""

    def __init__(self) -> None:
        threads = KeptThreads(_THREADS, "ray-put")
        self._threads: KeptThreads | None = threads
        forks.finalize(self, threads.end).atexit = False  # for a pool that nobody closes

    async def as_objects(self, given: Mapping[str, Any]) -> list[Any]:
        """Put large arrays into Ray's object store, once, since a request may be sent several times. Returns
        the values, with references in place of these arrays. After `end`, it returns them as they are.

        A thread does it, because that copies the arrays, and waits for room. The arrays are freed with the
        references.
        """
        values = list(given.values())
        large = [
            k for k, each in enumerate(values) if isinstance(each, np.ndarray) and each.nbytes > INLINE_BYTES
        ]
        if large and self._threads is not None:
            objects = await self._threads.run(_put, [values[k] for k in large])
            for k, each in zip(large, objects, strict=True):
                values[k] = each
        return values

    def end(self) -> None:
        """End the threads. The pool refuses requests from then on."""
        if self._threads is not None:
            self._threads.end()
            self._threads = None


def _put(arrays: Sequence[np.ndarray]) -> list[ray.ObjectRef[np.ndarray]]:
    return [ray.put(each) for each in arrays]
