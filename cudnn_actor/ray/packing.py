"""Requests on their way to a replica.

- A graph is packed once, and unpacked once in each replica. Else it would be pickled with each request, and
  its objects made anew, in some hundred microseconds.
- Ray serialises each argument of a call by itself, in some ten microseconds here and as many there. So all
  that is small goes as one. Arrays stand apart, of which Ray sends small ones with the call and puts large
  ones into its store; and so do objects, in whose place Ray gives what they are.
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
    """What a request begins with.

    Parameters
    ----------
    incarnation
        The one of the replica that it is meant for.
    small
        Its arguments, with None for those that stand apart.
    apart
        The places of these, in order.
    """

    incarnation: str
    small: tuple[Any, ...]
    apart: tuple[int, ...]


def split(incarnation: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a request, as they are sent: a `Head`, and what stands apart."""
    apart = [place for place, each in enumerate(args) if isinstance(each, _APART)]
    small = tuple([None if place in apart else each for place, each in enumerate(args)])
    return Head(incarnation, small, tuple(apart)), *[args[place] for place in apart]


def joined(head: Head, apart: Sequence[Any]) -> list[Any]:
    """The arguments again, on the other side."""
    args = [*head.small]
    for place, each in zip(head.apart, apart, strict=True):
        args[place] = each
    return args


def packed(what: Any) -> Any:
    """A graph as bytes; the class of an operation as it is, which is pickled by its name."""
    return _pack(what) if isinstance(what, Graph) else what


def unpacked(what: Any) -> Any:
    """What was packed, on the other side."""
    return _unpack(what) if isinstance(what, bytes) else what


@functools.lru_cache(maxsize=_KEPT)
def _pack(graph: Graph) -> bytes:
    return pickle.dumps(graph, protocol=5)


@functools.lru_cache(maxsize=_KEPT)
def _unpack(data: bytes) -> Any:
    return pickle.loads(data)
