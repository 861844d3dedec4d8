"""Puts another of cuDNN's candidates first where tuning has shown that cuDNN's first one is slower.

cuDNN ranks its candidates for attention in the same order for any size. For few queries, its
small tiles are faster: 12 heads of 197 positions took 5.4 us instead of 6.5, and 12 of 128,
causal, 5.9 instead of 7.7 (ViT-B/16 and GPT-2 for one sample, in bfloat16, H200, cuDNN 9.19,
tuned in the whole). For 32 samples, cuDNN's first candidate was the fastest.

A layer norm of 128 rows took 1.5 us by the engine that is cuDNN's first for 197 rows, and 2.4 by
the one that is its first for 128. Without these engines, the order is cuDNN's. So it is for
fewer rows: with 49 (ConvNeXt) the other engine took 1.1 us, and this one 1.8.
"""

from __future__ import annotations

import math
from typing import Protocol

from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Attention, LayerNorm

__all__ = ["Names", "rank"]

_TILE, _MOST_TILES = 128, 32
"""The queries of a tile of cuDNN's first candidate for attention, and the most such tiles that are few."""
_MOST_KEYS, _WIDEST_HEAD = 256, 64
_ROWS = range(128, 257)
"""The numbers of rows that are few for a layer norm."""


class Names(Protocol):
    """The names of candidates, in cuDNN's order: a list, or an object that asks cuDNN for each."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> str: ...


def rank(graph: OperationGraph, names: Names, first: int = 0) -> list[int]:
    """The indices from `first` on of cuDNN's candidates, in the order in which they are to be tried.

    The candidates that the graph's numerics prefer are the first. If the order is cuDNN's, no name is
    asked for.
    """
    wanted = _first(graph)
    indices = range(first, len(names))
    if wanted is None and not graph.numerics.prefer:
        return [*indices]

    def place(index: int) -> tuple[int, bool]:
        name = names[index]
        return graph.numerics.preference(name), wanted is None or wanted not in _parts_of(name)

    return sorted(indices, key=place)


def _first(graph: OperationGraph) -> str | None:
    """The engine or knob in the names of the candidates that go first; None if none goes first."""
    match graph.operations:
        case [Attention() as attention] if _is_small_attention(graph, attention):
            return "k24=3"
        case [LayerNorm() as norm] if _is_small_norm(graph, norm):
            return "eng4"
    return None


def _is_small_attention(graph: OperationGraph, operation: Attention[int]) -> bool:
    """Whether attention has few queries and keys, and heads no wider than those that were measured.

    It has neither lengths nor dropout, and stores nothing for a backward pass.
    """
    if {operation.lengths_q, operation.lengths_kv, operation.state, operation.statistics} != {None}:
        return False
    q, keys = graph.tensor(operation.q), graph.tensor(operation.k).dims[2]
    samples, heads, queries, width = q.dims
    few = samples * heads * -(-queries // _TILE) <= _MOST_TILES
    return q.dtype.is_half and few and keys <= _MOST_KEYS and width <= _WIDEST_HEAD


def _is_small_norm(graph: OperationGraph, operation: LayerNorm[int]) -> bool:
    """Whether a norm has few rows, and stores nothing for a backward pass."""
    x = graph.tensor(operation.x)
    few = math.prod(x.dims[: operation.axis]) in _ROWS
    return x.dtype.is_half and few and len(operation.writes) == 1


def _parts_of(name: str) -> list[str]:
    """The engine and the knobs of a candidate, by its name."""
    return name.split("_")
