"""A graph, run on buffers."""

from __future__ import annotations

from collections.abc import Mapping

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.messages.any_message import AnyMessage
from cudnn_actor.protocol.messages.receipts import Receipt
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import did_you_mean

__all__ = ["RunGraph"]


class RunGraph(AnyMessage[Receipt], tag=True):
    """Run a graph. Answered by a `Receipt`.

    Parameters
    ----------
    graph
        What `GraphBuilder.build` gave.
    buffers
        One for each of the graph's ports, the inputs first: see `bind`.
    """

    graph: Graph
    buffers: tuple[BufferRef, ...]

    @classmethod
    def bind(
        cls, graph: Graph, buffers: Mapping[str, BufferRef] | None = None, /, **named: BufferRef
    ) -> RunGraph:
        """A message that runs a graph on these buffers, by the names of its inputs and outputs.

        Raises `InvalidRequest` for a name that the graph does not have, is given twice, or is missing.
        """
        if not isinstance(graph, Graph):
            raise InvalidRequest(
                field="graph",
                value=Words(type(graph).__name__),
                problem="is not a Graph",
                fix="pass what GraphBuilder.build gave",
            )
        return cls(graph=graph, buffers=require_all_bound(graph, bound_names(graph, buffers, named)))


def require_all_bound(graph: Graph, given: Mapping[str, BufferRef]) -> tuple[BufferRef, ...]:
    """The buffers in the order of the graph's ports. Raises `InvalidRequest` if one is missing."""
    for name in graph.places:
        if name not in given:
            raise InvalidRequest(
                field=name,
                value=None,
                problem="is a port of the graph and has no buffer",
                fix=f"give it one, as in {name}=buffer",
            )
    return tuple(given[name] for name in graph.places)


def bound_names(
    graph: Graph, buffers: Mapping[str, BufferRef] | None, named: Mapping[str, BufferRef]
) -> dict[str, BufferRef]:
    """The buffers that were given by name, in a mapping or as keywords. Raises as `RunGraph.bind`."""
    if not (buffers is None or isinstance(buffers, Mapping)):
        raise InvalidRequest(
            field="buffers",
            value=buffers,
            problem="is not a mapping of names to buffers",
            fix=f"name each buffer, as in {next(iter(graph.places))}=buffer",
        )
    given = dict(buffers or {})
    for name, ref in named.items():
        if name in given:
            raise InvalidRequest(field=name, value=ref, problem="is given twice", fix="give it once")
        given[name] = ref
    for name, ref in given.items():
        if name not in graph.places:
            raise InvalidRequest(
                field=name,
                value=ref,
                problem="is no input or output of the graph",
                fix=f"{did_you_mean(name, graph.places)}use {', '.join(graph.places)}",
            )
    return given
