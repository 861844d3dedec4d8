"""A worker without a process: it reads real frames, has real memory and a real page, and does as it is told.

Nothing happens in it by itself. A test says when it takes up a request, when it finishes one, when it says
so, and when it dies, so every order of these is one call after another on one thread. Requests finish in the
order in which they were begun, as on a stream; at the end, the one in work has left its output half-written.

What a convolution computes here is no convolution, but a function that shows which values it was given.

An `Office` is a host with all that it has around it in a service, but for threads, loops and processes.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pykka

from cudnn_actor.actors import Envelope, Mailbox
from cudnn_actor.broker.service_state import ServiceState
from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cpu.arenas import Arenas
from cudnn_actor.isolation.process.child.decoders import FROM_PARENT, MESSAGES
from cudnn_actor.isolation.process.child.stages import Stages
from cudnn_actor.isolation.process.generations import GenerationTable, GenerationView
from cudnn_actor.isolation.process.parent.crash import PendingReclaim
from cudnn_actor.isolation.process.parent.worker_host import WorkerHost
from cudnn_actor.isolation.process.status import StatusPage
from cudnn_actor.isolation.process.wire import (
    FROM_WORKER,
    Answer,
    Answers,
    ArenaImported,
    ArenaMade,
    ArenaRefused,
    CreateArena,
    Done,
    Dropped,
    ForgetGraph,
    ForgetPlans,
    ForgetRun,
    FromParent,
    FromWorker,
    Given,
    ImportArena,
    InjectFault,
    KnowGraph,
    KnowRun,
    MapArena,
    MapStage,
    ReadStaged,
    Refused,
    Requests,
    RunPlaced,
    UnmapArena,
    UnmapStage,
    WriteStaged,
)
from cudnn_actor.memory import MemoryTable
from cudnn_actor.processes.frames import LENGTH, BadFrame, encode
from cudnn_actor.protocol import BufferRef, ConvFwd, Copy, CudnnActorError, Fill, Ping, Warm
from cudnn_actor.protocol.errors import ExecutionFailed, OutOfMemory, UnsupportedGraph
from cudnn_actor.protocol.messages.codec import encode_reply
from cudnn_actor.protocol.messages.operands import operands
from cudnn_actor.supervision import Fault, FaultInjector, FaultPlan, FaultRule

__all__ = ["GARBAGE", "Office", "Place", "SimulatedWorker", "Task", "computed"]

GARBAGE = -7777.0
"""What a half-written buffer has in it; no request writes it."""
_MODULUS = 251.0

Place = tuple[int, int, int]
"""Arena, and the bytes from its start where a buffer begins and ends."""


def computed(x: Any, w: Any, y: Any, beta: float) -> Any:
    """What the simulated device makes of a convolution's inputs: small whole numbers of the same."""
    return (x * w + (beta * y if beta else 0.0) + 1.0) % _MODULUS


@dataclass(eq=False)
class Task:
    """A request as the worker has it."""

    number: int
    place: int
    message: Any
    fault: FaultRule | None
    places: dict[tuple[int, int], Place] = field(default_factory=dict)
    """Where each buffer of it lies, by slot and generation, when the request came."""


class SimulatedWorker:
    """See the module's docstring. Its maker must call `close`.

    Parameters
    ----------
    generations
        Descriptor of the parent's table.
    window
        Requests that it may have at once.
    notes
        Whether it notes on its page what it has finished, as a worker does whose device works on one request
        at a time.
    """

    def __init__(self, generations: int, window: int, *, notes: bool = False) -> None:
        self.window = window
        self._notes = notes
        self.claims = StatusPage.create(window)
        self.arenas: dict[int, int] = {}
        """Bytes of each that is mapped, by number."""
        self.wishes: deque[CreateArena] = deque()
        self.imports: deque[tuple[ImportArena, int]] = deque()
        """Arenas of other services that it is to map, with their descriptors."""
        self.runs: set[int] = set()
        """Numbers of the runs of models' graphs that it keeps."""
        self.queue: deque[Task] = deque()
        self.running: deque[Task] = deque()
        self.finished: list[tuple[Task, Answer]] = []
        """What is done and has not been said."""
        self.sent: list[Answer] = []
        """What is in the socket: it is heard, even if the worker dies."""
        self.noted: set[int] = set()
        """Numbers of the requests of which it has noted that they are finished."""
        self.ever_begun: list[Task] = []
        self.dead = False
        self._memory = Arenas()
        self._stages = Stages(CpuEngine)
        self._segments: set[int] = set()
        self._descriptors: deque[int] = deque()
        self._view = GenerationView(generations)

    def record(self, slot: int) -> tuple[int, Place]:
        """The generation that sits in a slot, and where it lies, as the parent's table says."""
        generation, arena, offset, nbytes = self._view.at(slot)
        return generation, (arena, offset, offset + nbytes)

    @property
    def segments(self) -> set[int]:
        """Numbers of the segments that are mapped."""
        return set(self._segments)

    @property
    def unanswered(self) -> list[Task]:
        """All that it has and has not said anything of."""
        return [*self.queue, *self.running, *(task for task, _ in self.finished)]

    # What the host calls.

    def send(self, frame: FromParent, descriptors: Sequence[int] = ()) -> None:
        """Take a frame, by way of its bytes."""
        assert not self.dead, "a worker that has gone was told something"
        self._take(FROM_PARENT.decode(encode(frame)[LENGTH.size :]), descriptors)

    def take_descriptor(self) -> int:
        """The descriptor that comes with the frame that the host has just been given."""
        if not self._descriptors:
            raise BadFrame("a frame came without the descriptor that belongs to it")
        return self._descriptors.popleft()

    def _take(self, frame: FromParent, descriptors: Sequence[int]) -> None:
        match frame:
            case MapArena():
                self._memory.map(frame.number, descriptors[0], frame.nbytes)
                self.arenas[frame.number] = frame.nbytes
            case UnmapArena():
                used = {place[0] for task in self.unanswered for place in task.places.values()}
                assert frame.number not in used, "an arena was unmapped under a request"
                self._memory.unmap(frame.number)
                del self.arenas[frame.number]
            case CreateArena():
                self.wishes.append(frame)
            case ImportArena():
                self.imports.append((frame, os.dup(descriptors[0])))
            case MapStage():
                self._stages.map(frame.segment, descriptors[0], frame.nbytes)
                self._segments.add(frame.segment)
            case UnmapStage():
                self._stages.unmap(frame.segment)
                self._segments.remove(frame.segment)
            case Requests():
                for request in frame.requests:
                    message = MESSAGES.decode(request.body)
                    self._put(Task(request.number, request.place, message, request.fault))
            case KnowRun():
                self.runs.add(frame.number)
            case ForgetRun():
                self.runs.remove(frame.number)
            case ForgetPlans() | KnowGraph() | ForgetGraph():
                pass  # it keeps none
            case _:
                raise AssertionError(f"{frame} is nothing that a host says")

    def _put(self, task: Task) -> None:
        others = self.unanswered
        assert len(others) < self.window, "more than the window holds"
        assert task.place not in {other.place for other in others}, "two requests in one place"
        for ref in operands(task.message).values():
            task.places[ref.slot, ref.generation] = self._place(ref)
        self.queue.append(task)

    def _place(self, ref: BufferRef) -> Place:
        generation, place = self.record(ref.slot)
        assert generation == ref.generation, "a request came whose buffer has no record"
        return place

    # What the test has it do.

    def begin(self) -> Task | None:
        """Take up the next request, control messages first; None when there is none, or it was withdrawn."""
        if not self.queue:
            return None
        task = next((task for task in self.queue if task.message.control), self.queue[0])
        self.queue.remove(task)
        if not self.claims.begin(task.place, task.number):
            self.finished.append((task, Dropped(task.number, task.place)))
            return None
        for ref in operands(task.message).values():
            place = self._place(ref)
            assert place == task.places[ref.slot, ref.generation], "a buffer moved under a request"
        self.noted.discard(task.number)  # of a fault that was done before its message came
        self.running.append(task)
        self.ever_begun.append(task)
        return task

    def finish(self) -> bool:
        """Finish the oldest that it has begun; False where that would end the worker instead."""
        task = self.running[0]
        if task.fault is not None and task.fault.fault in (Fault.STICKY, Fault.KILL, Fault.HANG):
            return False
        self.running.popleft()
        answer = self._answer(task)
        self.finished.append((task, answer))
        if type(task.message) is InjectFault and type(answer) is Given:
            self.claims.forget(task.place)
            self.noted.add(task.number)
        elif self._notes:
            self._note(task, answer)
        return True

    def _note(self, task: Task, answer: Answer) -> None:
        """Note what an `Outbox` does: an error has no room on the page, and is sent at once with all before
        it; a question is asked again."""
        match answer:
            case Done(number, place, plan, started_ns, run_us):
                self.claims.finish(place, number, plan, started_ns, run_us)
            case Given(number, place) if not task.message.control:
                self.claims.finish_otherwise(place, number)
            case Refused():
                self.sent += [said for _, said in self.finished]
                self.finished.clear()
                return
            case _:
                return
        self.noted.add(number)

    def say(self, most: int) -> Answers | None:
        """The next answers, at most so many, as the parent decodes them; None when there are none."""
        batch, self.finished = self.finished[:most], self.finished[most:]
        self.sent += [answer for _, answer in batch]
        return self.take_sent()

    def take_sent(self) -> Answers | None:
        """What is in the socket, as the parent decodes it; None when nothing is."""
        answers, self.sent = self.sent, []
        return _heard(Answers(answers)) if answers else None

    def make_arena(self) -> tuple[Any, int]:
        """Make the arena that was wished for; the answer, with its descriptor underway, and its file."""
        wish = self.wishes.popleft()
        descriptor = self._memory.create(wish.number, wish.nbytes)
        self.arenas[wish.number] = wish.nbytes
        self._descriptors.append(descriptor)
        return _heard(ArenaMade(wish.number)), os.fstat(descriptor).st_ino

    def import_arena(self) -> Any:
        """Map the arena of another service that it was given; the answer."""
        frame, descriptor = self.imports.popleft()
        try:
            self._memory.map_for_reading(frame.number, descriptor, frame.nbytes)
        except EngineFailure as error:
            refusal = ExecutionFailed(status=error.status, detail=error.detail, plan="import")
            return _heard(ArenaRefused(frame.number, refusal.to_record()))
        finally:
            os.close(descriptor)
        self.arenas[frame.number] = frame.nbytes
        return _heard(ArenaImported(frame.number))

    def refuse_arena(self) -> Any:
        """Refuse the arena that was wished for."""
        wish = self.wishes.popleft()
        error = OutOfMemory(requested=wish.nbytes, in_use=0, limit=None)
        return _heard(ArenaRefused(wish.number, error.to_record()))

    def die(self) -> None:
        """End, in the midst of writing."""
        if self.running:
            self.scribble(self.running[0])
        self.dead = True

    def scribble(self, task: Task) -> None:
        """Write half of what a request writes, wherever that may be by now."""
        match task.message:
            case ReadStaged(src=src, values=values):
                target = self._stages.array(values, src.spec)
            case ConvFwd(y=output) | Fill(dst=output) | Copy(dst=output) | WriteStaged(dst=output):
                target = self.array(task, output)
            case _:
                return
        target.reshape(-1)[: max(1, target.size // 2)] = GARBAGE

    def close(self) -> None:
        """Give up what it has mapped, and close what nobody took."""
        self.dead = True
        self._memory.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        while self.imports:
            os.close(self.imports.popleft()[1])
        for segment in tuple(self._segments):
            self._stages.unmap(segment)
        self._segments.clear()
        self._view.close()
        self.claims.close()

    # Execution.

    def _answer(self, task: Task) -> Answer:
        number, place, message = task.number, task.place, task.message
        if (error := _struck(task.fault, message)) is not None:
            return Refused(number, place, error.to_record())
        match message:
            case Ping():
                return Given(number, place, encode_reply(1))
            case Warm():
                return Given(number, place, encode_reply(len(message.messages)))
            case InjectFault():
                return Given(number, place, encode_reply(None))
        self._run(task)
        return Done(number, place, "simulated", 1, 1.0)

    def _run(self, task: Task) -> None:
        match task.message:
            case ConvFwd(x=x, w=w, y=y, beta=beta):
                output = self.array(task, y)
                output[...] = computed(self.array(task, x), self.array(task, w), output, beta)
            case Fill(dst=dst, value=value):
                self.array(task, dst)[...] = value
            case Copy(src=src, dst=dst):
                self.array(task, dst)[...] = self.array(task, src)
            case WriteStaged(dst=dst, values=values):
                self.array(task, dst)[...] = self._stages.array(values, dst.spec)
            case ReadStaged(src=src, values=values):
                self._stages.array(values, src.spec)[...] = self.array(task, src)
            case RunPlaced():
                pass  # what it would compute is not simulated
            case other:
                raise AssertionError(f"{other} is nothing that a worker is asked for")

    def array(self, task: Task, ref: BufferRef) -> np.ndarray:
        arena, offset, _ = task.places[ref.slot, ref.generation]
        return self._memory.bind(arena, offset, ref.spec)


def _struck(rule: FaultRule | None, message: Any) -> CudnnActorError | None:
    match rule and rule.fault:
        case Fault.FAIL_EXECUTION:
            return ExecutionFailed(status="INJECTED", detail="scripted", plan="simulated")
        case Fault.OUT_OF_MEMORY:
            return OutOfMemory(requested=0, in_use=0, limit=None)
        case Fault.REJECT_BUILD if isinstance(message, ConvFwd):
            return UnsupportedGraph(engine="simulated", digest="", detail="scripted")
    return None


def _heard(frame: FromWorker) -> Any:
    """A frame as the parent gets it."""
    return FROM_WORKER.decode(encode(frame)[LENGTH.size :])


class _Letter(Envelope, eq=False):
    """A message whose answer is written down, whoever gives it."""

    answered: Callable[[Envelope, Any, BaseException | None], None] | None = None

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """Give the reply, where the service itself does it at its end."""
        assert self.answered is not None
        self.answered(self, value, error)


class Office:
    """A host, its mailbox and memory, and what it has answered. Its maker must call `close`.

    Parameters
    ----------
    host
        Whether arenas are host memory.
    limit
        Bytes of arenas that may not be passed.
    window
        Requests that a worker may have at once.
    faults
        What is to befall messages.
    notes
        As of `SimulatedWorker`.
    verifies
        As of `WorkerHost`.
    slots
        The most buffers at one time.
    """

    def __init__(
        self,
        *,
        host: bool,
        limit: int | None = None,
        window: int = 4,
        faults: FaultPlan | None = None,
        notes: bool = False,
        verifies: bool = False,
        slots: int = 256,
    ) -> None:
        self.window = window
        self._notes = notes
        self.loop = asyncio.new_event_loop()
        """Whose futures callers wait for. It never runs."""
        self.generations = GenerationTable(slots)
        memory = MemoryTable("cpu", arena_bytes=2 << 20, limit=limit, mirror=self.generations)
        self.memory = memory
        self.mailbox = Mailbox(1 << 20)
        self.state = ServiceState(mailbox=self.mailbox, memory=memory, faults=FaultInjector.of(faults))
        self.host = WorkerHost(self.state, self._reply, host_arenas=host, window=window, verifies=verifies)
        self.taken: dict[int, Envelope] = {}
        """Every message that was ever taken up, by number."""
        self.answers: dict[int, tuple[Any, BaseException | None]] = {}
        self.workers: list[SimulatedWorker] = []
        """All that have not been closed."""
        self.inodes: dict[int, int] = {}
        """Descriptors of the table's arenas, and the files that they were made for."""

    # Callers.

    def send(
        self, message: Any, *, told: bool = False, pykka_caller: bool = False, timeout_s: float | None = None
    ) -> Envelope:
        """Admit a message; it is taken up at the next turn."""
        asked = not told and not pykka_caller
        envelope = _Letter(
            message,
            future=self.loop.create_future() if asked else None,
            reply_to=pykka.ThreadingFuture() if pykka_caller else None,
            timeout_s=timeout_s,
            discard=self.state.discard,
        )
        envelope.answered = self._reply
        self.mailbox.admit(envelope)
        return envelope

    def _reply(self, envelope: Envelope, value: Any, error: BaseException | None) -> None:
        assert envelope.number not in self.answers, f"{envelope.message} was answered twice"
        self.answers[envelope.number] = value, error
        if (future := envelope.future) is not None:
            kept = None if isinstance(value, np.ndarray) else value  # else the future keeps it
            envelope.deliver(kept, error)
            if not future.cancelled():
                future.exception()  # or asyncio complains that nobody has looked at it

    def answer(self, envelope: Envelope) -> Any:
        """The value of an answer, which must be there. Raises the error of one that is an error."""
        value, error = self.answers[envelope.number]
        if error is not None:
            raise error
        return value

    # The dispatcher's part.

    def turn(self) -> None:
        """Hand over, and take up, as much as the host has room for."""
        host = self.host
        if host.workers.serving is None:
            return
        host.sender.dispatch_again()
        while (room := host.room) and len(self.mailbox):
            for envelope in self.mailbox.take(room, 0.0):
                self.taken[envelope.number] = envelope
                host.start(envelope)
            host.sender.dispatch_again()
        host.sender.flush()
        host.sender.copies.make_all()

    # The monitor's.

    @property
    def worker(self) -> SimulatedWorker:
        """The one that serves."""
        worker = self.host.workers.serving
        assert isinstance(worker, SimulatedWorker)
        return worker

    def hire(self) -> SimulatedWorker:
        """A worker that has been told of all the memory there is, and serves nobody."""
        worker = SimulatedWorker(self.generations.fd, self.window, notes=self._notes)
        self.workers.append(worker)
        self.host.introduce(worker)
        return worker

    def attach(self, worker: SimulatedWorker | None = None) -> SimulatedWorker:
        """Serve with a worker; a new one unless given."""
        worker = worker or self.hire()
        self.host.workers.attach(worker)
        return worker

    def crash(self, *, may_still_write: bool = False) -> PendingReclaim:
        """Have the worker die at once; what it had sent is heard, and what it had is taken over."""
        self.hear(self.worker.take_sent())
        self.worker.die()
        return self.host.recovery.take_over_requests("it died", may_still_write=may_still_write)

    def hear(self, frame: Any) -> None:
        """Have the host take what the worker says."""
        if frame is not None:
            self.host.receive([frame])

    def make_arena(self) -> None:
        """Have the worker make the arena that it was asked for."""
        frame, inode = self.worker.make_arena()
        self.hear(frame)
        self.inodes[self.memory.arenas()[-1].fd] = inode

    def work(self) -> bool:
        """Have the worker do all that it can, and say so; whether it did anything. What kills it stays."""
        worker, worked = self.worker, False
        while worker.wishes:
            self.make_arena()
            worked = True
        while worker.queue:
            worker.begin()
            worked = True
        while worker.running and worker.finish():
            worked = True
        self.hear(worker.say(self.window))
        return worked

    def settle(self) -> None:
        """Turns and work until nothing happens any more."""
        self.turn()
        while self.work() or len(self.mailbox):
            self.turn()
            if self.worker.running:  # what would end it
                return

    def ask(self, message: Any) -> Any:
        """Send a message, have everything done, and give its answer. Raises the error that it ends in."""
        envelope = self.send(message)
        self.settle()
        return self.answer(envelope)

    def close(self) -> None:
        """End as a service does: nobody follows the last worker."""
        self.mailbox.close("the test is over")
        self.memory.close()
        self.host.recovery.retire()
        self.host.close()
        self.generations.close()
        for worker in self.workers:
            worker.close()
        self.loop.close()
