"""The socket by which other processes use a service. It decides who may connect, and has the state that
clients share."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from cudnn_actor.actors import forks
from cudnn_actor.actors.event_loop import running_loop
from cudnn_actor.actors.logs import Log
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.attached.paths import peer_of, require_private, socket_path
from cudnn_actor.attached.server.asked import Asked
from cudnn_actor.attached.server.costs import Costs
from cudnn_actor.attached.server.fair_share import FairShare
from cudnn_actor.attached.server.lent_models import LentModels
from cudnn_actor.attached.server.nearness import Nearness
from cudnn_actor.attached.server.own_weights import OwnWeights
from cudnn_actor.attached.server.session import Session
from cudnn_actor.attached.server.shared_weights import SharedWeights
from cudnn_actor.attached.wire import (
    FROM_CLIENT,
    LONGEST,
    Attached,
    Happened,
    Lent,
    Reading,
    Refusal,
    Status,
)
from cudnn_actor.models import Model
from cudnn_actor.processes.channel import Channel
from cudnn_actor.protocol.errors import CudnnActorError, InvalidRequest
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.service.service import CudnnService

__all__ = ["ServedSocket", "serve_own_processes", "serve_socket"]

log = Log("cudnn_actor.attached")

_LOOK_S = 0.25
"""Seconds between two times at which clients are sent the metrics, if these have changed, and are checked for
incomplete frames."""
_BACKLOG = 64


@contextlib.asynccontextmanager
async def serve_socket(
    gpu: CudnnRef | CudnnService,
    path: str | os.PathLike[str] | None = None,
    *,
    clients: int = 64,
    requests: int = 1024,
    nbytes: int | None = None,
    copies: int = 256 << 20,
    models: Mapping[str, str | os.PathLike[str] | Model] | None = None,
) -> AsyncIterator[ServedSocket]:
    """Let other processes of this user use a service: `async with serve_socket(gpu) as served`.

    They attach with `cudnn_actor.connect(path)`. At the end of the body they lose the service: their requests
    raise `ServiceStopped`. The service itself goes on.

    In the body, on the same event loop, this process shares the weights of models that it loads with its
    clients, unless a model is swappable. So load the models of this process there: each weight then takes
    memory once.

    Parameters
    ----------
    gpu
        The handle of a service of this process, or the service.
    path
        The socket's path, with or without "unix:" before it. None for
        `$XDG_RUNTIME_DIR/cudnn-actor/NAME.sock`, where NAME is the service's name; without that variable,
        for `/tmp/cudnn-actor-UID/NAME.sock`. Only this user may use the socket.
    clients
        How many clients may be attached at a time.
    requests
        How many requests each client may have in flight. Further requests wait in the client.
    nbytes
        How many bytes of buffers each client may have; None for no limit except the service's.
    copies
        How many bytes of weights to be shared may wait in this process, for each client. Weights are copied
        here to check them; those over the limit are copied later.
    models
        Models by name. Each is a file, which clients load by this name (`await gpu.load(name)`), or a model
        that this process has loaded with `gpu`, which clients run (`served_model(gpu, name)`). See
        `ServedSocket.lend`.

    Raises
    ------
    InvalidRequest
        The path is too long; other users may write to its folder; the path exists, and is no socket; another
        process serves there; or another service has loaded a model.
    OSError
        The socket cannot be made.
    """
    service = gpu if isinstance(gpu, CudnnService) else gpu._service
    given = socket_path(path, service.name)
    loaded = {name: each for name, each in (models or {}).items() if isinstance(each, Model)}
    for name, model in loaded.items():
        _require_own(service, name, model)
    listening, files = await in_own_thread(_open, given, path is None, models or {})
    served = ServedSocket(
        service,
        given,
        listening,
        clients=clients,
        requests=requests,
        nbytes=nbytes,
        copies=copies,
        models=files,
        loaded=loaded,
    )
    try:
        yield served
    finally:
        await served.aclose()


@contextlib.asynccontextmanager
async def serve_own_processes(
    service: CudnnService, path: Path, *, clients: int, requests: int
) -> AsyncIterator[ServedSocket]:
    """Serve a socket, as `serve_socket` does, for other processes of the same program.

    They share no weights, and get models only by `LentModels.lend_run`.
    """
    listening, _ = await in_own_thread(_open, socket_path(path), False, {})
    served = ServedSocket(
        service,
        path,
        listening,
        clients=clients,
        requests=requests,
        nbytes=None,
        copies=0,
        models={},
        loaded={},
        weights=False,
    )
    try:
        yield served
    finally:
        await served.aclose()


class ServedSocket:
    """A service's socket. `serve_socket` and `serve_own_processes` make it.

    Parameters
    ----------
    service, path, clients, requests, nbytes, copies
        As in `serve_socket`.
    models, loaded
        The files by name, and the models of this process by name.
    listening
        The lock that decides who serves, and the listening socket. This object owns both from now on.
    weights
        Whether weights that this process uploads are shared with clients.
    """

    def __init__(
        self,
        service: CudnnService,
        path: Path,
        listening: tuple[int, socket.socket],
        *,
        clients: int,
        requests: int,
        nbytes: int | None,
        copies: int,
        models: Mapping[str, str],
        loaded: Mapping[str, Model],
        weights: bool = True,
    ) -> None:
        self.path = path
        """The socket's path."""
        self._service, self.state = service, service.state
        self.window, self._most_clients, self._nbytes = requests, clients, nbytes
        self.copies = copies
        self.mover: int | None = None
        """The process id of the client that may move buffers to other services and from them. It gets
        descriptors of this one's arenas, so it can read and write all buffers. None for none."""
        self._models = dict(models)
        self.share: FairShare[Session, Asked] = FairShare()
        self.costs = Costs()
        self.shared = SharedWeights(self.state)
        self.lent = LentModels(loaded)
        self._own_weights = OwnWeights(service, self.shared, wanted=weights)
        self.reading = Reading()
        self._sessions: set[Session] = set()
        self._pumping = self._pumps_soon = False
        self._finished = -1
        self._loop = running_loop()
        self.nearness = Nearness(self._loop, self.state.mailbox, self._sessions)
        self._lock, self._listener = listening
        forks.watch(self)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._following = self._loop.create_task(self._follow())
        self._looking = self._loop.call_later(_LOOK_S, self._look)
        log.info("socket.serving", service=service.name, path=str(path))

    def __repr__(self) -> str:
        return f"<socket of {self._service.name!r} at {self.path}: {len(self._sessions)} clients>"

    @property
    def clients(self) -> int:
        """How many clients are attached now."""
        return len(self._sessions)

    def lend(self, name: str, model: Model | None) -> None:
        """Let clients run a model of this process by a name from now on. It replaces the model that had this
        name.

        With None, no model has the name any more. Attached clients are told. Call this on the event loop that
        serves. Raises `InvalidRequest` if another service has loaded the model.
        """
        if model is None:
            self.lent.take_back(name)
        else:
            _require_own(self._service, name, model)
            self.lent.lend(name, model)
        shown = Lent(self.lent.records)
        for session in tuple(self._sessions):
            if session.name:
                session.tell(shown)

    def forget_parent(self) -> None:
        """Close the copies of the descriptors in a forked child, and leave the socket to the parent."""
        self._own_weights.end()
        self._listener.close()
        os.close(self._lock)

    # Clients.

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # the client has gone again, or waits until a descriptor is free
            if error.errno in (errno.EMFILE, errno.ENFILE):
                log.warning("client.refused", reason=str(error))
                self._loop.remove_reader(self._listener.fileno())  # `_look` adds it: else the loop would spin
            return
        channel = Channel(connection, FROM_CLIENT, longest=LONGEST)
        problem, pid = self._problem(connection)
        if problem is not None:
            log.warning("client.refused", pid=pid, reason=str(problem))
            channel.send(Refusal(problem.to_record()))
            channel.close()
            return
        session = Session(self, channel, pid, self._nbytes)
        self._sessions.add(session)
        self.share.join(session)

    def _problem(self, connection: socket.socket) -> tuple[CudnnActorError | None, int]:
        pid, uid = peer_of(connection)
        if uid != os.geteuid():
            return _refusal(f"user {uid}", "is not the user of the service", "run it as the same user"), pid
        if len(self._sessions) >= self._most_clients:
            bound = f"clients={self._most_clients}"
            return _refusal(bound, "is how many are attached already", "close one, or serve with more"), pid
        return None, pid

    def welcome(self, session: Session) -> None:
        """Send a client that has introduced itself the service's facts and its lifecycle events so far."""
        service = self._service
        session.send(
            Attached(
                service=service.name,
                device=service.device,
                isolation=service.isolation,
                worker_pid=service.worker_pid,
                window=self.window,
                nbytes=self._nbytes,
                operations=self.state.most_operations,
                graphs=self.state.cache_limit,
                models=self._models,
                loaded=self.lent.records,
            )
        )
        session.send(Status(service.health(), service.metrics()))
        for event in service.events.all:
            session.send(Happened(event, service.worker_pid))

    def forget(self, session: Session) -> None:
        """Note that a session has ended."""
        self._sessions.discard(session)

    # Requests.

    def pump(self) -> None:
        """Send the requests whose turn it is to the service."""
        if self._pumping:  # called again from the loop below, since a request was refused at once
            return
        self._pumping = True
        try:
            while (turn := self.share.take()) is not None:
                session, asked, cost_us = turn
                asked.cost_us = cost_us
                try:
                    session.hand_over(asked)
                except Exception as error:
                    log.exception("request.failed", client=session.name)
                    session.give_up(asked, error)
        finally:
            self._pumping = False

    def pump_soon(self) -> None:
        """Call `pump` in a callback of the loop, once for all answers of this iteration."""
        if not self._pumps_soon:
            self._pumps_soon = True
            self._loop.call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pumps_soon = False
        self.pump()

    # Frames to all clients.

    async def _follow(self) -> None:
        """Send all clients each lifecycle event, and end their sessions when the service ends."""
        told = len(self._service.events.all)
        seen = 0
        async for event in self._service.events.follow():
            seen += 1
            if seen > told:
                for session in tuple(self._sessions):
                    if session.name:
                        session.tell(Happened(event, self._service.worker_pid))
        self._end_sessions()

    def _look(self) -> None:
        self._looking = self._loop.call_later(_LOOK_S, self._look)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        now = time.monotonic()
        for session in tuple(self._sessions):
            session.check_patience(now)
        counters = self.state.counters
        finished = counters.finished + counters.failed
        if finished != self._finished and self._sessions:
            self._finished = finished
            status = Status(self._service.health(), self._service.metrics())
            for session in tuple(self._sessions):
                if session.name and not session.channel.backed_up:
                    session.tell(status)

    def _end_sessions(self) -> None:
        for session in tuple(self._sessions):
            session.end()

    async def aclose(self) -> None:
        """Remove the socket, and end all sessions. Idempotent."""
        if self._listener.fileno() < 0:
            return
        self._loop.remove_reader(self._listener.fileno())
        self._looking.cancel()
        self._following.cancel()
        self._listener.close()
        self._end_sessions()
        self.nearness.end()
        self._own_weights.end()
        try:
            await in_own_thread(_remove, self.path)
        finally:
            os.close(self._lock)  # last: the next server makes its socket after this
        with contextlib.suppress(asyncio.CancelledError):
            await self._following


Models = Mapping[str, str | os.PathLike[str] | Model]


def _open(path: Path, default: bool, models: Models) -> tuple[tuple[int, socket.socket], dict[str, str]]:
    """Open the lock and the socket, and check the models' files. Blocks for the file system."""
    if default:
        require_private(path.parent)
    files = {name: file for name, file in models.items() if not isinstance(file, Model)}
    return _listening(path), {name: str(Path(file).resolve()) for name, file in files.items()}


def _require_own(service: CudnnService, name: str, model: Model) -> None:
    if not model.belongs_to(service):
        raise InvalidRequest(
            field="models",
            value=name,
            problem="was loaded by another service",
            fix="load it with the one that is served",
        )


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _listening(path: Path) -> tuple[int, socket.socket]:
    """Take the lock that is held as long as the socket is served, and make the listening socket.

    The lock decides who serves: it is released when its process ends, however that ends. So a socket whose
    lock is free is a dead server's, and is replaced. Raises `InvalidRequest`, `OSError`.
    """
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _at(path, "is served by another process already") from None
        _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(listener.fileno(), 0o600)  # Linux gives the file this mode from the start
            listener.bind(os.fspath(path))
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except BaseException:
        os.close(lock)
        raise
    return lock, listener


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that has gone. Raises `InvalidRequest` for anything else."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise _at(path, "is there already, and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass
    raise _at(path, "is served by another program")


def _at(path: Path, problem: str) -> InvalidRequest:
    return InvalidRequest(field="path", value=str(path), problem=problem, fix="give another path")


def _refusal(value: str, problem: str, fix: str) -> CudnnActorError:
    return InvalidRequest(field="connect", value=value, problem=problem, fix=fix)
