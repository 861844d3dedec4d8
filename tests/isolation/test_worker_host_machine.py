"""Random lives of a host: messages, crashes at any moment, and what must hold whatever happens.

The file is long because a state machine is one class: each rule has a method here.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cudnn_actor.actors import Envelope
from cudnn_actor.broker.recovery import QUARANTINED_AT
from cudnn_actor.isolation.process.parent.crash import PendingReclaim
from cudnn_actor.isolation.process.wire import InjectFault
from cudnn_actor.protocol import (
    Allocate,
    BufferRef,
    ConvFwd,
    ConvSpec,
    Copy,
    DeadlineExceeded,
    Download,
    Drain,
    ExecutionFailed,
    Fill,
    Free,
    OutcomeUnknown,
    Ping,
    QuarantinedRequest,
    Receipt,
    TensorSpec,
    Upload,
    View,
    Warm,
)
from cudnn_actor.protocol.messages.operands import operands
from cudnn_actor.supervision import Fault, FaultPlan

from ..staging_use import segments_in_use
from ..whole import more
from .simulated import Office, Place, SimulatedWorker, Task, computed

MIB = 1 << 20
SMALL = TensorSpec.packed((1, 1, 1, 16), "float32")
LARGE = TensorSpec.packed((1, 1, 1, 20_000), "float32")  # past what a result is copied for
HUGE = TensorSpec.packed((1, 1, 1, 300_000), "float32")  # one to an arena
WEIGHT = TensorSpec.packed((1, 1, 1, 1), "float32")
CONV = ConvSpec.symmetric(2)
SCALAR, NONE = TensorSpec.packed(()), TensorSpec.packed((2, 0, 3))
SHAPES = (SMALL, SMALL, SMALL, LARGE, HUGE, WEIGHT, SCALAR, NONE)

OTHERS = (
    "drain",
    "drain",
    "ping",
    "warm",
    "view",
    "foreign",
    "forged",
    "late",
    "deadlines pass",
    "arrays go",
)

Key = tuple[int, int]
"""A buffer: its slot and generation."""

FAULTS = (
    Fault.STICKY,
    Fault.KILL,
    Fault.SLOW,
    Fault.FAIL_EXECUTION,
    Fault.OUT_OF_MEMORY,
    Fault.REJECT_BUILD,
)
SCRIPTS = st.lists(
    st.tuples(
        st.integers(6, 25),
        st.sampled_from(
            [
                Fault.STICKY,
                Fault.KILL,
                Fault.SLOW,
                Fault.FAIL_EXECUTION,
                Fault.OUT_OF_MEMORY,
                Fault.REJECT_BUILD,
            ]
        ),
        st.sampled_from([None, "Free", "Upload", "Download", "Allocate", "Drain", "ConvFwd"]),
    ).filter(lambda rule: rule[1] is not Fault.REJECT_BUILD or rule[2] in (None, "ConvFwd")),
    max_size=2,
)
PLACES = st.integers(0, 5)
Wish = tuple[type, TensorSpec, tuple[int, int], int, str]
WISHES = st.tuples(
    st.sampled_from([ConvFwd, ConvFwd, ConvFwd, Fill, Copy, Upload, Download, Download, Free]),
    st.sampled_from([SMALL, SMALL, SMALL, SMALL, LARGE, SCALAR, NONE]),
    st.tuples(PLACES, PLACES),
    st.integers(0, 250),
    st.sampled_from(["asked", "asked", "pykka", "told"]),
)
"""What to send, about which shape and buffers, with what value, and by whom."""


def first_of(values: Any) -> float | None:
    """The value of each element; None if there is no element."""
    return next(map(float, np.asarray(values).flat), None)


@dataclass
class Ghost:
    """A worker that has died, and what of it was not to be reused until it has gone for certain."""

    worker: SimulatedWorker
    pending: PendingReclaim
    writes: bool
    running: list[Task]
    places: dict[Key, Place]


@dataclass
class Told:
    """What the model knows of one message."""

    envelope: Envelope
    begun: list[SimulatedWorker] = field(default_factory=list)
    crashes: int = 0
    """How many workers died while they ran it, or before they had said or noted that it was finished."""
    injected: bool = False
    """Whether a fault befell it before it was taken up: it takes effect after what came meanwhile."""
    never: bool = False
    """Whether its caller has been promised that it never begins."""

    @property
    def message(self) -> Any:
        return self.envelope.message


def key_of(ref: BufferRef) -> Key:
    return ref.slot, ref.generation


def written_by(message: Any) -> BufferRef | None:
    match message:
        case ConvFwd(y=output) | Fill(dst=output) | Copy(dst=output) | Upload(dst=output):
            return output
    return None


def is_open(descriptor: int, inode: int) -> bool:
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def is_pure(message: Any) -> bool:
    return not (isinstance(message, ConvFwd) and message.beta)


class WorkerHostMachine(RuleBasedStateMachine):
    """One service's host, on one thread, with workers that do as they are told."""

    # The beginning.

    @initialize(
        host=st.booleans(),
        limit=st.sampled_from([None, None, 6 * MIB]),
        faults=SCRIPTS,
        notes=st.booleans(),
        ending=st.sampled_from(["finish", "finish", "stop", "give up"]),
    )
    def start(
        self,
        host: bool,
        limit: int | None,
        faults: list[tuple[int, Fault, str | None]],
        notes: bool,
        ending: str,
    ) -> None:
        plan = FaultPlan()
        for n, fault, of in faults:
            plan = plan.at(n, fault, of=of, seconds=0.0 if fault is Fault.SLOW else None)
        self.office = Office(host=host, limit=limit, faults=plan, notes=notes)
        self.ending = ending
        self.told: dict[int, Told] = {}
        self.refs: list[BufferRef] = []
        self.seen: set[int] = set()
        self.initial: dict[Key, float | None] = {}
        self.newest: dict[int, int] = {}
        self.writes: dict[Key, list[int]] = {}
        self.values: dict[int, float | None] = {}
        self.freed_by: dict[Key, int] = {}
        self.kept: list[tuple[np.ndarray, float | None, np.ndarray]] = []
        self.ghosts: list[Ghost] = []
        self.places: dict[int, dict[Key, Place]] = {}
        self.arrivals: set[tuple[int, int]] = set()
        self.withheld_for_good = False
        self.inodes: dict[int, int] = {}
        self.office.attach()
        for spec in (SMALL, SMALL, SMALL, WEIGHT, LARGE, SCALAR, NONE):
            self.send(Allocate(spec=spec, data=np.full(spec.dims, 3.0, "float32")))
        self.office.settle()
        self.look()

    # What callers do.

    def send(self, message: Any, how: str = "asked", *, late: bool = False) -> None:
        envelope = self.office.send(
            message,
            told=how == "told",
            pykka_caller=how == "pykka",
            timeout_s=0.0 if late else 1e6,
        )
        self.note(envelope)

    def note(self, envelope: Envelope) -> None:
        self.told[envelope.number] = Told(envelope)
        if (output := written_by(envelope.message)) is not None:
            self.writes.setdefault(key_of(output), []).append(envelope.number)

    def pick(self, spec: TensorSpec, place: int) -> BufferRef:
        """One of the latest buffers of a shape, be it live or not."""
        fitting = [ref for ref in self.refs if ref.spec == spec] or self.refs
        return fitting[-1 - place % len(fitting)]

    @rule(wishes=st.lists(WISHES, min_size=1, max_size=4), at_once=st.booleans())
    def send_about_buffers(self, wishes: list[Wish], at_once: bool) -> None:
        for kind, shape, places, value, how in wishes:
            one, other = (self.pick(shape, place) for place in places)
            self.send(self.message(kind, one, other, value), how)
        if at_once:
            self.turn()

    def message(self, kind: type, one: BufferRef, other: BufferRef, value: int) -> Any:
        if kind is ConvFwd:
            weight = self.pick(WEIGHT, 0)
            return ConvFwd(x=one, w=weight, y=other, conv=CONV, beta=float(value % 2))
        if kind is Fill:
            return Fill(dst=one, value=float(value))
        if kind is Copy:
            return Copy(src=one, dst=other)
        if kind is Upload:
            return Upload(dst=one, data=np.full(one.spec.dims, value, "float32"))
        return Download(src=one) if kind is Download else Free(buffer=one)

    @rule(shape=st.sampled_from(SHAPES), filled=st.booleans(), how=st.sampled_from(["asked", "pykka"]))
    def send_allocate(self, shape: TensorSpec, filled: bool, how: str) -> None:
        data = np.full(shape.dims, 5.0, "float32") if filled else None
        self.send(Allocate(spec=shape, data=data), how)

    @rule(kind=st.sampled_from(OTHERS), first=PLACES)
    def send_other(self, kind: str, first: int) -> None:
        ref = self.pick(SMALL, first)
        match kind:
            case "drain":
                self.send(Drain())
            case "ping":
                self.send(Ping())
            case "warm":
                weight = self.pick(WEIGHT, 0)
                self.send(Warm(messages=(ConvFwd(x=ref, w=weight, y=ref, conv=CONV),)))
            case "view":
                self.send(View(buffer=ref))
            case "foreign":
                stranger = BufferRef(slot=ref.slot, generation=7, spec=ref.spec, device=ref.device)
                self.send(Free(buffer=stranger))
            case "forged":
                forged = BufferRef(slot=ref.slot, generation=ref.generation, spec=HUGE, device=ref.device)
                self.send(Upload(dst=forged, data=np.zeros(HUGE.dims, "float32")))
            case "late":
                self.send(Fill(dst=ref, value=1.0), "pykka", late=True)
            case "deadlines pass":
                for number, told in self.told.items():
                    if told.envelope.reply_to is not None and number not in self.office.answers:
                        told.envelope.deadline = 0.0
            case "arrays go":
                self.kept.clear()

    @rule(place=PLACES, timed_out=st.booleans())
    def caller_goes(self, place: int, timed_out: bool) -> None:
        waiting = [
            told.envelope
            for told in self.told.values()
            if told.envelope.future is not None and not told.envelope.future.done()
        ]
        if not waiting:
            return
        envelope = waiting[-1 - place % len(waiting)]
        future = envelope.future
        assert future is not None
        if timed_out:
            envelope.expire()
            error = future.exception()
            assert isinstance(error, DeadlineExceeded)
            self.told[envelope.number].never = not error.started
            if not error.started:
                assert not self.told[envelope.number].begun, "one that ran was said not to have started"
        else:
            future.cancel()
            envelope.withdraw()

    # What the service does.

    @property
    def serving(self) -> bool:
        return self.office.host.workers.serving is not None

    def turn(self) -> None:
        self.office.turn()
        self.look()

    @precondition(lambda self: self.serving)
    @rule(begun=st.integers(0, 4), finished=st.integers(0, 4), said=st.integers(0, 4))
    def worker_works(self, begun: int, finished: int, said: int) -> None:
        if not self.goes_on(begun, finished):
            self.crash(may_still_write=False)
            return
        self.office.hear(self.office.worker.say(said))
        self.look()
        self.turn()

    def goes_on(self, begun: int, finished: int) -> bool:
        """Have the worker begin and finish so many; whether it lives through that."""
        for _ in range(begun):
            self.begin_one()
        worker = self.office.worker
        return all(worker.finish() for _ in range(min(finished, len(worker.running))))

    def begin_one(self) -> None:
        worker = self.office.worker
        task = worker.begin()
        if task is None:
            return
        told = self.told[task.number]
        told.injected |= isinstance(task.message, InjectFault)
        assert task.number not in self.office.answers, "one that had been answered was begun"
        assert not told.never, "one that was said never to begin has begun"
        if not is_pure(told.message):
            assert not told.begun, "one that is not pure was begun again"
        if not told.message.control:  # no worker dies of a question: it is asked again
            assert told.crashes < QUARANTINED_AT, "one that may have ended two workers was begun again"
        assert told.begun.count(worker) == 0 or self.office.state.faults is not None
        told.begun.append(worker)

    @precondition(lambda self: self.serving and self.office.worker.wishes)
    @rule(granted=st.sampled_from([True, True, False]))
    def worker_answers_a_wish(self, granted: bool) -> None:
        if granted:
            self.office.make_arena()
        else:
            self.office.hear(self.office.worker.refuse_arena())
        self.look()

    @precondition(lambda self: self.serving)
    @rule(
        begun=st.integers(0, 4),
        finished=st.integers(0, 2),
        unheard=st.booleans(),
        may_still_write=st.sampled_from([False, False, False, True]),
    )
    def worker_dies(self, begun: int, finished: int, unheard: bool, may_still_write: bool) -> None:
        self.turn()
        self.goes_on(begun, finished)
        if self.office.worker.wishes and unheard:
            self.office.worker.make_arena()
        self.crash(may_still_write=may_still_write)

    def crash(self, *, may_still_write: bool) -> None:
        office, worker = self.office, self.office.worker
        running = list(worker.running)
        pending = office.crash(may_still_write=may_still_write)
        again = {request.number for request in office.host.in_flight.again}
        unsaid = [task for task, _ in worker.finished if task.number not in worker.noted]
        lost = [task for task in (*running, *unsaid) if task.number not in again]
        for task in (*running, *unsaid):
            self.told[task.number].crashes += 1
        places = {key: place for task in lost for key, place in task.places.items()}
        self.ghosts.append(Ghost(worker, pending, may_still_write, running, places))
        self.withheld_for_good |= may_still_write
        self.look()

    @precondition(lambda self: not self.serving)
    @rule(standby=st.booleans())
    def the_next_worker_comes(self, standby: bool) -> None:
        host = self.office.host
        worker = host.workers.standby if standby else None
        if worker is not None:
            host.workers.standby = None
            assert isinstance(worker, SimulatedWorker)
        self.office.attach(worker)
        self.turn()

    @precondition(lambda self: self.office.host.workers.standby is None)
    @rule()
    def a_standby_is_hired(self) -> None:
        self.office.host.workers.standby = self.office.hire()

    @precondition(lambda self: any(ghost.writes for ghost in self.ghosts))
    @rule()
    def a_dying_process_still_writes(self) -> None:
        for ghost in self.ghosts:
            if ghost.writes:
                for task in ghost.running:
                    ghost.worker.scribble(task)

    @precondition(lambda self: self.ghosts)
    @rule()
    def a_dying_process_has_gone(self) -> None:
        ghost = self.ghosts.pop(0)
        self.office.host.recovery.reclaim(ghost.pending)
        self.note_death(ghost.worker)

    def note_death(self, worker: SimulatedWorker) -> None:
        self.office.workers.remove(worker)
        worker.close()

    # What comes of it.

    def look(self) -> None:
        """Take note of what has been taken up and answered, and check each answer when it comes."""
        office = self.office
        for number, envelope in office.taken.items():
            if number not in self.told:  # a buffer that nobody was left to receive is given back
                self.note(envelope)
        for number in [number for number in office.answers if number not in self.seen]:
            self.seen.add(number)
            self.check_answer(self.told[number], *office.answers[number])

    def check_answer(self, told: Told, value: Any, error: BaseException | None) -> None:
        message, number = told.message, told.envelope.number
        if told.never:
            assert error is not None, "one that was said never to begin has succeeded"
        if error is not None:
            self.check_blame(told, error)
            return
        for ref in operands(message).values():
            freed = self.freed_by.get(key_of(ref), number)
            assert freed >= number or self.told[freed].injected, "a buffer was used after its free"
        match message:
            case Allocate():
                self.take_buffer(message, value)
            case Free():
                self.freed_by[key_of(message.buffer)] = number
            case Download():
                self.check_values(value, self.value_before(key_of(message.src), number))
                self.office.answers[number] = None, None  # it lives for as long as `kept` does
            case Drain():
                earlier = [other for other in self.told if other < number]
                assert all(other in self.office.answers for other in earlier), "a drain overtook a message"
            case ConvFwd() | Fill() | Copy() | Upload():
                assert isinstance(value, Receipt)
                self.value_after(number)

    def check_blame(self, told: Told, error: BaseException) -> None:
        """Nobody pays for a crash that he cannot have caused. A plan's quarantine is all its requests'."""
        crashes = 0 if told.message.control else told.crashes
        if isinstance(error, OutcomeUnknown):
            assert crashes, "one that had finished, or had not begun, ended as if a crash had torn it"
        if isinstance(error, QuarantinedRequest) and not isinstance(told.message, ConvFwd):
            assert crashes >= QUARANTINED_AT, "one was quarantined that was not running at two crashes"

    def take_buffer(self, message: Allocate, ref: BufferRef) -> None:
        assert ref.generation > self.newest.get(ref.slot, 0), "a slot's generation went back"
        self.newest[ref.slot] = ref.generation
        self.refs.append(ref)
        self.initial[key_of(ref)] = None if message.data is None else first_of(message.data)

    def check_values(self, array: np.ndarray, expected: float | None) -> None:
        if expected is not None:
            assert np.all(array == expected), f"{expected} was to be read, and it was {array}"
        if array.base is not None:
            self.kept.append((array, expected, array.copy()))

    def value_before(self, key: Key, number: int) -> float | None:
        """What a buffer held when everything older had run, in order; None for whatever it may be."""
        earlier = [write for write in self.writes.get(key, ()) if write < number]
        for write in reversed(earlier):
            if write not in self.office.answers:
                told = self.told[write]
                gone = told.envelope.is_unawaited and not told.begun
                assert gone, "an answer came before that of what it depends on"
                told.never = True
                continue
            error = self.office.answers[write][1]
            assert not isinstance(error, OutcomeUnknown), "a buffer was read that may be half-written"
            if error is None:
                return self.value_after(write)
            if isinstance(error, ExecutionFailed):  # it says itself that its output holds no result
                return None
        return self.initial.get(key)

    def value_after(self, number: int) -> float | None:
        """What a request that has run has written."""
        if number not in self.values:
            self.values[number] = self.computed(number, self.told[number].message)
        return self.values[number]

    def computed(self, number: int, message: Any) -> float | None:
        match message:
            case Fill():
                return float(message.value)
            case Upload():
                return first_of(message.data)
            case Copy():
                return self.value_before(key_of(message.src), number)
        inputs = [self.value_before(key_of(ref), number) for ref in (message.x, message.w)]
        old = self.value_before(key_of(message.y), number) if message.beta else 0.0
        if old is None or None in inputs:
            return None
        return float(computed(np.float32(inputs[0]), np.float32(inputs[1]), np.float32(old), message.beta))

    # What holds at every moment.

    @invariant()
    def all_of_these_hold(self) -> None:
        self.no_two_buffers_share_bytes()
        self.records_are_there_for_all_in_the_air_and_for_none_that_is_torn()
        self.the_window_is_kept_and_its_places_are_unique()
        self.suspects_fly_alone()
        self.no_staging_block_has_two_users()
        self.arrays_that_were_given_out_do_not_change()
        self.arenas_keep_their_descriptors()
        self.every_worker_has_all_memory_mapped()

    def no_two_buffers_share_bytes(self) -> None:
        """Bytes of a live buffer, of an unfinished request's, and of a dying worker's, are nobody else's."""
        places: dict[Key, Place] = {}
        for ref in self.refs:
            if self.office.memory.is_live(ref):
                slot = self.office.memory.resolve(ref)
                places[key_of(ref)] = slot.arena.number, slot.offset, slot.offset + slot.nbytes
        for used in self.places_in_use():
            for key, place in used.items():
                assert places.setdefault(key, place) == place, "a buffer has moved"
        for (arena, _, end), (other, start, _) in itertools.pairwise(sorted(places.values())):
            assert arena != other or end <= start, "two buffers share bytes"
        mapped = {arena.number for arena in self.office.memory.arenas()}
        assert {arena for arena, _, _ in places.values()} <= mapped, "an arena went with bytes in use"

    def places_in_use(self) -> list[dict[Key, Place]]:
        """Of requests in flight, of those that are to be handed over again, and of ghosts."""
        table = self.office.host.in_flight
        for worker in self.office.workers:
            for task in worker.unanswered:
                self.places[task.number] = task.places
        unfinished = [*table.requests, *(request.number for request in table.again)]
        return [
            *(self.places.get(number, {}) for number in unfinished),
            *(ghost.places for ghost in self.ghosts),
        ]

    def records_are_there_for_all_in_the_air_and_for_none_that_is_torn(self) -> None:
        if self.serving:
            worker = self.office.worker
            for task in worker.unanswered:
                if task.number in self.office.host.in_flight.requests:
                    for (slot, generation), place in task.places.items():
                        assert worker.record(slot) == (generation, place)
            for slot, generation in self.torn():
                assert worker.record(slot)[0] != generation, "a torn buffer has a record"

    def torn(self) -> set[Key]:
        return {
            key_of(output)
            for number, (_, error) in self.office.answers.items()
            if isinstance(error, OutcomeUnknown)
            and (output := written_by(self.told[number].message)) is not None
        }

    def the_window_is_kept_and_its_places_are_unique(self) -> None:
        requests = self.office.host.in_flight.requests.values()
        assert len(requests) <= self.office.window
        assert len({request.place for request in requests}) == len(requests)

    def suspects_fly_alone(self) -> None:
        requests = self.office.host.in_flight.requests.values()
        assert len(requests) <= 1 or not any(request.suspect for request in requests)

    def no_staging_block_has_two_users(self) -> None:
        table = self.office.host.in_flight
        requests = [*table.requests.values(), *table.again]
        blocks = [block for request in requests for block in request.blocks]
        blocks += [block for ghost in self.ghosts for block in ghost.pending.blocks]
        blocks += self.office.host.staging.pieces
        spans = sorted((block.segment, block.offset, block.offset + block.nbytes) for block in blocks)
        for (segment, _, end), (other, start, _) in itertools.pairwise(spans):
            assert segment != other or end <= start, "two requests have one staging block"

    def arrays_that_were_given_out_do_not_change(self) -> None:
        for array, _, copied in self.kept:
            assert np.array_equal(array, copied), "a caller's result was written over"

    def arenas_keep_their_descriptors(self) -> None:
        """None is closed early: where one had been, another file would soon be."""
        office = self.office
        for arena in office.memory.arenas():
            assert os.fstat(arena.fd).st_ino == office.inodes[arena.fd]

    def every_worker_has_all_memory_mapped(self) -> None:
        host = self.office.host
        for worker in (host.workers.serving, host.workers.standby):
            if worker is not None:
                assert isinstance(worker, SimulatedWorker)
                assert set(worker.arenas) >= {arena.number for arena in self.office.memory.arenas()}
                assert worker.segments == {number for number, _, _ in host.staging.segments()}

    # The end.

    def teardown(self) -> None:
        if not hasattr(self, "office"):
            return
        office = self.office
        try:
            if self.ending == "finish":
                self.finish()
            else:
                self.stop()
        finally:
            self.kept.clear()
            office.close()
        unanswered = [told.message for number, told in self.told.items() if number not in office.answers]
        assert not unanswered, "a message has never been answered"
        for descriptor, inode in office.inodes.items():
            assert not is_open(descriptor, inode), "the descriptor of an arena was never closed"

    def finish(self) -> None:
        office = self.office
        while self.ghosts:
            self.a_dying_process_has_gone()
        self.run_to_the_end()
        live = [ref for ref in self.refs if office.memory.is_live(ref)]
        for ref in live:
            self.send(Download(src=ref))
        self.run_to_the_end()
        for ref in live:
            if office.memory.is_live(ref):  # a fault may have injected meanwhile
                self.send(Free(buffer=ref))
        self.run_to_the_end()
        self.nothing_is_held()

    def run_to_the_end(self) -> None:
        for _ in range(1000):
            if not self.serving:
                self.office.attach()
            self.office.turn()
            self.look()
            worker = self.office.worker
            while worker.queue:
                self.begin_one()
            worked = self.office.work()
            self.look()
            if worker.running:  # what ends it
                self.crash(may_still_write=False)
                self.a_dying_process_has_gone()
            elif not worked and not len(self.office.mailbox):
                return
        raise AssertionError(f"{len(self.office.mailbox)} messages wait for ever")

    def nothing_is_held(self) -> None:
        """When all is done, no bytes of arenas and staging memory are taken but by what faults withheld."""
        host, memory = self.office.host, self.office.memory
        self.kept.clear()
        host.staging.take_back()
        assert not segments_in_use(host.staging), "a staging block was never given back"
        live = any(memory.is_live(ref) for ref in self.refs)
        if not live and not self.withheld_for_good:
            memory.give_up_ready()
            assert len(memory.idle_arenas()) == len(memory.arenas()), "a buffer's bytes were never given back"

    def stop(self) -> None:
        """End with everything as it is: after a worker was asked to stop, or after the last crash."""
        host = self.office.host
        if self.serving and self.ending == "stop":
            host.workers.stopping = True
            while self.office.worker.running and self.office.worker.finish():
                pass
            self.office.hear(self.office.worker.say(self.office.window))
            self.look()
        if self.serving:
            self.crash(may_still_write=False)


WorkerHostMachine.TestCase.settings = settings(max_examples=more(60), stateful_step_count=40)
TestWorkerHostMachine = WorkerHostMachine.TestCase
