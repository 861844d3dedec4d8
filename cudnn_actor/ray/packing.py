"""What a request computes, on its way to a replica: a graph is packed once, and unpacked once in each.

Else it would be pickled with each request, and its objects made anew, in some hundred microseconds.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any

from cudnn_actor.protocol.graphs.named_graph import Graph

__all__ = ["packed", "unpacked"]

_KEPT = 256


def packed(what: Any) -> Any:
    """A graph as bytes; the class of an operation as it is, which is pickled by its name."""
    return _packed(what) if isinstance(what, Graph) else what


def unpacked(what: Any) -> Any:
    """What was packed, on the other side."""
    return _unpacked(what) if isinstance(what, bytes) else what


@functools.lru_cache(maxsize=_KEPT)
def _packed(graph: Graph) -> bytes:
    return pickle.dumps(graph, protocol=5)


@functools.lru_cache(maxsize=_KEPT)
def _unpacked(data: bytes) -> Any:
    return pickle.loads(data)
