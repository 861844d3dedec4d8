"""A worker process, from its fork to its end.

It gets five or six descriptors: its end of the socket, the service's generation table (which it cannot
write), the status page that it shares with its parent, its parent's pidfd, the queue to the service's builder
process if there is one, and its end of the lifeline, which it never reads. It runs its loop on the main
thread. It ends when its parent asks for it, when its parent has gone, or when its device context has died.

Signals: it ignores Ctrl-C, which the parent handles. It also ignores SIGTERM until the parent has asked it to
end. After that, SIGTERM ends it at once.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from cudnn_actor.actors.threads import ThreadRefused
from cudnn_actor.broker.execution_state import ExecutionState
from cudnn_actor.engines.base import Engine
from cudnn_actor.engines.remote.queue import BuilderQueue
from cudnn_actor.isolation.process.child.borrowed_table import BorrowedTable
from cudnn_actor.isolation.process.child.decoders import FROM_PARENT
from cudnn_actor.isolation.process.child.heartbeat import Heartbeat, end_with
from cudnn_actor.isolation.process.child.inbox import Inbox
from cudnn_actor.isolation.process.child.log_forwarding import forward_logs
from cudnn_actor.isolation.process.child.loop import WorkerLoop
from cudnn_actor.isolation.process.child.outbox import Outbox
from cudnn_actor.isolation.process.child.stages import Stages
from cudnn_actor.isolation.process.generations import GenerationView
from cudnn_actor.isolation.process.status import StatusPage
from cudnn_actor.isolation.process.wire import (
    ArenaImported,
    ArenaMade,
    ArenaRefused,
    CreateArena,
    Dying,
    ForgetGraph,
    ForgetPlans,
    Hello,
    ImportArena,
    MapArena,
    MapStage,
    Promote,
    Ready,
    Stop,
    UnmapArena,
    UnmapStage,
)
from cudnn_actor.memory.exhaustion import exhaustion
from cudnn_actor.plan_store.store import PlanStore
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.named_functions import function_named
from cudnn_actor.processes.process_state import call_this_process
from cudnn_actor.protocol.errors import CudnnActorError

__all__ = ["NAME", "main"]

NAME = "cudnn-worker"
"""The process's name, as `ps -o comm` shows it."""


def main(descriptors: Sequence[int]) -> None:
    """Serve one parent. Returns at the end; if that was not orderly, the parent has been told the cause."""
    call_this_process(NAME)
    connection, generations, status, parent, *builders = descriptors
    channel = Channel(socket.socket(fileno=connection), FROM_PARENT)
    try:
        end_with(parent)
    except ThreadRefused as error:
        channel.send(Dying(str(error), context_dead=False, digest=None))
        return
    queue = socket.socket(fileno=builders[0]) if builders else None
    _Process(channel, generations, status, queue).run()


class _Process:
    """Assembles the parts of a worker. Used by the main thread."""

    def __init__(
        self, channel: Channel, generations: int, status: int, builders: socket.socket | None
    ) -> None:
        self._channel = channel
        early = _first_frames(channel)
        hello = early.pop(0)
        page = StatusPage.attach(status, hello.window)
        self._outbox = outbox = Outbox(channel, page)
        self._memory = memory = BorrowedTable(hello.device, GenerationView(generations))
        state = ExecutionState(
            memory=memory,
            workspace_limit=hello.workspace_limit,
            plan_store=None if hello.plan_store is None else PlanStore(hello.plan_store),
            autotune=hello.autotune,
            cache_limit=hello.cache_limit,
            plan_capacity=hello.plan_capacity,
        )
        self._messages = state.messages
        self._inbox = inbox = Inbox(
            channel, outbox, page, hello.device, hello.cache_limit, find=state.messages.once
        )
        state.generation = hello.generation
        state.builders = None if builders is None else BuilderQueue(builders, hello.journal)
        state.announce_build = lambda builds: page.note_build(time.monotonic_ns(), builds=builds)
        self._stages = Stages(lambda: self._engine)
        make = functools.partial(_make_engine, hello)
        self._loop = loop = WorkerLoop(state, make, inbox, outbox, self._stages, fails=hello.fails)
        self._generation = hello.generation
        self._stopping = False
        self._heartbeat = Heartbeat(
            page, hello.beat_s, loop.working_since, loop.builds_since, plans=loop.plan_counts
        )
        forward_logs(outbox, inbox, loop.number_in_work)
        inbox.on_frame |= {
            MapArena: self._map_arena,
            UnmapArena: self._unmap_arena,
            CreateArena: self._create_arena,
            ImportArena: self._import_arena,
            MapStage: self._map_stage,
            UnmapStage: self._unmap_stage,
            ForgetGraph: self._forget_graph,
            ForgetPlans: lambda frame: loop.forget_plans(frame.digests),
            Promote: lambda frame: setattr(state, "generation", frame.generation),
            Stop: self._stop,
        }
        inbox.put_back(early)

    def run(self) -> None:
        """Run the worker until it ends."""
        signal.signal(signal.SIGTERM, self._told_to_end)
        self._loop.run(self._say_ready)
        self._heartbeat.stop()
        self._outbox.send_lines()

    def _say_ready(self) -> None:
        """Start the heartbeat, then tell the parent that the worker is ready."""
        self._heartbeat.start()
        self._outbox.say(Ready(self._generation))

    @property
    def _engine(self) -> Engine:
        return self._loop.engine

    def _told_to_end(self, _number: int, _frame: object) -> None:
        if self._stopping:
            os._exit(0)

    def _stop(self, _frame: Stop) -> None:
        self._stopping = True
        self._loop.stop()

    def _unmap_arena(self, frame: UnmapArena) -> None:
        self._inbox.forget_places()  # first: what runs on its buffers has prepared keeps it mapped
        self._memory.forget_arena(frame.number)
        self._engine.unmap_arena(frame.number)

    def _unmap_stage(self, frame: UnmapStage) -> None:
        self._inbox.forget_places()  # first: arrays on the segment keep it mapped
        self._stages.unmap(frame.segment)

    def _forget_graph(self, frame: ForgetGraph) -> None:
        self._inbox.forget_graph(frame.identity)
        self._messages.forget((frame.identity,))

    def _map_arena(self, frame: MapArena) -> None:
        descriptor = self._channel.take_descriptor()
        try:
            self._engine.map_arena(frame.number, descriptor, frame.nbytes)
        finally:
            os.close(descriptor)

    def _create_arena(self, frame: CreateArena) -> None:
        try:
            descriptor = self._loop.create_arena(frame.number, frame.nbytes)
        except CudnnActorError as error:
            self._outbox.say(ArenaRefused(frame.number, error.to_record()))
            return
        try:
            self._outbox.say(ArenaMade(frame.number), (descriptor,))
        finally:
            os.close(descriptor)

    def _import_arena(self, frame: ImportArena) -> None:
        try:
            descriptor = self._channel.take_descriptor()
        except OSError as error:
            refusal = exhaustion(error, requested=frame.nbytes, in_use=0)
            if refusal is None:
                raise
            self._outbox.say(ArenaRefused(frame.number, refusal.to_record()))
            return
        try:
            self._loop.import_arena(frame.number, frame.nbytes, descriptor)
        except CudnnActorError as error:
            self._outbox.say(ArenaRefused(frame.number, error.to_record()))
        else:
            self._outbox.say(ArenaImported(frame.number))
        finally:
            os.close(descriptor)

    def _map_stage(self, frame: MapStage) -> None:
        try:
            descriptor = self._channel.take_descriptor()
            try:
                self._stages.map(frame.segment, descriptor, frame.nbytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            refusal = exhaustion(error, requested=frame.nbytes, in_use=0)
            if refusal is None:
                raise
            self._stages.refuse(frame.segment, refusal)


def _first_frames(channel: Channel) -> list[Any]:
    """The first frames from the parent, beginning with a `Hello`. Blocks.

    Raises `SystemExit` if the parent has gone, or has sent something else first.
    """
    frames: list[Any] = []
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while not frames:
        poll.poll()
        frames += channel.receive()
        if channel.ended:
            raise SystemExit(0)
    if not isinstance(frames[0], Hello):
        raise SystemExit(f"the first frame is not a Hello but {type(frames[0]).__name__}")
    return frames


def _make_engine(hello: Hello) -> Engine:
    engine: Engine = function_named(hello.make)(*hello.arguments)
    return engine
