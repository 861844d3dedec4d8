"""Graphs that another process keeps: each is sent once, and later requests name it.

The side that sends requests (`SentGraphs`) decides which graphs the other side (`ReceivedGraphs`) keeps. A
service and its worker do this, and an attached client and the service's process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_args

import msgspec

from cudnn_actor.protocol.errors import MalformedMessage
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.messages.messages import GraphRun, RunGraph, RunLoop
from cudnn_actor.protocol.messages.run_loop import Loop
from cudnn_actor.protocol.types.buffers import BufferRef

__all__ = ["GRAPH_RUNS", "MOST_GRAPHS", "ForgetGraph", "KnowGraph", "LoopKnown"]
__all__ += ["ReceivedGraphs", "RunKnown", "SentGraphs", "known_form"]

MOST_GRAPHS = 256
"""Graphs that the other side keeps, as many as a worker keeps plans."""


GRAPH_RUNS = frozenset(get_args(GraphRun))
"""The types of the messages that run a graph."""


class KnowGraph(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Keep a graph, whose `Graph.encoded` is `body`. Later requests name it by its `identity`."""

    identity: str
    body: bytes


class ForgetGraph(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Drop a graph. Requests that were sent earlier still run it."""

    identity: str


class RunKnown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """A `RunGraph` whose graph the other side has received.

    Models have hundreds of buffers. Decoding specs would take most of the time, so only facts that are not in
    the graph are sent.

    Parameters
    ----------
    graph
        The graph's identity.
    slots, generations
        The slots and generations of the buffers, one for each of the graph's ports. The buffers have the
        specs of the ports.
    alignments
        The alignments that differ from the ports', by the indices of their buffers.
    """

    control = False
    graph: str
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    alignments: dict[int, int]

    @classmethod
    def of(cls, message: RunGraph) -> RunKnown:
        """The record that is sent for a message."""
        graph, buffers = message.graph, message.buffers
        return cls(
            graph=graph.identity,
            slots=tuple([ref.slot for ref in buffers]),
            generations=tuple([ref.generation for ref in buffers]),
            alignments={
                place: ref.spec.alignment
                for place, (ref, port) in enumerate(zip(buffers, graph.ports, strict=True))
                if ref.spec.alignment != port.spec.alignment
            },
        )

    def message(self, graph: Graph, device: str) -> RunGraph:
        """The message, with its graph. Raises `ValueError` or `IndexError` if it is for another graph."""
        specs = [port.spec for port in graph.ports]
        for place, alignment in self.alignments.items():
            specs[place] = msgspec.structs.replace(specs[place], alignment=alignment)
        named = zip(self.slots, self.generations, specs, strict=True)
        buffers = [BufferRef(slot=slot, generation=n, spec=spec, device=device) for slot, n, spec in named]
        return RunGraph(graph=graph, buffers=tuple(buffers))


class LoopKnown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """A `RunLoop` whose body the other side has received. The other fields are the loop's and the
    message's."""

    control = False
    graph: str
    carried: Mapping[str, str]
    scanned: tuple[str, ...]
    condition: str | None
    buffers: tuple[BufferRef, ...]
    scratch: BufferRef
    turns: int

    @classmethod
    def of(cls, message: RunLoop) -> LoopKnown:
        """The record that is sent for a message."""
        loop = message.loop
        return cls(
            graph=message.graph.identity,
            carried=loop.carried,
            scanned=loop.scanned,
            condition=loop.condition,
            buffers=message.buffers,
            scratch=message.scratch,
            turns=message.turns,
        )

    def message(self, graph: Graph, _device: str) -> RunLoop:
        """The message, with its body. Raises `ValueError` if it is for another graph."""
        loop = Loop(body=graph, carried=self.carried, scanned=self.scanned, condition=self.condition)
        return RunLoop(loop=loop, buffers=self.buffers, scratch=self.scratch, turns=self.turns)


def known_form(message: Any) -> Any:
    """The record that is sent for a message which runs a graph; any other message itself."""
    if type(message) is RunGraph:
        return RunKnown.of(message)
    return LoopKnown.of(message) if type(message) is RunLoop else message


class SentGraphs:
    """The graphs that the other side keeps. This decides which are sent, and which are forgotten. One thread
    may use it.

    Parameters
    ----------
    nbytes
        The bytes of host memory, approximately, that the graphs may take there. The latest is kept, however
        large it is.
    know
        A function that sends a graph.
    flush
        A function that sends the waiting requests, which may name a graph that is to be forgotten.
    forget
        A function that has the other side forget a graph, by its identity.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        know: Callable[[Graph], None],
        flush: Callable[[], None],
        forget: Callable[[str], None],
    ) -> None:
        self.limit_bytes, self._know, self._flush, self._forget = nbytes, know, flush, forget
        self._nbytes: OrderedDict[str, int] = OrderedDict()
        """Identities → bytes, the least recently used first."""

    def knows(self, message: Any) -> bool:
        """Whether the other side has the graph of a message, or the message names none. The graph counts as
        used."""
        if type(message) not in GRAPH_RUNS:
            return True
        identity = message.graph.identity
        if identity not in self._nbytes:
            return False
        self._nbytes.move_to_end(identity)
        return True

    def send(self, graph: Graph) -> None:
        """Send a graph. If there are too many then, the least recently used ones are forgotten."""
        self._know(graph)
        self._nbytes[graph.identity] = graph.footprint
        while len(self._nbytes) > 1 and (
            len(self._nbytes) > MOST_GRAPHS or sum(self._nbytes.values()) > self.limit_bytes
        ):
            self._drop(next(iter(self._nbytes)))

    def forget(self, identities: Collection[str]) -> None:
        """Let the other side forget these graphs, if it keeps them."""
        for identity in tuple(self._nbytes):
            if identity in identities:
                self._drop(identity)

    def clear(self) -> None:
        """Note that the other side keeps nothing: it has gone."""
        self._nbytes.clear()

    def _drop(self, identity: str) -> None:
        self._flush()
        del self._nbytes[identity]  # first: it is never sent twice that a graph is to be forgotten
        self._forget(identity)


class ReceivedGraphs:
    """The graphs that this side keeps for requests that name them. One thread.

    Parameters
    ----------
    device
        The device in references to buffers.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._graphs: dict[str, Graph | MalformedMessage] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, identity: object) -> bool:
        return identity in self._graphs

    @property
    def nbytes(self) -> int:
        """The bytes, approximately, that the graphs take."""
        return sum(graph.footprint for graph in self._graphs.values() if isinstance(graph, Graph))

    def keep(self, identity: str, body: bytes) -> None:
        """Keep a graph, whose `Graph.encoded` is `body`. If it does not decode, requests for it fail."""
        try:
            self._graphs[identity] = Graph.from_encoded(body, identity)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            self._graphs[identity] = MalformedMessage(detail=str(error))

    def forget(self, identity: str) -> Graph | MalformedMessage:
        """Drop a graph, which is returned. Raises `KeyError`."""
        return self._graphs.pop(identity)

    def clear(self) -> None:
        """Drop all."""
        self._graphs.clear()

    def message(self, known: RunKnown | LoopKnown) -> RunGraph | RunLoop:
        """The message that a record stands for. Raises `MalformedMessage`."""
        graph = self._graphs.get(known.graph)
        if isinstance(graph, MalformedMessage):
            raise graph
        if graph is None:
            raise MalformedMessage(detail=f"no graph {known.graph!r} has been sent")
        try:
            return known.message(graph, self._device)
        except (ValueError, IndexError) as error:
            raise MalformedMessage(detail=str(error)) from error
