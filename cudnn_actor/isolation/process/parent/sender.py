"""The sender: encodes requests, sends them to the worker, and holds their buffers until they are complete.

It is used with the host held (`dispatcher`), so by one thread at a time. On the main thread, a signal
handler may raise an exception in it; only `flush`, `finish_sending` and what the fast path calls run there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cudnn_actor.actors import Envelope
from cudnn_actor.broker import Broker
from cudnn_actor.broker.deployments import Deployed
from cudnn_actor.isolation.known_graphs import SentGraphs
from cudnn_actor.isolation.process.parent.checksums import Checksums
from cudnn_actor.isolation.process.parent.in_flight import InFlightTable, WorkerRequest
from cudnn_actor.isolation.process.parent.late_copies import LateCopies
from cudnn_actor.isolation.process.parent.workers import Workers
from cudnn_actor.isolation.process.wire import (
    LONGEST_MESSAGE,
    ForgetGraph,
    ForgetRun,
    FromParent,
    KnowGraph,
    KnowRun,
    Request,
    Requests,
    encode_message,
)
from cudnn_actor.isolation.staging import Staging
from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.messages.messages import Compute, Explain, GraphRun

__all__ = ["BULKY_BYTES", "Sender"]

BULKY_BYTES = 64 << 10
"""A longer message gets its own frame. So a frame has room for four whole windows of the others."""


@dataclass(eq=False, repr=False)
class Sender:
    """Sends requests to the worker that serves.

    Parameters
    ----------
    broker, in_flight, workers, staging
        The host's own.
    checksums
        Checksums of uploads; None if none are kept.
    """

    broker: Broker[WorkerRequest]
    in_flight: InFlightTable
    workers: Workers
    staging: Staging
    checksums: Checksums | None
    take_back: Callable[[WorkerRequest], None] = field(init=False)
    """Takes back the staging memory of a model's run."""
    copies: LateCopies = field(default_factory=LateCopies, init=False)
    """The copies that follow requests which were dispatched."""
    _unsent: list[Request] = field(default_factory=list, init=False)
    """Requests in flight whose frame has not been made. The fast path adds to it in its step."""
    sending: Requests | None = field(default=None, init=False)
    """The frame that is being sent. It stays set if the sender is interrupted."""
    graphs: SentGraphs = field(init=False)
    """The graphs that the worker keeps."""
    _runs: set[int] = field(default_factory=set, init=False)
    """Numbers of the runs of models' graphs that the worker keeps."""

    def __post_init__(self) -> None:
        self.graphs = SentGraphs(
            self.broker.state.cache_limit,
            know=lambda graph: self._send(KnowGraph(graph.identity, graph.encoded)),
            flush=self.flush,
            forget=lambda identity: self._send(ForgetGraph(identity)),
        )

    def _send(self, frame: FromParent) -> None:
        assert self.workers.serving is not None
        self.workers.serving.send(frame)

    # Encoding.

    def prepare(self, envelope: Envelope, message: Compute) -> WorkerRequest:
        """A request that runs a plan, ready to be dispatched. Changes only caches. Raises what is wrong with
        it."""
        cached, broker = envelope.found, self.broker
        if (
            cached is None
            or cached.body is None
            or (bound := cached.bound) is None
            or bound.epoch != broker.memory.epoch
            or broker.state.quarantined
        ):
            request = broker.prepare(envelope, message)
            self.encode(request)
            return request
        # Nearly all: it was sent before, and no buffer has ended since. The rest is the same, in fewer calls.
        request = WorkerRequest(envelope, envelope.number, message, bound.slots, cached)
        request.body = cached.body
        return request

    def encode(self, request: WorkerRequest) -> None:
        """Encode a request; one that runs a plan, only the first time. Raises `InvalidRequest`."""
        cached = request.cached
        if cached is not None:
            if cached.body is None:
                if isinstance(request.request, GraphRun):
                    graph = request.request.graph
                    _check_length(len(graph.encoded), len(graph.body.operations))
                cached.body = encode_message(request.request)
            request.body = cached.body
            return
        request.body = body = encode_message(request.request)
        if type(request.request) is Explain:
            _check_length(len(body), len(request.request.graph.operations))
        elif len(body) > LONGEST_MESSAGE:
            raise InvalidRequest(
                field="messages",
                value=Words(f"{len(request.request.messages) + len(request.request.graphs):,} requests"),
                problem=f"take {len(body):,} bytes, and a worker accepts at most {LONGEST_MESSAGE:,}",
                fix="warm fewer requests at a time",
            )

    # The runs of models that the worker keeps.

    def knows_run(self, deployed: Deployed) -> bool:
        """Whether the worker has the run of a model's graph."""
        return deployed.number in self._runs

    def _make_run_known(self, deployed: Deployed) -> None:
        """Send the worker the run of a model's graph, unless it keeps it. Raises `InvalidRequest`."""
        if deployed.number in self._runs:
            return
        assert self.workers.serving is not None
        message, graph = deployed.cached.message, deployed.of.graph
        _check_length(len(graph.encoded), len(graph.body.operations))
        if not self.graphs.knows(message):
            self.graphs.send(graph)
        known = KnowRun(deployed.number, encode_message(message), tuple(deployed.copied_places))
        self.workers.serving.send(known)
        self._runs.add(deployed.number)

    def forget_run(self, deployed: Deployed) -> None:
        """Let the worker drop the run of a model's graph that has ended, if it keeps it."""
        if deployed.number in self._runs:
            assert self.workers.serving is not None
            self.flush()  # requests that name it go first
            self._runs.remove(deployed.number)
            self.workers.serving.send(ForgetRun(deployed.number))

    # Dispatching.

    def dispatch(self, request: WorkerRequest) -> None:
        """Dispatch a request to the worker, and hold its buffers until it is complete.

        If this raises `MemoryError`, the request is in flight already, or nothing of it has changed.
        """
        envelope = request.envelope
        self._make_way(request)
        if not envelope.hand_over(request):
            self.broker.expire(envelope)
            self.discharge(request, end_ref=True)
            return
        if self.checksums is not None:
            self.checksums.note_writes(request.footprint(self.broker.state.lower).writes)
        self.broker.memory.hold_all(request.slots)
        self._queue(request)

    def dispatch_alone(self, request: WorkerRequest) -> None:
        """Dispatch a new request once no other is in flight. Newer ones wait behind it."""
        if not self.in_flight.requests:
            self.dispatch(request)
            return
        self.broker.memory.hold_all(request.slots)
        self.in_flight.last(request)

    def dispatch_again(self) -> None:
        """Dispatch the requests that go first after a crash, as far as they may go now.

        If this raises `MemoryError`, the next call goes on with the same request.
        """
        while (
            self.workers.serving is not None
            and not self.workers.stopping
            and (request := self.in_flight.next_again()) is not None
        ):
            try:
                self._make_way(request)
            except MemoryError:
                self.in_flight.first((request,))
                raise
            self._dispatch_again(request)

    def _dispatch_again(self, request: WorkerRequest) -> None:
        """Dispatch a request that a worker had when it died.

        A request that had begun runs again even if no caller waits any more: its output may be half-written,
        so it must be completed or marked as torn.
        """
        envelope, broker, faults = request.envelope, self.broker, self.broker.state.faults
        if not request.suspect and (envelope.is_unawaited or request.gone):
            broker.withdraw(envelope)
            self.release(request)
        elif not request.suspect and envelope.expired:
            broker.expire(envelope)
            self.release(request)
        elif (error := broker.interrupted.why_not_again(request)) is not None:
            if request.suspect:
                error = broker.interrupted.error_of_second_run(request, error)
            self.release(request)
            broker.fail(envelope, error)
        elif not envelope.hand_over(request):
            broker.expire(envelope)
            self.release(request)
        else:
            if faults is not None and request.suspect:  # it runs again, so it counts as a message
                request.fault = faults.on_message(type(request.message).__name__)
            self._queue(request)

    def _make_way(self, request: WorkerRequest) -> None:
        """Send the frames that must precede a request. May be repeated. Raises `MemoryError`."""
        if not self.graphs.knows(request.request):
            self.graphs.send(request.request.graph)
        if request.run is not None:
            assert request.run.deployed is not None
            self._make_run_known(request.run.deployed)
        for deployed in request.warmed:
            if not deployed.ended:
                self._make_run_known(deployed)
        if len(request.body) > BULKY_BYTES:  # it gets its own frame
            self.flush()

    def _queue(self, request: WorkerRequest) -> None:
        """Put a request in flight, and add it to the next frame. `_make_way` goes first."""
        assert self.workers.serving is not None
        place = self.in_flight.hand_over(request, self.workers.serving.claims)
        self.copies.pending += request.copies
        self._unsent.append(Request(request.number, place, request.body, request.fault))
        if len(request.body) > BULKY_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the requests that were dispatched since the last call.

        If this raises `MemoryError`, the next call sends them.
        """
        if self.sending is not None:
            self.finish_sending()
        if self._unsent and (worker := self.workers.serving) is not None:
            fresh: list[Request] = []
            frame = Requests(self._unsent)
            # One step, up to the call: the requests are in the list, or in the frame that `finish_sending`
            # sends. The list is replaced and not cleared, because the frame is made of it.
            self.sending = frame
            self._unsent = fresh
            worker.send(frame)
            self.sending = None

    def finish_sending(self) -> None:
        """Complete a `flush` that was interrupted. Must be called before anything else is sent.

        If the frame is the last one that was passed to the worker's `send`, it is not queued again.
        """
        if self.sending is not None and (worker := self.workers.serving) is not None:
            worker.send(self.sending)
            self.sending = None

    def rouse_worker(self) -> None:
        """Let the worker look for a request that another thread will send soon. Whatever was interrupted
        before must be finished."""
        if (worker := self.workers.serving) is not None:
            worker.send(Requests([]))

    def forget_worker(self) -> None:
        """Drop the frames for the worker, and the records of what it knows, because it has ended, or another
        one serves."""
        self._unsent.clear()
        self.sending = None
        self.graphs.clear()
        self._runs.clear()

    # The buffers that a request holds.

    def discharge(self, request: WorkerRequest, *, end_ref: bool) -> None:
        """Give back a request's blocks. `end_ref`: also free the buffer that no caller will receive.

        A model's graph that was unloaded while the request ran is forgotten by the worker that has just been
        told of it once more, because the request ran again or had to wait.
        """
        self.copies.drop(request.copies)
        blocks, request.blocks = request.blocks, ()
        for block in blocks:
            self.staging.give_back(block)
        if request.staged is not None:
            self.take_back(request)
        if end_ref:
            self.broker.end_unreceived(request)
        if request.run is not None and request.run.deployed is not None and request.run.deployed.ended:
            self.forget_run(request.run.deployed)

    def release(self, request: WorkerRequest) -> None:
        """Release all that a request holds which is not in flight and has no result."""
        self.broker.memory.release_all(request.slots)
        self.discharge(request, end_ref=True)


def _check_length(nbytes: int, operations: int) -> None:
    if nbytes > LONGEST_MESSAGE:
        raise InvalidRequest(
            field="graph",
            value=Words(f"{operations:,} operations"),
            problem=f"takes {nbytes:,} bytes, and a worker accepts at most {LONGEST_MESSAGE:,}",
            fix="cut it into several graphs",
        )
