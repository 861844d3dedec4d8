"""The inbox: the frames that a worker gets from its parent.

The worker's main thread reads the socket itself, between batches, so a request costs no thread hop. The
thread waits for the socket and for an eventfd, by which other threads of the worker wake it (those that build
or restore plans, and any that logs). Frames that are not requests go to registered handlers at once.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

from cudnn_actor.broker.message_cache import CachedMessage
from cudnn_actor.isolation.known_graphs import LoopKnown, ReceivedGraphs, RunKnown
from cudnn_actor.isolation.process.child.decoders import MESSAGES
from cudnn_actor.isolation.process.child.outbox import Outbox
from cudnn_actor.isolation.process.child.task import InternalTask, KnownCopy, KnownRun, PlacedRun, WorkerTask
from cudnn_actor.isolation.process.cores import PROMPT_S
from cudnn_actor.isolation.process.status import StatusPage
from cudnn_actor.isolation.process.wire import (
    ForgetRun,
    Internal,
    KnowGraph,
    KnowRun,
    ReadStaged,
    Request,
    Requests,
    RunPlaced,
    WriteStaged,
)
from cudnn_actor.memory.least_recent import LeastRecent
from cudnn_actor.processes.channel import Channel
from cudnn_actor.protocol.errors import CudnnActorError, MalformedMessage
from cudnn_actor.protocol.messages.messages import COMPUTE, Compute, GraphRun

__all__ = ["Inbox"]

_BRIEFLY_S = 150e-6
"""Seconds for which a worker polls for the next request, in place of `PROMPT_S`, if the last request did not
come so soon, and nothing else says that another follows. The second of several in a row, which a caller sends
as soon as it has the answer to the first, then finds the worker awake."""
_MOST_KNOWN = 1024
"""How many decoded messages are cached, by their bytes."""
_RUN_BYTES, _COPY_BYTES, _BYTES_PER_BYTE = 1024, 512, 5
"""The bytes of memory, approximately, of a model's run, of a copy, and of a decoded message for each of its
encoded bytes."""
_COPIES = (ReadStaged, WriteStaged)


class Inbox:
    """Requests from the parent, in order. Used by the main thread, except `nudge`.

    Parameters
    ----------
    channel
        The worker's end of the socket.
    outbox
        The outbox, whose log lines are sent before a wait.
    page
        The status page, where tasks note that they have begun.
    device
        The device in buffer references.
    cache_limit
        Bytes of memory for decoded messages, approximately.
    find
        Lowers a message. Raises `InvalidRequest`.
    """

    def __init__(
        self,
        channel: Channel,
        outbox: Outbox,
        page: StatusPage,
        device: str,
        cache_limit: int,
        *,
        find: Callable[[Compute], CachedMessage],
    ) -> None:
        self.on_frame: dict[type, Callable[[Any], None]] = {
            Internal: self._put_internal,
            KnowGraph: self._keep_graph,
            KnowRun: self._keep_run,
            ForgetRun: self._forget_run,
        }
        """The handlers for frames that are not requests."""
        self.looks = False
        """Whether to poll for the next request before sleeping: for up to `PROMPT_S` if the last one came
        within that time or another is expected, else briefly. Waking up takes 20 to 60 us, and a core is
        slower just after a sleep."""
        self._prompt = False
        """Whether the latest wait without a timeout has ended within `PROMPT_S`."""
        self._expects = False
        """Whether another request is expected soon, because the parent has said so (by a frame without
        requests), or because the last request that runs a plan or copies values wrote values to a buffer:
        what uses them follows, a run or the next values. Its sender may have slept, and is slow then."""
        self._channel = channel
        self._outbox = outbox
        self._page = page
        self._tasks: deque[WorkerTask | InternalTask] = deque()
        self._urgent: deque[WorkerTask | InternalTask] = deque()
        self._known: LeastRecent[bytes, CachedMessage | PlacedRun | KnownCopy] = LeastRecent(
            most=_MOST_KNOWN, nbytes=cache_limit
        )
        self._graphs = ReceivedGraphs(device)
        self._find = find
        self._runs: dict[int, KnownRun | CudnnActorError] = {}
        """The runs of models' graphs, by number; for one that cannot be run, the error."""
        self._early: list[Any] = []
        self.wake_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waited_for = (channel.fileno(), self.wake_event)

    def take(self, most: int, timeout: float | None = None) -> deque[WorkerTask | InternalTask]:
        """The next requests in order, control messages first; waits up to `timeout` seconds for one.

        Raises `SystemExit` when the parent has gone, and `BadFrame` for a frame of invalid bytes.
        """
        if not (self._tasks or self._urgent or self._early):
            self._wait(timeout)
        self._read()
        urgent, tasks = self._urgent, self._tasks
        if not urgent and len(tasks) <= most:  # nearly always
            self._tasks = deque()
            return tasks
        batch = deque([urgent.popleft() for _ in range(min(most, len(urgent)))])
        batch.extend([tasks.popleft() for _ in range(min(most - len(batch), len(tasks)))])
        return batch

    def nudge(self) -> None:
        """Wake the main thread. Any thread."""
        os.eventfd_write(self.wake_event, 1)

    def put_back(self, frames: Iterable[Any]) -> None:
        """Add frames that were read before this object was made. The next `take` handles them."""
        self._early.extend(frames)

    def _wait(self, timeout: float | None) -> None:
        if self._outbox.has_lines:
            self._outbox.send_lines()
        if timeout is not None and timeout <= 0.0:
            return
        # Not poll: its timeouts are whole milliseconds, and a device is polled every few microseconds.
        if timeout is None and self.looks:
            ready = self._wait_for_input()
        else:
            ready, _, _ = select.select(self._waited_for, (), (), timeout)
        if self.wake_event in ready:
            os.eventfd_read(self.wake_event)

    def _wait_for_input(self) -> list[int]:
        """Wait until something can be read: poll at first, then sleep. Returns its descriptors."""
        ready: list[int] = []
        begin = time.monotonic()
        end = begin + (PROMPT_S if self._prompt or self._expects else _BRIEFLY_S)
        while not ready and time.monotonic() < end:
            ready, _, _ = select.select(self._waited_for, (), (), 0.0)
        if not ready:
            ready, _, _ = select.select(self._waited_for, (), ())
        self._prompt = time.monotonic() < begin + PROMPT_S
        return ready

    def _read(self) -> None:
        channel = self._channel
        channel.fetch()
        frames = channel.frames
        if self._early:
            early, self._early = self._early, []
            frames.extendleft(reversed(early))
        while frames:
            frame = frames.popleft()
            if type(frame) is Requests:
                self._expects |= not frame.requests
                for request in frame.requests:
                    self._put(request)
            else:
                self.on_frame[type(frame)](frame)
        if channel.ended:
            raise SystemExit(0)  # the parent has gone

    def _put(self, request: Request) -> None:
        known = self._known.get(request.body)
        if known is None:
            message = self._decode(request.body)
            known = self._known_of(request.body, message)
        if known is not None:
            self._expects = type(known.message) is WriteStaged
            number, place, fault = request.number, request.place, request.fault
            self._tasks.append(WorkerTask(known.message, number, place, fault, self._page, known))
            return
        task = WorkerTask(message, request.number, request.place, request.fault, self._page)
        (self._urgent if getattr(message, "control", False) else self._tasks).append(task)

    def _known_of(self, body: bytes, message: Any) -> CachedMessage | PlacedRun | KnownCopy | None:
        """The record of a message that runs a plan or copies values, which is kept for the next time that the
        same bytes come; None for other messages."""
        known: CachedMessage | PlacedRun | KnownCopy
        if type(message) is PlacedRun:
            known, nbytes = message, _RUN_BYTES
        elif type(message) in _COPIES:
            known, nbytes = KnownCopy(message), _COPY_BYTES
        elif type(message) in COMPUTE:
            try:
                known = self._find(message)
            except Exception:  # noqa: BLE001 - it is looked up, and fails, once more when it starts
                return None
            nbytes = known.nbytes
        else:
            return None
        self._known.put(body, known, nbytes + _BYTES_PER_BYTE * len(body))
        return known

    def _run_of(self, message: RunPlaced) -> PlacedRun | CudnnActorError:
        known = self._runs[message.run]
        if isinstance(known, CudnnActorError):
            return known
        reads = tuple(ref.slot for _, ref in message.copy_in)
        writes = tuple(ref.slot for _, ref in message.copy_out)
        return PlacedRun(known.cached, reads, writes, message=message)

    def _keep_run(self, frame: KnowRun) -> None:
        message = self._decode(frame.body)
        known: KnownRun | CudnnActorError
        try:
            failed = isinstance(message, CudnnActorError)
            known = message if failed else KnownRun(self._find(message), frame.copied)
        except CudnnActorError as error:
            known = error
        self._runs[frame.number] = known

    def runs_of(self, digests: Collection[str]) -> list[KnownRun]:
        """The runs of models that run graphs with these digests."""
        runs = [run for run in self._runs.values() if isinstance(run, KnownRun)]
        return [run for run in runs if run.cached.lowered.graph.digest() in digests]

    def _forget_run(self, frame: ForgetRun) -> None:
        del self._runs[frame.number]
        for body, run in self._placed_runs():
            if run.message.run == frame.number:
                self._known.pop(body)

    def forget_places(self) -> None:
        """Let runs look up their places again, because staging memory is unmapped that some of them may
        name."""
        for _, run in self._placed_runs():
            run.places = None

    def _placed_runs(self) -> list[tuple[bytes, PlacedRun]]:
        return [(body, known) for body, known in self._known.items() if isinstance(known, PlacedRun)]

    def _put_internal(self, frame: Internal) -> None:
        self._tasks.append(InternalTask(self._decode(frame.body), frame.number))

    def _keep_graph(self, frame: KnowGraph) -> None:
        self._graphs.keep(frame.identity, frame.body)

    def forget_graph(self, identity: str) -> None:
        """Drop a graph, and the cached messages that run it. Requests received earlier still run it."""
        graph = self._graphs.forget(identity)
        for body, known in self._known.items():
            if isinstance(known.message, GraphRun) and known.message.graph is graph:
                self._known.pop(body)

    def _decode(self, body: bytes) -> Any:
        """The decoded message; if it cannot be decoded, the error with which its request is refused."""
        try:
            message = MESSAGES.decode(body)
            if type(message) is RunKnown or type(message) is LoopKnown:
                message = self._graphs.message(message)
        except MalformedMessage as error:
            return error
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return MalformedMessage(detail=str(error))
        return self._run_of(message) if type(message) is RunPlaced else message
