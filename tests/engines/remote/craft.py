"""A builder whose steps the test decides, in whichever process it is, and the stage on which it is told.

Builders in a child process connect to the stage's Unix socket. At each step they say "step pid" and do what
the next line tells them: a test may write lines ahead, or wait for the step first.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import inspect
import os
import select
import signal
import socket
import sys
from pathlib import Path

import msgspec
import numpy as np

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import (
    Effort,
    EngineFailure,
    PieceByPiece,
    Plan,
    ProgressCallback,
    StickyError,
    blame,
    unheard,
)
from cudnn_actor.engines.cpu.exact.compiler import compile_plan
from cudnn_actor.engines.remote.serving import BuildServer
from cudnn_actor.protocol import BufferRef, ConvFwd, ConvSpec, TensorSpec, UnsupportedGraph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.lowering import lower

from ...patience import PATIENCE_S

log = Log("cudnn_actor")
MAKE, MAKE_IN_PIECES = f"{__name__}:Craft", f"{__name__}:PieceCraft"
PIECES = b"first", b"x" * (1 << 16), b"last"


def graph(size: int = 4) -> OperationGraph:
    """A 1x1 convolution of `size` by `size` points."""
    x, w = (
        BufferRef(slot=slot, generation=1 << 32 | 1, spec=TensorSpec.packed(dims, "float32"), device="cpu")
        for slot, dims in enumerate([(1, 1, size, size), (1, 1, 1, 1)])
    )
    return lower(ConvFwd(x=x, w=w, y=x, conv=ConvSpec.symmetric(2))).graph


def maker_of(plan: Plan) -> int:
    """The process in which a plan was built."""
    return int(plan.tag.rpartition("/")[2])


def wait_for_exit(pid: int) -> None:
    """Until a process, of ours or not, has ended. Blocks."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], PATIENCE_S)[0], f"process {pid} is still there"
    finally:
        os.close(pidfd)


def _server_at_work() -> BuildServer:
    """The server that has called us. It is frozen, so the garbage collector does not list it."""
    callers = (frame.frame.f_locals.get("self") for frame in inspect.stack(0))
    return next(each for each in callers if isinstance(each, BuildServer))


class Exported(msgspec.Struct):
    """A plan as bytes: what it was made from, and where."""

    graph: OperationGraph
    maker: int


class Craft:
    """A `Builder` of CPU plans. On no stage, it does what it is asked."""

    def __init__(self, address: str = "", fingerprint: str = "a test's") -> None:
        self.fingerprint = ""
        self.is_open = False
        self._says = fingerprint
        self._lines: socket.SocketIO | None = None
        self._export = "go"
        self._made: dict[int, Exported] = {}
        if address:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(address)
            self._lines = connection.makefile("rwb", buffering=0)

    def expect_builds(self) -> None:
        """Nothing to get ready."""

    def open(self) -> None:
        self._step("open")
        self.fingerprint = self._says
        self.is_open = True

    def interrupt(self) -> None:
        """Nothing here waits for another process."""

    def close(self) -> None:
        self.is_open = False
        self._tell("close")

    def build(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback = unheard,
        effort: Effort = "best",
    ) -> Plan:
        progress(0, 0, "the only plan")
        self._step("build")
        return self._plan(graph, workspace_limit, os.getpid())

    def tune(self, graph: OperationGraph, *, workspace_limit: int | None, progress: ProgressCallback) -> Plan:
        for done in range(3):
            progress(done, 3, f"candidate {done}")
            self._step("tune")
        return self._plan(graph, workspace_limit, os.getpid())

    def export(self, plan: Plan) -> bytes | None:
        match self._export:
            case "alien":
                return b"alien"
            case "mute":
                return None
            case "unexportable":
                raise EngineFailure("NOT_SERIALISED", "the test's plan is not")
        return msgspec.msgpack.encode(self._made[id(plan)])

    def restore(self, graph: OperationGraph, data: bytes) -> Plan:
        try:
            exported = msgspec.msgpack.decode(data, type=Exported)
        except msgspec.DecodeError as error:
            raise EngineFailure("BAD_PLAN", str(error)) from error
        return self._plan(graph, None, exported.maker)

    def _plan(self, graph: OperationGraph, limit: int | None, maker: int) -> Plan:
        made = compile_plan(graph, limit)
        plan = dataclasses.replace(made, tag=f"{made.tag}/{maker}")
        self._made[id(plan)] = Exported(graph, maker)
        return plan

    def _tell(self, step: str) -> None:
        if self._lines is not None:
            with contextlib.suppress(OSError):
                self._lines.write(f"{step} {os.getpid()}\n".encode())

    def _step(self, step: str) -> None:
        self._export = "go"
        if self._lines is None:
            return
        self._tell(step)
        command, *operands = self._lines.readline().decode().split()
        if command == "log":
            log.warning("craft.said", step=step, what=np.float32(1.5))
            return
        self._obey(command, operands)

    def _obey(self, command: str, operands: list[str]) -> None:  # noqa: C901, PLR0912 - one line per command
        match command:
            case "go":
                pass
            case "alien" | "mute" | "unexportable":
                self._export = command
            case "unsupported":
                raise UnsupportedGraph(
                    engine="craft", digest="d" * 64, detail="not here", reproduce="token", operations=(0,)
                )
            case "failure":
                raise EngineFailure("CRAFT_FAILED", "as told", (0,))
            case "sticky":
                raise StickyError("CRAFT_DEAD", "as told")
            case "memory":
                full = MemoryError("the device has no room")
                blame(full, (0,))
                raise full
            case "bug":
                raise ZeroDivisionError("of the library's own")
            case "chatter":
                sys.stderr.write("chatter " * (1 << 17))
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fault":
                ctypes.string_at(0)
            case "leave":
                os.write(2, b"the library is upset\n")
                os._exit(3)
            case "utter":
                server = _server_at_work()
                assert server.at_work_for is not None
                os.write(server.at_work_for.fileno(), bytes.fromhex(operands[0]))
                signal.pause()
            case "look":
                found = any(each is self for each in gc.get_objects())
                raise EngineFailure("LOOKED", "garbage collections see it" if found else "they do not")
            case "stick":
                ctypes.PyDLL(None).pause()  # which does not let go of the interpreter's lock
            case _:
                raise AssertionError(f"the test told {command!r}")


class PieceCraft(Craft, PieceByPiece):
    """The same for graphs of three pieces, whose plans it tells after another candidate of the first."""

    def __init__(self, *arguments: str) -> None:
        super().__init__(*arguments)
        self.loaded: list[bytes] = []
        self.held: list[bytes] = []
        """Those of `loaded` that have not been forgotten."""

    def build(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback = unheard,
        effort: Effort = "best",
    ) -> Plan:
        plan = super().build(graph, workspace_limit=workspace_limit, progress=progress, effort=effort)
        progress(1, 0, "another candidate")
        for number in range(3):
            if self.on_piece is not None:
                self.on_piece(PIECES[number])
        return plan

    def load_piece(self, data: bytes) -> None:
        self.loaded.append(data)
        self.held.append(data)

    def forget_pieces(self) -> None:
        self.held.clear()


class Player:
    """A builder in a child process, seen from the test."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        self._connection = connection
        self._lines = connection.makefile("rb")
        self.pid = 0
        """Its process id, known since it was first seen."""

    def told(self, *commands: str) -> None:
        """What to do at its next steps, one after the other."""
        self._connection.sendall("".join(f"{command}\n" for command in commands).encode())

    def at(self, step: str) -> int:
        """Its process id, once it is at that step, which must be its next. Blocks."""
        said, pid = self._lines.readline().split()
        assert said.decode() == step
        self.pid = int(pid)
        return self.pid

    def leave(self) -> None:
        self._lines.close()
        self._connection.close()


class Stage:
    """Where builders in child processes appear, in the order in which they were started."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self._players: list[Player] = []
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(self.address)
        self._door.listen()
        self._door.settimeout(PATIENCE_S)

    def enter(self, *commands: str) -> Player:
        """The next builder that appears, and what it is told. Blocks."""
        player = Player(self._door.accept()[0])
        self._players.append(player)
        player.told(*commands)
        return player

    def close(self) -> None:
        for player in self._players:
            player.leave()
        self._door.close()
