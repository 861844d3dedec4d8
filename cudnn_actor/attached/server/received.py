"""Decodes the messages of one client, and keeps the graphs that they name."""

from __future__ import annotations

from typing import Any

from cudnn_actor.attached.server.asked import Known
from cudnn_actor.attached.server.failures import kind_of
from cudnn_actor.attached.server.holdings import references
from cudnn_actor.attached.server.segments import Segments
from cudnn_actor.attached.wire import (
    KEPT_BYTES,
    MOST_KEPT,
    ForgetGraph,
    ForgetMessages,
    KnowGraph,
    Reading,
    Request,
)
from cudnn_actor.isolation.known_graphs import MOST_GRAPHS, LoopKnown, ReceivedGraphs, RunKnown
from cudnn_actor.memory.least_recent import LeastRecent
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.protocol.graphs.canonical import blake
from cudnn_actor.protocol.messages.messages import COMPUTE, GraphRun

__all__ = ["Received"]

_MOST_KNOWN, _KNOWN_BYTES, _BYTES_PER_BYTE = 1024, 16 << 20, 5


class Received:
    """Decodes the messages of one client. Used on the server's loop only.

    Parameters
    ----------
    reading
        The decoder, which all clients share.
    segments
        The client's memory.
    device
        The device of the service.
    graph_bytes
        The bytes, approximately, that the client's graphs may take.
    """

    def __init__(self, reading: Reading, segments: Segments, device: str, graph_bytes: int) -> None:
        self._reading, self._segments, self._graph_bytes = reading, segments, graph_bytes
        self.graphs = ReceivedGraphs(device)
        self.known: LeastRecent[bytes, Known] = LeastRecent(most=_MOST_KNOWN, nbytes=_KNOWN_BYTES)
        """Decoded messages that run a plan, by their bytes."""
        self.kept: dict[int, Known | bytes] = {}
        """The messages that have numbers; as bytes, if they do not run a plan, or could not be decoded."""
        self._kept_bytes = 0

    def note_number(self, request: Request | int) -> None:
        """Note the number that a request gives its message. Raises `BadFrame` for a number that no message
        has, for one that comes twice, and for one too many."""
        body, number = (request, None) if isinstance(request, int) else (request.body, request.keep)
        if isinstance(body, int) and body not in self.kept:
            raise BadFrame(f"there is no message {body}")
        if number is None:
            return
        if isinstance(body, int) or number in self.kept:
            raise BadFrame(f"message {number} came twice")
        self._kept_bytes += len(body)
        if len(self.kept) >= MOST_KEPT or self._kept_bytes > KEPT_BYTES:
            raise BadFrame(f"{len(self.kept):,} messages of {self._kept_bytes:,} bytes are too many to keep")
        self.kept[number] = body

    def forget_messages(self, _: ForgetMessages | None = None) -> None:
        """Take the numbers of all messages back."""
        self.kept.clear()
        self._kept_bytes = 0

    def message(self, request: Request | int) -> Known:
        """The message of a request, whose number was noted. Raises `MalformedMessage`."""
        named = request if isinstance(request, int) else request.body
        number = named if isinstance(named, int) else request.keep  # type: ignore[union-attr]
        known = named if number is None else self.kept[number]
        if isinstance(known, Known):
            return known
        assert isinstance(known, bytes)
        found = self.decode(known)
        if number is not None and found.runs_plan:
            self.kept[number] = found
        return found

    def kind_of(self, request: Request | int) -> str:
        """The kind of the message of a request that could not be taken, for a log line."""
        named = request if isinstance(request, int) else request.body
        known = self.kept.get(named) if isinstance(named, int) else named
        return kind_of(known) if isinstance(known, bytes) else type(getattr(known, "message", None)).__name__

    def decode(self, body: bytes) -> Known:
        """The message in `body`. Raises `MalformedMessage`."""
        known = self.known.get(body)
        if known is None:
            message: Any = self._reading.message(body, self._segments.array)
            if type(message) is RunKnown or type(message) is LoopKnown:
                message = self.graphs.message(message)
            known = Known(message, references(message))
            if type(message) in COMPUTE:
                self.known.put(body, known, _BYTES_PER_BYTE * len(body))
        return known

    def know_graph(self, frame: KnowGraph) -> None:
        """Keep a graph. Raises `BadFrame` if its identity is wrong, or if too many graphs are kept already.

        Other clients share the graph by its identity, so the identity is computed here. After each graph, a
        client lets the server forget graphs that are over the limits. So the limits hold when the next graph
        comes.
        """
        graphs = self.graphs
        if frame.identity in graphs or blake(frame.body) != frame.identity:
            raise BadFrame(f"graph {frame.identity[:80]!r} has another identity, or came twice")
        if len(graphs) > MOST_GRAPHS or (len(graphs) > 1 and graphs.nbytes > self._graph_bytes):
            raise BadFrame(f"{len(graphs)} graphs of {graphs.nbytes:,} bytes are kept already")
        graphs.keep(frame.identity, frame.body)

    def forget_graph(self, frame: ForgetGraph) -> None:
        """Drop a graph, the cached messages that run it, and all numbers. Raises `BadFrame`."""
        if frame.identity not in self.graphs:
            raise BadFrame(f"there is no graph {frame.identity[:80]!r} to forget")
        self.forget_messages()
        graph = self.graphs.forget(frame.identity)
        for body, known in self.known.items():
            if isinstance(known.message, GraphRun) and known.message.graph is graph:
                self.known.pop(body)

    def clear(self) -> None:
        """Drop all graphs and messages, because the client has gone."""
        self.graphs.clear()
        self.known.clear()
        self.forget_messages()
