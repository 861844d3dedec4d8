"""Workers that stop where a test says, and do there what it says: engines with named points.

A worker passes a **point** before and after each call of its engine: it says the point's name on a socket,
and goes on when it has been answered. The test's side (`Points`) answers at once, unless the test holds that
point, or has orders for whoever comes there next (`ORDERS`): to fail, to leave, to lie to its parent.
Several workers may be at points at the same time; each is known by its process id.

The file is long because both sides of a point are here, and all that a worker or a parent can do there.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import numpy as np

from cudnn_actor import CudnnRef, CudnnService, TensorSpec, spawn, start
from cudnn_actor.actors.logs import Log
from cudnn_actor.engines import EngineChoice, WorkerEngine
from cudnn_actor.engines.base import Effort, EngineFailure, ProgressCallback, StickyError, unheard
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cpu.exact.compiler import compile_plan
from cudnn_actor.isolation.process import cores
from cudnn_actor.isolation.process.child.loop import WorkerLoop
from cudnn_actor.isolation.process.wire import (
    Answers,
    ArenaMade,
    ArenaRefused,
    Done,
    Dropped,
    FromWorker,
    Given,
    Logged,
    Promote,
    Ready,
    Refused,
)
from cudnn_actor.messages import Allocate, Fill, Ping
from cudnn_actor.options import make_options
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import encode
from cudnn_actor.processes.launching import Launcher
from cudnn_actor.protocol.errors import ErrorRecord
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.codec import encode_reply
from cudnn_actor.service import Spawning
from tests.service.worker_rigs import ExecutingEngine

from ..inside import launchers, service_behind, worker_source_of
from ..patience import PATIENCE_S
from ..plain_builder import PlainBuilder

HERE = "tests.isolation.crash_rigs"
PRELOAD = ("cudnn_actor.isolation.process.child.main", HERE)

_GO, _NOT_YET = "go", "not yet"
_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_LONGEST_WORD = 200


# The worker's side.


class Door:
    """A worker's end of the socket of a `Points`."""

    def __init__(self, directory: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(_address(directory))

    def ask(self, point: str) -> str:
        """What the test says to whoever comes here. Blocks for as long as it says nothing."""
        try:
            self._socket.send(f"{os.getpid()} {point}".encode())
            return self._socket.recv(_LONGEST_WORD).decode() or _GO
        except OSError:  # the test has ended
            return _GO

    def go_through(self, point: str) -> None:
        """Come to a point, and go on when the test says so, or do what it says."""
        order = self.ask(point)
        if order != _GO:
            ORDERS[order]()


class BarrierEngine(ExecutingEngine):
    """The CPU engine with a point before each call ("execute"), and one behind ("executed").

    Parameters
    ----------
    directory
        Of the test's `Points`.
    deaf
        Whether its worker takes no notice of SIGTERM.
    """

    def __init__(self, directory: str, deaf: bool = False) -> None:
        super().__init__()
        self.door = Door(directory)
        if deaf:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def open(self) -> None:
        with self._points("open"):
            super().open()

    def close(self) -> None:
        with self._points("close"):
            super().close()

    def create_arena(self, arena: int, nbytes: int) -> int:
        with self._points("create_arena"):
            return super().create_arena(arena, nbytes)

    def map_arena(self, arena: int, fd: int, nbytes: int) -> None:
        with self._points("map_arena"):
            super().map_arena(arena, fd, nbytes)

    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Any:
        with self._points("build"):
            return super().build(graph, workspace_limit=workspace_limit)

    def load(self, plan: Any) -> None:
        with self._points("load"):
            super().load(plan)

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        with self._points("execute"):
            super().execute(plan, buffers, scalars)

    def write(self, dst: np.ndarray, array: np.ndarray) -> None:
        with self._points("write"):
            super().write(dst, array)

    def read(self, src: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        with self._points("read"):
            return super().read(src, into)

    def copy(self, src: np.ndarray, dst: np.ndarray) -> None:
        with self._points("copy"):
            super().copy(src, dst)

    def fill(self, dst: np.ndarray, value: float) -> None:
        with self._points("fill"):
            super().fill(dst, value)

    @contextlib.contextmanager
    def _points(self, call: str) -> Iterator[None]:
        self.door.go_through(call)
        yield
        self.door.go_through(after(call))


class FillBarrierEngine(CpuEngine):
    """The CPU engine with a point before each fill alone: what comes before it runs as fast as it does."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.door = Door(directory)

    def fill(self, dst: np.ndarray, value: float) -> None:
        self.door.go_through("fill")
        super().fill(dst, value)


class LateEngine(BarrierEngine):
    """One whose work is done only when nothing is held at "finished": each fence is asked for there."""

    synchronous = False

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._void: set[int] = set()
        self._fences = 0

    def fence(self) -> Any:
        self._fences += 1
        self.door.go_through("fence")
        return self._fences

    def fetch(self, src: np.ndarray, into: np.ndarray | None = None) -> Callable[[], np.ndarray]:
        self.door.go_through("fetch")
        fetched = super().fetch(src, into)

        def late() -> np.ndarray:
            self.door.go_through("fetched")
            return fetched()

        return late

    def has_passed(self, fence: Any) -> bool:
        assert fence not in self._void, "asked again about a fence that had passed"
        word = self.door.ask("finished?")
        if word not in (_GO, _NOT_YET):
            ORDERS[word]()
        if word == _GO:
            self._void.add(fence)
        return word == _GO


class AmpleEngine(LateEngine):
    """The same on a machine with so many cores that its worker polls for requests."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        cores._MANY = 1


class ToldEngine(AmpleEngine):
    """The same with a point ("told") between the answer to an upload and the frame with it, where the worker
    also answers in staging memory."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        sending = Channel.send_encoded

        def send(channel: Channel, data: bytes | bytearray) -> None:
            self.door.go_through("told")
            sending(channel, data)

        Channel.send_encoded = send  # type: ignore[assignment,method-assign]  # in the worker


class UnstagedEngine(LateEngine):
    """The same without room to stage a download: its read waits for all before it, which has run then."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._ran = 0

    def fetch(self, src: np.ndarray, into: np.ndarray | None = None) -> None:  # type: ignore[override]
        del src, into

    def read(self, src: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        self._ran = self._fences
        return super().read(src, into)

    def has_passed(self, fence: Any) -> bool:
        return fence <= self._ran or super().has_passed(fence)


class PointedBuilder(PlainBuilder):
    """Builds plans of the CPU engine on the worker's build thread, with the points of a build."""

    def __init__(self, directory: str) -> None:
        self._door = Door(directory)

    def build(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback = unheard,
        effort: Effort = "best",
    ) -> Any:
        self._door.go_through("build")
        plan = compile_plan(graph, workspace_limit)
        self._door.go_through(after("build"))
        return plan


class LateBuildingEngine(LateEngine):
    """The same, with plans from a build thread: what waits for one is deferred, and others go past it."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._directory = directory

    def builder(self, access: object) -> Any:
        return PointedBuilder(self._directory)


def after(call: str) -> str:
    """The name of the point behind a call of the engine."""
    return f"after {call}"


def _stick() -> NoReturn:
    raise StickyError("DEAD", "the test killed the context")


def _fail() -> NoReturn:
    raise EngineFailure("BAD", "the test wants this to fail")


def _have_no_room() -> NoReturn:
    raise MemoryError("the test says that there is no room")


def _abort() -> NoReturn:
    os.kill(os.getpid(), signal.SIGABRT)
    raise AssertionError("a signal that does not kill")


def _leave() -> NoReturn:
    os._exit(3)


def _raise_odd() -> NoReturn:
    raise LookupError("an engine's own mistake")


def _log_critically() -> None:
    Log("cudnn_actor").write(logging.CRITICAL, "engine.smokes", {"where": "at the back"})


# Lies. Each ends in a wait: it is for the lie alone that such a worker is given up.


def _lie(*frames: FromWorker, descriptors: Sequence[int] = ()) -> NoReturn:
    _say(b"".join(encode(frame) for frame in frames), descriptors)


def _say(data: bytes, descriptors: Sequence[int] = ()) -> NoReturn:
    """Write to the parent behind this worker's own back, and stay."""
    channel = _channel()
    if descriptors:
        socket.send_fds(channel, [data], list(descriptors))
    else:
        channel.sendall(data)
    _stay()


def _stay() -> NoReturn:
    while True:
        signal.pause()


def _channel() -> socket.socket:
    """The socket that leads to the parent: the one stream among this process's own descriptors."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):
            if descriptor > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found = socket.socket(fileno=os.dup(descriptor))
                if found.type == socket.SOCK_STREAM:
                    found.setblocking(True)
                    return found
                found.close()
    raise AssertionError("this worker has no parent")


def _in_work() -> tuple[int, int]:
    """Number and place of the request at hand."""
    loop: Any = next(one for one in gc.get_objects() if isinstance(one, WorkerLoop))
    return loop.current.number, loop.current.place


def _drown_in_descriptors() -> NoReturn:
    channel, null = _channel(), os.open(os.devnull, os.O_RDONLY)
    line = encode(Logged(0, "cudnn_actor", "debug", "flood", {}))
    with contextlib.suppress(ConnectionError):
        for _ in range(2000):
            socket.send_fds(channel, [line], [null] * 50)
    _stay()


def _give_a_short_arena() -> NoReturn:
    short = os.memfd_create("short", os.MFD_CLOEXEC)
    os.ftruncate(short, 4096)
    _lie(ArenaMade(1), descriptors=[short])


def _say_a_stray_byte() -> None:
    """Write one byte to the parent, and go on."""
    with _channel() as channel:
        channel.sendall(b"\x07")
        channel.setblocking(False)  # as the worker's own descriptor of it


def _say_a_stray_byte_behind() -> None:
    """Write one byte to the parent behind the next frame, and go on."""
    outbox = _outbox()

    def say(*frame: Any) -> None:
        vars(outbox).pop("say")
        outbox.say(*frame)
        _say_a_stray_byte()

    outbox.say = say


def _lose_a_frame() -> None:
    """Read the next frame behind this worker's back, and go on."""
    with _channel() as channel:
        channel.recv(1 << 20)
        channel.setblocking(False)


def _lose_an_answer() -> None:
    """Forget to send the next receipt."""
    _forget_once("note_done")


def _lose_the_ready() -> None:
    """Forget to say that it is ready."""
    _forget_once("say")


def _forget_once(method: str) -> None:
    """Have the next call of a method of the outbox do nothing."""
    outbox = _outbox()
    assert callable(getattr(outbox, method))
    setattr(outbox, method, lambda *_: vars(outbox).pop(method))


def _outbox() -> Any:
    loop: Any = next(one for one in gc.get_objects() if isinstance(one, WorkerLoop))
    return loop._outbox


def _answer_twice() -> NoReturn:
    answer = Done(*_in_work(), "plan", 1, 1.0)
    _lie(Answers([answer]), Answers([answer]))


_NO_SUCH_ERROR = ErrorRecord(kind="NoSuchError", facts={})
_WRONG_FACTS = ErrorRecord(kind="ExecutionFailed", facts={"colour": "blue"})

ORDERS: dict[str, Callable[[], None]] = {
    "say noise": lambda: _say(b"\x05\x00\x00\x00\xc1oise"),
    "say too much": lambda: _say(b"\xff\xff\xff\xff" + b"x" * 100),
    "say what the parent says": lambda: _say(encode(Promote(7))),
    "answer a stranger": lambda: _lie(Answers([Done(10**6, 0, "plan", 1, 1.0)])),
    "answer a number below none": lambda: _lie(Answers([Done(-1, 0, "plan", 1, 1.0)])),
    "answer in a wrong place": lambda: _lie(
        Answers([Done(_in_work()[0], _in_work()[1] + 1, "plan", 1, 1.0)])
    ),
    "answer twice": _answer_twice,
    "give a number": lambda: _lie(Answers([Given(*_in_work(), encode_reply(7))])),
    "give noise": lambda: _lie(Answers([Given(*_in_work(), b"noise")])),
    "give a receipt": lambda: _lie(Answers([Done(*_in_work(), "plan", 1, 1.0)])),
    "refuse oddly": lambda: _lie(Answers([Refused(*_in_work(), _NO_SUCH_ERROR)])),
    "refuse with wrong facts": lambda: _lie(Answers([Refused(*_in_work(), _WRONG_FACTS)])),
    "drop": lambda: _lie(Answers([Dropped(*_in_work())])),
    "be ready again": lambda: _lie(Ready(1)),
    "be ready as another": lambda: _lie(Ready(7)),
    "make an arena unasked": lambda: _lie(ArenaMade(9)),
    "refuse an arena unasked": lambda: _lie(ArenaRefused(9, _WRONG_FACTS)),
    "make an arena of nothing": lambda: _lie(ArenaMade(1)),
    "make a short arena": _give_a_short_arena,
    "refuse an arena oddly": lambda: _lie(ArenaRefused(1, _NO_SUCH_ERROR)),
    "log badly": lambda: _lie(Logged(0, "cudnn_actor", "info", "line", {"event": "another"})),
    "drown in descriptors": _drown_in_descriptors,
    "say a stray byte": _say_a_stray_byte,
    "say a stray byte behind an answer": _say_a_stray_byte_behind,
    "lose a frame": _lose_a_frame,
    "lose an answer": _lose_an_answer,
    "lose the ready": _lose_the_ready,
    "stick": _stick,
    "fail": _fail,
    "have no room": _have_no_room,
    "leave": _leave,
    "abort": _abort,
    "raise": _raise_odd,
    "log critically": _log_critically,
}
"""What a worker can be told to do at a point."""


# The test's side.


class Stopped:
    """A worker that waits at a point."""

    def __init__(self, pid: int, point: str, connection: socket.socket) -> None:
        self.pid = pid
        self.point = point
        self._connection = connection

    def go_on(self) -> None:
        """Let it go on."""
        _answer(self._connection, _GO)

    def kill(self) -> None:
        """Have it die right here."""
        os.kill(self.pid, signal.SIGKILL)


class Points:
    """The test's side of all points of a service's workers. Close it when the service has ended.

    A thread answers. What it shares with the test is written under one lock.
    """

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="points-")
        self._changed = threading.Condition()
        self._held: dict[str, int] = {}
        self._orders: dict[str, list[str]] = {}
        self._waiting: list[Stopped] = []
        self._unseen: list[Stopped] = []
        self.passed: list[tuple[int, str]] = []
        """Who came where, in order."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(_address(self.directory))
        self._listener.listen()
        self._wake_event = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="points")
        self._thread.start()

    # What the test says.

    def hold(self, point: str, passing: int = 0) -> None:
        """From now on let nobody pass this point, but for the first `passing`."""
        with self._changed:
            self._held[point] = passing

    def let_go(self, *points: str) -> None:
        """Let everybody pass these points, from now on; all points when none is named."""
        with self._changed:
            for point in points or tuple(self._held):
                self._held.pop(point, None)
            for stopped in [one for one in self._waiting if one.point not in self._held]:
                self._waiting.remove(stopped)
                stopped.go_on()

    def order(self, point: str, *orders: str) -> None:
        """Have those who come to a point next do something there, one each."""
        with self._changed:
            self._orders.setdefault(point, []).extend(orders)

    def arrival(self, point: str) -> Stopped:
        """The next worker that is held at a point, which no earlier call has seen. Blocks."""

        def next_one() -> Stopped | None:
            return next((one for one in self._unseen if one.point == point), None)

        with self._changed:
            stopped = self._changed.wait_for(next_one, PATIENCE_S)
            assert stopped is not None, f"nobody came to {point!r}, but: {self.passed[-20:]}"
            self._unseen.remove(stopped)
            return stopped

    def visits(self, point: str) -> int:
        """How often anybody has come to a point so far."""
        with self._changed:
            return sum(name == point for _, name in self.passed)

    def wait_for_visits(self, point: str, count: int) -> None:
        """Until so many have come to a point. Blocks."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._count(point) >= count, PATIENCE_S)
        assert came, f"not {count} came to {point!r}"

    def _count(self, point: str) -> int:
        return sum(name == point for _, name in self.passed)

    def close(self) -> None:
        """Let everybody go, and end."""
        self.let_go()
        os.eventfd_write(self._wake_event, 1)
        self._thread.join()
        os.close(self._wake_event)
        self._listener.close()
        shutil.rmtree(self.directory)

    # Its thread.

    def _serve(self) -> None:
        connections: dict[int, socket.socket] = {}
        poll = select.poll()
        poll.register(self._wake_event, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        try:
            while True:
                for descriptor, _ in poll.poll():
                    if descriptor == self._wake_event:
                        return
                    if descriptor == self._listener.fileno():
                        connection, _ = self._listener.accept()
                        connections[connection.fileno()] = connection
                        poll.register(connection, select.POLLIN)
                    elif not self._hear(connections[descriptor]):
                        poll.unregister(descriptor)
                        connections.pop(descriptor).close()
        finally:
            for connection in connections.values():
                connection.close()

    def _hear(self, connection: socket.socket) -> bool:
        """Take what a worker says; whether it is still there."""
        try:
            word = connection.recv(_LONGEST_WORD).decode()
        except ConnectionError:
            word = ""
        with self._changed:
            if not word:
                self._waiting = [one for one in self._waiting if one._connection is not connection]
                return False
            pid, _, point = word.partition(" ")
            self.passed.append((int(pid), point))
            self._receive(Stopped(int(pid), point, connection))
            self._changed.notify_all()
        return True

    def _receive(self, stopped: Stopped) -> None:
        orders = self._orders.get(stopped.point)
        if orders:
            _answer(stopped._connection, orders.pop(0))
        elif stopped.point.endswith("?"):
            held = stopped.point[:-1] in self._held
            _answer(stopped._connection, _NOT_YET if held else _GO)
        elif stopped.point not in self._held:
            stopped.go_on()
        elif self._held[stopped.point] > 0:
            self._held[stopped.point] -= 1
            stopped.go_on()
        else:
            self._waiting.append(stopped)
            self._unseen.append(stopped)


class LockingEngine(CpuEngine):
    """The CPU engine, whose fills never end, and hold the interpreter's lock meanwhile."""

    def fill(self, dst: Any, value: float) -> None:
        ctypes.PyDLL(None).sleep(100_000)


def choice(engine: str, *arguments: str | bool, host_arenas: bool = True) -> EngineChoice:
    """An engine of this module for workers, by its name."""
    worker = WorkerEngine(f"{HERE}:{engine}", arguments)
    return EngineChoice("cpu", CpuEngine, True, worker=worker, preload=(HERE,), host_arenas=host_arenas)


def start_forkserver() -> None:
    """Have the forkserver of these workers ready, with the descriptors that it keeps."""
    Launcher.of_process(PRELOAD).launch(f"{HERE}:nothing", []).close()


def nothing(_descriptors: list[int]) -> None:
    """The main of a worker that ends at once."""


@asynccontextmanager
async def workers(
    engine: str = "BarrierEngine",
    *arguments: bool,
    host_arenas: bool = True,
    held: str = "",
    **options: Any,
) -> AsyncIterator[tuple[CudnnRef, Points]]:
    """A service whose workers pass points. At the end everybody may pass, and the service is closed.

    Of its first worker's followers nobody passes the point `held`.
    """
    points = Points()
    if held:
        points.hold(held, passing=1)
    try:
        service = service_of(points, engine, *arguments, host_arenas=host_arenas, **options)
        gpu = await Spawning(service)
        try:
            yield gpu, points
        finally:
            points.let_go()
            await gpu.aclose()
    finally:
        points.close()


def service_of(
    points: Points, engine: str = "BarrierEngine", *arguments: bool, host_arenas: bool = True, **options: Any
) -> CudnnService:
    """The same, not launched."""
    chosen = choice(engine, points.directory, *arguments, host_arenas=host_arenas)
    given = {"device": "cpu", "isolation": "process", **options}
    return CudnnService(make_options(given), engine=chosen)


async def sent(gpu: CudnnRef) -> None:
    """Until the worker has been sent what has been submitted: nothing waits in this process."""
    async with asyncio.timeout(PATIENCE_S):
        while len(service_behind(gpu).state.mailbox):  # noqa: ASYNC110 - there is no event: a sender takes its own turn
            await asyncio.sleep(0)


async def gone(pid: int) -> None:
    """Until a process has ended, or has been killed and is about to be reaped."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            assert await asyncio.to_thread(readable, pidfd, PATIENCE_S), f"process {pid} does not end"
        finally:
            os.close(pidfd)


def readable(descriptor: int, within_s: float) -> bool:
    """Whether there is something to read, or an end, within so many seconds. Blocks."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * within_s))


def pid_of(gpu: CudnnRef) -> int:
    """The process that serves."""
    pid = gpu.worker_pid
    assert pid is not None
    return pid


def kill(gpu: CudnnRef) -> int:
    """Kill the process that serves; which it was."""
    pid = pid_of(gpu)
    os.kill(pid, signal.SIGKILL)
    return pid


def freeze(gpu: CudnnRef) -> int:
    """Stop the process that serves, so that it begins nothing more; which it is."""
    pid = pid_of(gpu)
    os.kill(pid, signal.SIGSTOP)
    with open(f"/proc/{pid}/stat") as stat:
        while stat.read().rpartition(")")[2].split()[0] != "T":
            stat.seek(0)
    return pid


def _address(directory: str) -> str:
    return os.path.join(directory, "points")


def _answer(connection: socket.socket, word: str) -> None:
    with contextlib.suppress(OSError):  # it has died here
        connection.send(word.encode())


# Parents that meet a bad end: run in processes of their own (`python -c`), by name.


def parent_is_killed() -> None:
    """Die of SIGKILL in the middle of work."""
    service = _parent_s_service()
    asked = service.actor_ref.ask(Ping(), block=False)
    _tell(service)
    os.kill(os.getpid(), signal.SIGKILL)
    asked.get()


def parent_is_killed_with_a_copy_about() -> None:
    """Die of SIGKILL while a fork of it holds copies of its sockets."""
    service = _parent_s_service()
    copies = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another thread has closed it meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                copies.append(os.dup(int(name)))
    assert copies
    _die_behind_a_fork(service)


def _die_behind_a_fork(service: CudnnService) -> None:
    """Die of SIGKILL while a fork lives on, with whatever is open now."""
    lingering = os.fork()
    while lingering == 0:
        signal.pause()
    _tell(service, lingering)
    os.kill(os.getpid(), signal.SIGKILL)


def parent_returns() -> None:
    """Come to the end of the program with a service that serves."""
    _tell(_parent_s_service())


def parent_exits_at_once() -> None:
    """Exit without any exit handler."""
    _tell(_parent_s_service())
    os._exit(0)


def parent_never_closes() -> None:
    """End an event loop with a service on it and a request in work, and come to the end of the program."""

    async def work() -> None:
        gpu = await spawn(device="cpu", isolation="process", standby=1)
        buffer = await gpu.upload(np.ones((1, 1, 512, 512), np.float32))
        for _ in range(20):
            gpu.tell(Fill(dst=buffer, value=1.0))
        await asyncio.to_thread(_tell, service_behind(gpu))

    warnings.simplefilter("ignore", ResourceWarning)  # of the service, which is not closed
    asyncio.run(work())


def parent_loses_its_forkserver() -> None:
    """Check that nobody needs the forkserver that has died, and die of SIGKILL."""
    service = _parent_s_service()
    _lose_forkserver()
    assert service.actor_ref.ask(Ping(), timeout=PATIENCE_S) == 1
    _tell(service)
    os.kill(os.getpid(), signal.SIGKILL)


def parent_loses_its_forkserver_and_returns() -> None:
    """Come to the end of the program with workers that have outlived their forkserver."""
    service = _parent_s_service()
    _lose_forkserver()
    _tell(service)


def parent_loses_its_forkserver_in_a_library() -> None:
    """Lose it while the worker is in a library that holds the interpreter's lock, and die of SIGKILL."""
    engine = EngineChoice(
        "cpu", CpuEngine, True, worker=WorkerEngine(f"{HERE}:LockingEngine"), host_arenas=True
    )
    options = make_options({"device": "cpu", "isolation": "process", "standby": 1})
    service = CudnnService(options, engine=engine)
    service.launch()
    service.started.result()
    buffer: Any = service.actor_ref.ask(Allocate(spec=TensorSpec.packed((1, 1, 1, 1))), timeout=PATIENCE_S)
    service.actor_ref.ask(Fill(dst=buffer, value=1.0), block=False)
    assert service.worker_pid is not None
    while not _sleeps_in_a_library(service.worker_pid):
        time.sleep(0.01)
    _lose_forkserver()
    _tell(service)
    os.kill(os.getpid(), signal.SIGKILL)


def parent_adopts_its_workers() -> None:
    """Check that a process to which orphans fall, as to process 1 of a container, buries its workers."""
    assert ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    service = _parent_s_service()
    worker = service.worker_pid
    assert worker is not None
    _lose_forkserver()
    os.kill(worker, signal.SIGKILL)
    while service.actor_ref.ask(Ping(), timeout=PATIENCE_S) == 1:
        pass
    assert not os.path.exists(f"/proc/{worker}")
    _tell(service)


def parent_loses_its_forkserver_with_copies_about() -> None:
    """Die of SIGKILL while a fork holds copies of whatever this process has open, lifelines among it."""
    service = _parent_s_service()
    _lose_forkserver()
    copies = [os.dup(fd) for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and _is_open(fd)]
    assert copies
    _die_behind_a_fork(service)


def _lose_forkserver() -> None:
    """Kill it, and wait until there is another."""
    launcher = launchers()[0]
    server = launcher.pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    while launcher.pid in (None, server):
        time.sleep(0.001)


def _is_open(descriptor: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{descriptor}")


def _sleeps_in_a_library(pid: int) -> bool:
    """Whether a process's main thread is in `LockingEngine.fill`."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as wchan:
        return "nanosleep" in wchan.read()
    return False


def parent_forks_and_its_fork_exits() -> None:
    """Check that the end of a fork, exit handlers included, takes nothing from the service."""
    service = _parent_s_service()
    worker = service.worker_pid
    forked = os.fork()
    if forked == 0:
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert service.actor_ref.ask(Ping(), timeout=PATIENCE_S) == 1
    assert service.worker_pid == worker
    _tell(service)
    service.stop(PATIENCE_S)


def parent_forks_and_both_serve() -> None:
    """Check that a fork of a process with a service can have one of its own."""
    service = _parent_s_service()
    forked = os.fork()
    if forked == 0:
        own = start(device="cpu", isolation="process")
        assert own.actor_ref.ask(Ping(), timeout=PATIENCE_S) == 1
        assert own.worker_pid != service.worker_pid
        own.stop(PATIENCE_S)
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert service.actor_ref.ask(Ping(), timeout=PATIENCE_S) == 1
    _tell(service)
    service.stop(PATIENCE_S)


def _parent_s_service() -> CudnnService:
    service = start(device="cpu", isolation="process", standby=1)
    assert service.actor_ref.ask(Ping(), timeout=PATIENCE_S) == 1
    return service


def run_parent(name: str) -> None:
    """Be one of these. A mistake in it ends the process with a traceback, whatever else it has running."""
    try:
        globals()[name]()
    except Exception:  # noqa: BLE001 - it ends here
        traceback.print_exc()
        os._exit(1)


def _tell(service: CudnnService, *others: int) -> None:
    """Say which processes there are, and wait until those who watch have taken hold of all."""
    standby: Any = None
    while standby is None:  # it is started by another thread, which needs the interpreter for that
        time.sleep(0.001)
        standby = worker_source_of(service).standby
    servers = {launcher.pid for launcher in launchers()}
    pids = [*servers, service.worker_pid, standby.pid, *others]
    # A log line of another thread may be half written: it begins a line of its own, so that it is found.
    sys.stdout.write(f"\npids {' '.join(map(str, pids))}\n")
    sys.stdout.flush()
    sys.stdin.readline()
