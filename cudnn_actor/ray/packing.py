"""How requests are packed for their way to a replica.

- A graph is packed once, and unpacked once in each replica. Otherwise it would be pickled with each request,
  and its objects made again, which takes some hundred microseconds.
- Ray serialises each argument of a call by itself, in some ten microseconds on each side. So all small
  arguments are sent as one. Arrays are arguments of their own: Ray sends small ones with the call, and puts
  large ones into its store. So are Ray's objects, which Ray replaces by their values.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import ray

from cudnn_actor.protocol.graphs.named_graph import Graph

__all__ = ["Head", "joined", "packed", "split", "unpacked"]

_KEPT = 256
_APART = (np.ndarray, ray.ObjectRef)


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


def split(incarnation: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a request, as they are sent: a `Head`, and the arguments that are sent on their
    own."""
    apart = [place for place, each in enumerate(args) if isinstance(each, _APART)]
    small = tuple([None if place in apart else each for place, each in enumerate(args)])
    return Head(incarnation, small, tuple(apart)), *[args[place] for place in apart]


def joined(head: Head, apart: Sequence[Any]) -> list[Any]:
    """The arguments of a request, from the form that `split` gives them."""
    args = [*head.small]
    for place, each in zip(head.apart, apart, strict=True):
        args[place] = each
    return args


def packed(what: Any) -> Any:
    """A graph as bytes. The class of an operation is returned as it is: it is pickled by its name."""
    return _pack(what) if isinstance(what, Graph) else what


def unpacked(what: Any) -> Any:
    """The graph or the class that was packed."""
    return _unpack(what) if isinstance(what, bytes) else what


@functools.lru_cache(maxsize=_KEPT)
def _pack(graph: Graph) -> bytes:
    return pickle.dumps(graph, protocol=5)


@functools.lru_cache(maxsize=_KEPT)
def _unpack(data: bytes) -> Any:
    return pickle.loads(data)
