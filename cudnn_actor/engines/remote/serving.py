"""The builder process: opens a builder, and builds for every client that connects, one request at a time.

It is forked from a forkserver (`host`). It gets the receiving end of the queue of connections, the file that
it prints to, and the pidfd of its parent, the service's process.

Requests have three turns: first builds that somebody waits for, then builds with the effort "behind", last
tuning, which takes minutes. Those of one turn are served in the order in which they are read. Between two
candidates of a later turn, all requests of earlier turns are served. No candidate of a build "behind" is
begun shortly after a build of the first turn: another one may follow, and would wait for that candidate.

A build that has begun is finished even if its client has gone, for example a worker that was killed. The plan
is then kept until another client requests it, so that the next worker gets the plan that its predecessor
requested. A tuning whose client has gone is abandoned at its next candidate.

How it ends: the kernel kills it when its parent closes its lifeline or dies (`processes.lifeline`), even
while a library holds the interpreter's lock. Between two requests it also watches the parent's pidfd. It
ignores SIGINT and SIGTERM, which Ctrl-C and init systems send to a whole process group or service: the parent
handles them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import functools
import gc
import os
import select
import signal
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from cudnn_actor.actors.diverting import Line, divert_lines
from cudnn_actor.engines.base import Builder, EngineFailure, PieceByPiece, StickyError, blamed_operations
from cudnn_actor.engines.remote.builder_messages import (
    Accepted,
    Answer,
    Began,
    Build,
    Built,
    Busy,
    Failed,
    Leaving,
    Logged,
    Open,
    Piece,
    Progress,
    Ready,
    Refused,
)
from cudnn_actor.engines.remote.queue import take_connection
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import LONGEST, BadFrame
from cudnn_actor.processes.named_functions import function_named
from cudnn_actor.processes.process_state import call_this_process
from cudnn_actor.protocol.errors import CudnnActorError

__all__ = ["LONGEST_PIECE", "NAME", "BuildServer", "main", "tell_piece"]

_REQUESTS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Open | Build)
"""Decodes what clients send. It takes a tenth of the package's import, and is needed here alone."""

NAME = "cudnn-builder"
"""The process's name, as `ps -o comm` shows it."""

_MOST_UNCLAIMED = 16
_LONGEST_PLAN = LONGEST - (4 << 10)
"""Bytes of a plan that fits into a frame."""
LONGEST_PIECE = 1 << 20
"""Bytes of a piece's plan that is sent before the whole. Others come with that alone."""


def main(descriptors: Sequence[int]) -> None:
    """Serve until the parent has gone or `renew_after` builds are done."""
    queue, output, parent = descriptors
    call_this_process(NAME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _print_to(output)
    faulthandler.enable()
    with contextlib.suppress(EOFError):
        BuildServer(socket.socket(fileno=queue), output, parent).serve()


def _print_to(output: int) -> None:
    """Redirect stdout and stderr to the end of a file, and stdin to /dev/null."""
    fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for ours, standard in ((nowhere, 0), (output, 1), (output, 2)):
        os.dup2(ours, standard)
    os.close(nowhere)


class _UnwantedError(Exception):
    """Raised inside a tuning to abandon it, because its client has gone."""


class BuildServer:
    """Serves the clients. Used by one thread only.

    Parameters
    ----------
    queue
        The receiving end of the queue of connections; non-blocking.
    output
        The file that this process prints to.
    parent
        Pidfd of the parent, the service's process.
    """

    def __init__(self, queue: socket.socket, output: int, parent: int) -> None:
        self._queue = queue
        self._output = output
        self._parent = parent
        self._itself = os.pidfd_open(os.getpid())
        self._peers: dict[int, Channel] = {}
        self._requests: deque[tuple[Channel, Open | Build]] = deque()
        self._unclaimed: OrderedDict[str, Built] = OrderedDict()
        """Plans that were built for clients that have gone, by `_key` of the request."""
        self._opened: Open | None = None
        self._builder: Builder | None = None
        self.at_work_for: Channel | None = None
        self._asked = 0
        self._quiet_at = 0.0
        """When candidates of builds "behind" may be begun, in `time.monotonic()` seconds."""
        self._poll = select.poll()
        self._poll.register(queue, select.POLLIN)
        self._poll.register(parent, select.POLLIN)

    def serve(self) -> None:
        """See the module's docstring. Raises `EOFError` when the parent has gone."""
        divert_lines(self._log)
        while not self._has_done_its_share:
            self._look(None)
            while self._requests and not self._has_done_its_share:
                self._do_before(_LAST)
                if self._requests:
                    self._do(*self._requests.popleft())
                self._look(0)
        for peer in self._peers.values():
            self._say(peer, Leaving())
        if self._builder is not None:
            self._builder.close()

    @property
    def _has_done_its_share(self) -> bool:
        return self._opened is not None and self._asked >= self._opened.renew_after

    def _look(self, timeout_ms: float | None) -> None:
        """Read connections, requests and hang-ups. Blocks up to `timeout_ms`; None: until there is one."""
        for fd, _ in self._poll.poll(timeout_ms):
            if fd == self._parent:
                raise EOFError
            if fd == self._queue.fileno():
                self._accept()
            elif (peer := self._peers.get(fd)) is not None:
                self._hear(fd, peer)

    def _accept(self) -> None:
        while (connection := take_connection(self._queue)) is not None:
            peer = Channel(connection, _REQUESTS)
            self._peers[peer.fileno()] = peer
            self._poll.register(peer.fileno(), select.POLLIN)
            peer.send(Accepted(os.getpid()), (self._itself, self._output))

    def _hear(self, fd: int, peer: Channel) -> None:
        try:
            self._requests += [(peer, request) for request in peer.receive()]
        except BadFrame:
            peer.ended = True
        if peer.ended:
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._peers.pop(fd).close()

    def _do(self, peer: Channel, request: Open | Build) -> None:
        if isinstance(request, Open):
            self._open(peer, request)
        elif self._builder is not None and not peer.ended:  # else the client has gone
            self._answer(peer, request, self._builder)

    def _do_before(self, turn: int, aside: Channel | None = None) -> bool:
        """Do what is of an earlier turn, in the order of turns. Returns whether there was anything.

        Then, if what comes next is a build "behind", wait until its candidates may be begun. `aside`: whose
        request has begun and waits meanwhile. It is not to blame if the process dies.
        """
        done = False
        while True:
            first = min(self._requests, key=lambda each: _turn(each[1]), default=None)
            comes = turn if first is None else min(turn, _turn(first[1]))
            if comes == _BEHIND and (left_s := self._quiet_at - time.monotonic()) > 0.0:
                self._look(left_s * 1e3)
            elif first is None or _turn(first[1]) >= turn:
                return done
            else:
                if aside is not None:
                    self._say(aside, Busy())
                self._requests.remove(first)
                self._do(*first)
                done = True

    def _open(self, peer: Channel, request: Open) -> None:
        """Open the builder on the first request. An exception is printed and ends the process."""
        if self._builder is None:
            self.at_work_for = peer
            builder: Builder = function_named(request.make)(*request.arguments)
            builder.open()
            # So no full collection, in the midst of a build, looks through what libraries keep.
            gc.freeze()
            self._builder, self._opened = builder, request
        if request == self._opened:
            self._say(peer, Ready(self._builder.fingerprint))
        elif not peer.ended:
            self._drop(peer.fileno())

    def _answer(self, peer: Channel, request: Build, builder: Builder) -> None:
        wanted = _key(request)
        if self._has_gone(peer):
            return
        unclaimed = self._unclaimed.pop(wanted, None)
        if unclaimed is not None:
            self._say(peer, unclaimed)
            return
        os.ftruncate(self._output, 0)  # what is printed from here on belongs to this request
        self.at_work_for = peer
        self._asked += 1
        self._say(peer, Began())
        answer = self._build_answer(peer, request, builder)
        if not _turn(request) and self._opened is not None:
            self._quiet_at = time.monotonic() + self._opened.quiet_s
        if not self._has_gone(peer):
            self._say(peer, answer)
        elif isinstance(answer, Built) and answer.data is not None:
            self._unclaimed[wanted] = answer
            if len(self._unclaimed) > _MOST_UNCLAIMED:
                self._unclaimed.popitem(last=False)

    def _build_answer(self, peer: Channel, request: Build, builder: Builder) -> Answer:
        try:
            return Built(self._export(peer, request, builder))
        except CudnnActorError as error:
            return Refused(error.to_record())
        except EngineFailure as error:
            kind: Any = "sticky" if isinstance(error, StickyError) else "failure"
            return Failed(kind, error.status, error.detail, error.operations)
        except MemoryError as error:
            return Failed("memory", "OUT_OF_MEMORY", str(error), blamed_operations(error))
        except Exception as error:  # noqa: BLE001 - the client gets the error, as if it had built the plan
            return Failed("failure", type(error).__name__, str(error), blamed_operations(error))

    def _export(self, peer: Channel, request: Build, builder: Builder) -> bytes | None:
        def progress(done: int, of: int, what: str) -> None:
            self._asked += request.tunes
            self._say(peer, Progress(done, of, what))
            self._look(0)
            for other in [one for one in self._peers.values() if one is not peer]:
                if not other.backed_up:  # it need not read before its own next request
                    other.send(Busy())
            if request.tunes and self._has_gone(peer):
                raise _UnwantedError
            if _turn(request):
                resumed = self._do_before(_turn(request), aside=peer)
                self.at_work_for = peer
                if resumed:
                    self._say(peer, Began())

        graph, limit = request.graph, request.workspace_limit
        with self._telling_pieces(peer, request, builder):
            if request.tunes:
                plan = builder.tune(graph, workspace_limit=limit, progress=progress)
            else:
                plan = builder.build(graph, workspace_limit=limit, progress=progress, effort=request.effort)
        try:
            data = builder.export(plan)
        except StickyError:
            raise
        except EngineFailure:  # the plan cannot be exported: the client builds its own
            return None
        return data if data is not None and len(data) <= _LONGEST_PLAN else None  # likewise

    @contextlib.contextmanager
    def _telling_pieces(self, peer: Channel, request: Build, builder: Builder) -> Iterator[None]:
        """Send the plans of pieces to a peer that waits for the whole, during the `with` block.

        In the midst of a later turn's build, one of an earlier turn may begin and end: so they nest.
        """
        if not isinstance(builder, PieceByPiece):
            yield
            return
        before = builder.on_piece
        builder.on_piece = None if _turn(request) else functools.partial(tell_piece, peer)
        try:
            yield
        finally:
            builder.on_piece = before

    def _say(self, peer: Channel, answer: Answer) -> None:
        """Send to a peer. Blocks while its socket is full; drops the message if the peer has gone."""
        if peer.fileno() < 0:
            return
        peer.send(answer)
        peer.send_all()

    def _has_gone(self, peer: Channel) -> bool:
        """Whether the peer has closed its end."""
        if peer.ended:
            return True
        end = select.poll()
        end.register(peer.fileno(), 0)  # poll reports a hang-up whatever events are requested
        return bool(end.poll(0))

    def _log(self, line: Line) -> None:
        if self.at_work_for is not None:
            self._say(self.at_work_for, Logged(line))


def tell_piece(peer: Channel, data: bytes) -> None:
    """Send a piece's plan to a peer, unless it is behind or has gone: what it misses comes with the whole."""
    if len(data) <= LONGEST_PIECE and not peer.backed_up and peer.fileno() >= 0:
        peer.send(Piece(data))


_BEHIND, _LAST = 1, 2
"""The turn of builds "behind", and of tuning."""


def _turn(request: Open | Build) -> int:
    """The turn of a request: those of a lower turn are served first."""
    if isinstance(request, Open):
        return 0
    return _LAST if request.tunes else _BEHIND if request.effort == "behind" else 0


def _key(request: Build) -> str:
    """Identifies equal requests, whichever client sends them."""
    return f"{request.tunes} {request.effort} {request.graph.digest()} {request.workspace_limit}"
