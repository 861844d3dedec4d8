"""Cuts a `Warm` into several, because a worker gets each as one frame, whose length is limited.

Only graphs are long, so only they are measured. A `Warm` that is cut to `MOST_BYTES` is far below the limit
of a frame, unless a single graph is not: then it is a `Warm` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.messages.messages import Compute, GraphRun, Warm

__all__ = ["MOST_BYTES", "cut", "warm_of"]

MOST_BYTES: Final = 8 << 20
"""Bytes of graphs in one `Warm`, unless it has only one."""
_BYTES_OF_A_BUFFER = 512

W = TypeVar("W", bound=Compute | Graph)


def cut(wanted: Sequence[W], most_bytes: int = MOST_BYTES) -> Iterator[Sequence[W]]:
    """Yield the messages and graphs in the same order, in groups of up to `most_bytes` bytes. A longer one is
    a group of its own."""
    begin, nbytes = 0, 0
    for place, each in enumerate(wanted):
        weight = _weight(each)
        if place > begin and nbytes + weight > most_bytes:
            yield wanted[begin:place]
            begin, nbytes = place, 0
        nbytes += weight
    if begin < len(wanted):
        yield wanted[begin:]


def warm_of(messages: Sequence[Compute]) -> Warm:
    """One `Warm` for the plans of some messages.

    A graph is sent without the buffers of its message, which do not decide about its plan.
    """
    graphs = tuple(each.graph for each in messages if isinstance(each, GraphRun))
    others = tuple(each for each in messages if not isinstance(each, GraphRun))
    return Warm(messages=others, graphs=graphs)


def _weight(wanted: Any) -> int:
    """The bytes, approximately, of a graph or a message in a frame; 0 if it is short, or no message at all,
    which is refused later."""
    graph = getattr(wanted, "graph", wanted)
    if not isinstance(graph, Graph):
        return 0
    return len(graph.encoded) + _BYTES_OF_A_BUFFER * len(getattr(wanted, "buffers", ()))
