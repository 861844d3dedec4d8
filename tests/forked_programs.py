"""Programs of tests, each in a process of its own, without a new interpreter's second for its imports.

`run` and `Program` are what `subprocess.run` and `subprocess.Popen` are for `[sys.executable, *words]`. The
process is forked from one that has imported NumPy and this package, and has started nothing
(`program_server`). What a program may rely on, as in a new interpreter:

- it runs as `__main__`: `-m module`, `-c text` or a path, with `sys.argv`, `sys.path` and `sys.orig_argv`;
- it has one thread, the default signal handlers, and the descriptors 0, 1, 2 and `pass_fds`, at their
  numbers; its working directory and environment are those asked for, or pytest's at that moment;
- it ends as any program does: its exit status is that of `sys.exit`, of an error or of a signal, its exit
  handlers run, threads are waited for, and what it has written is flushed;
- it is in the session and process group of pytest, unless it is to have a session of its own;
- no thread, event loop, actor, service or worker process of this package has ever been in it.

What it may not rely on, so that a test of one of these takes a new interpreter:

- that modules are not imported yet, and so what they do when they are imported: `-W error` and variables of
  the environment come too late for that, and exit handlers of these modules run last (`-W`, `-u` and
  `-X faulthandler` are taken, other options refused);
- variables that the interpreter, the C library or OpenBLAS read at their start: others than pytest was
  started with are refused (`STARTING`);
- a hash seed of its own, the garbage collector's view of what was imported, `/proc/self/cmdline`, and
  `/proc/self/environ`;
- limits of resources, the mask of signals and the umask that pytest has at that moment: it has those of the
  moment at which the first program was begun;
- its parent: that is the server, which goes on when pytest ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from cudnn_actor.processes import interpreter, server_process

from .program_server import LONGEST_ORDER, NUMBER, STARTING, Order
from .spare_process import child_of, order_of, starts_the_same
from .whole import WHOLE

__all__ = ["STARTING", "Program", "end_server", "forking_forkservers", "run", "server_descriptors"]

_READ_LATER: Final = {"PYTHONBREAKPOINT"}
"""Variables with such a name that are read when they are used. Ray sets this one."""

_ROOT = Path(__file__).parents[1]
_AT_FIRST = dict(os.environ)
"""As it was before any test: the server's."""
_SET_CHILD_SUBREAPER: Final = 36
"""Of `prctl`."""
_PIPE, _DEVNULL, _STDOUT = subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT


class _Server:
    """The server, as pytest's process sees it. It is started by the first program."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def order(self, order: Order, descriptors: Sequence[int]) -> None:
        text = json.dumps(order._asdict()).encode()
        assert len(text) <= LONGEST_ORDER, "the program's text and environment are too long for a message"
        with self._lock:
            if self._socket is None:
                self._start()
            assert self._socket is not None
            socket.send_fds(self._socket, [text], descriptors)

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.program_server", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=_DEVNULL,
                cwd=_ROOT,
                env=_AT_FIRST,
            )

    def descriptors(self) -> set[int]:
        return {self._socket.fileno()} if self._socket is not None else set()

    def end(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                assert self._process is not None
                self._process.wait()
            self._socket = self._process = None


_SERVER = _Server()


def server_descriptors() -> set[int]:
    """The descriptors that this process has of the server as long as that runs: they are no test's."""
    return _SERVER.descriptors()


def end_server() -> None:
    """End the server, if one runs. Blocks until it has ended. A later program starts another."""
    _SERVER.end()


@contextlib.contextmanager
def forking_forkservers() -> Iterator[None]:
    """Within this, the server of test programs forks the forkservers of this process: no interpreter starts.

    `spare_process` says what differs from one that is executed. One whose interpreter, or a variable that an
    interpreter reads at its start, is not that of this process is executed. In `make test-all`, all are.
    """
    if WHOLE:
        yield
        return
    forked = _ForkedForkservers()
    server_process.start_module = forked.start_module  # type: ignore[attr-defined]
    try:
        yield
    finally:
        server_process.start_module = interpreter.start_module  # type: ignore[attr-defined]


class _ForkedForkservers:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at_first = starts_the_same(STARTING)

    def start_module(
        self, module: str, *arguments: str, descriptors: Sequence[int], executable: str | None
    ) -> tuple[subprocess.Popen[bytes], int]:
        """As `interpreter.start_module`, which this calls if the interpreter would be another."""
        if executable is not None or starts_the_same(STARTING) != self._at_first:
            return interpreter.start_module(
                module, *arguments, descriptors=descriptors, executable=executable
            )
        order = Order([], {}, "", [], False, False, order_of(module, arguments, descriptors))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._lock, ours, _adopting():
            with theirs:
                _SERVER.order(order, [theirs.fileno(), 1, 2, *descriptors])
            pid: int = NUMBER.unpack(ours.recv(NUMBER.size))[0]
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        process = child_of(pid)
        try:
            return process, os.pidfd_open(pid)
        except OSError:
            process.kill()
            process.wait()
            raise


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Be the parent of processes below this one whose parents end meanwhile."""
    _set_subreaper(1)
    try:
        yield
    finally:
        _set_subreaper(0)


def _set_subreaper(adopts: int) -> None:
    if ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, adopts, 0, 0, 0):
        raise OSError("this process cannot be a subreaper")


class Program:
    """A running program: see the module's docstring. As `subprocess.Popen` with `text=True`.

    Parameters
    ----------
    words
        What stands behind the interpreter's name on a command line.
    stdin, stdout, stderr
        As in `subprocess`: None for pytest's own.
    pass_fds
        Descriptors that the program has besides, at the same numbers.
    cwd, env
        The working directory, and the environment. None for pytest's own.
    start_new_session
        Whether it leads a session of its own.
    spare
        Whether its first forkserver is a fork too, which costs no interpreter's imports: for programs with
        process isolation whose test is not of how that starts. See `spare_process`. In `make test-all`,
        none is.

    Raises
    ------
    ValueError
        The environment has another value of a variable that is read at the start of a process.
    OSError
        The system forks no process.
    """

    def __init__(
        self,
        words: Sequence[str | os.PathLike[str]],
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        spare: bool = False,
    ) -> None:
        environment = dict(os.environ if env is None else env)
        _refuse_at_the_start(environment)
        self.args = [os.fspath(word) for word in words]
        self.returncode: int | None = None
        self.stdin: Any = None
        self.stdout: Any = None
        self.stderr: Any = None
        with contextlib.ExitStack() as theirs:
            given = [self._stream(0, stdin, theirs), self._stream(1, stdout, theirs)]
            given.append(given[1] if stderr == _STDOUT else self._stream(2, stderr, theirs))
            self._report, report = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.callback(report.close)
            numbers = [0, 1, 2, *pass_fds]
            order = Order(
                self.args,
                environment,
                os.path.abspath(cwd or "."),
                numbers,
                start_new_session,
                spare and not WHOLE,
            )
            _SERVER.order(order, [*given, report.fileno(), *pass_fds])
        self.pid = self._told()
        if self.pid < 0:
            self._close()
            raise OSError(-self.pid, os.strerror(-self.pid))

    def _stream(self, number: int, given: int | IO[Any] | None, theirs: contextlib.ExitStack) -> int:
        """The program's descriptor for a standard stream; of a pipe, the other end is kept as a file."""
        if given is None:
            return number
        if given == _DEVNULL:
            return theirs.enter_context(open(os.devnull, "r+b", buffering=0)).fileno()
        if given != _PIPE:
            return given if isinstance(given, int) else given.fileno()
        reads, writes = os.pipe()
        ours, its = (writes, reads) if number == 0 else (reads, writes)
        theirs.callback(os.close, its)
        file = open(ours, "w" if number == 0 else "r", encoding="utf-8")  # noqa: SIM115 - as long as the program
        setattr(self, ("stdin", "stdout", "stderr")[number], file)
        return its

    def _told(self) -> int:
        told = self._report.recv(NUMBER.size)
        if not told:
            raise RuntimeError("the server of test programs has ended; its traceback is on stderr")
        number: int = NUMBER.unpack(told)[0]
        return number

    def poll(self) -> int | None:
        """The exit status, as in `subprocess`; None while the program runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once the program has ended. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._report, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._told()
            self._report.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal. No effect if the program has ended."""
        if self.poll() is None:  # the server does not reap it before this process knows of its end
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Write the input, read both streams to their ends, and wait. Returns what came through pipes.

        Raises `subprocess.TimeoutExpired` with what has come until then, which a later call does not return.
        """
        until = None if timeout is None else time.monotonic() + timeout
        waiting = memoryview((input or "").encode())
        read: dict[Any, list[bytes]] = {file: [] for file in (self.stdout, self.stderr) if file is not None}
        with selectors.DefaultSelector() as selector:
            for file in read:
                selector.register(file, selectors.EVENT_READ)
            if self.stdin is not None and waiting:
                os.set_blocking(self.stdin.fileno(), False)
                selector.register(self.stdin, selectors.EVENT_WRITE)
            elif self.stdin is not None:
                self.stdin.close()
            while selector.get_map():
                ready = selector.select(None if until is None else max(0.0, until - time.monotonic()))
                if not ready and until is not None and time.monotonic() >= until:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0, *_joined(read, self))
                for key, _ in ready:
                    if key.fileobj is self.stdin:
                        waiting = self._write(waiting)
                        ended = not waiting
                    else:
                        read[key.fileobj].append(os.read(key.fd, 1 << 16))
                        ended = not read[key.fileobj][-1]
                    if ended:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        out, errors = _joined(read, self)
        return _text(out), _text(errors)

    def _write(self, waiting: memoryview) -> memoryview:
        """Write some of the input; returns the rest, which is empty if nobody reads it any more."""
        try:
            return waiting[os.write(self.stdin.fileno(), waiting) :]
        except BrokenPipeError:
            return waiting[:0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        """Close the pipes, and wait for the program."""
        self._close_files()
        self.wait()

    def _close_files(self) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()

    def _close(self) -> None:
        self._close_files()
        self._report.close()


def run(
    words: Sequence[str | os.PathLike[str]],
    *,
    input: str | None = None,
    timeout: float | None = None,
    check: bool = False,
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return what it wrote. It is killed if it takes longer than `timeout`.

    As `subprocess.run` with `capture_output=True` and `text=True`. `how` is as for `Program`. Blocks.

    Raises
    ------
    subprocess.TimeoutExpired, subprocess.CalledProcessError
        As there.
    """
    streams = {"stdin": None if input is None else _PIPE, "stdout": _PIPE, "stderr": _PIPE} | how
    with Program(words, **streams) as program:
        try:
            out, errors = program.communicate(input, timeout)
        except BaseException:
            program.kill()
            raise
    status = program.wait()
    if check and status:
        raise subprocess.CalledProcessError(status, program.args, out, errors)
    return subprocess.CompletedProcess(program.args, status, out, errors)


def _joined(read: Mapping[Any, Sequence[bytes]], program: Program) -> tuple[bytes, bytes]:
    return b"".join(read.get(program.stdout, ())), b"".join(read.get(program.stderr, ()))


def _text(data: bytes) -> str:
    return data.decode().replace("\r\n", "\n").replace("\r", "\n")


def _refuse_at_the_start(environment: Mapping[str, str]) -> None:
    for name in environment.keys() ^ _AT_FIRST.keys() | {
        name for name in environment.keys() & _AT_FIRST.keys() if environment[name] != _AT_FIRST[name]
    }:
        if name.startswith(STARTING) and name not in _READ_LATER:
            raise ValueError(f"{name} is read when a process starts: the program needs a new interpreter")
