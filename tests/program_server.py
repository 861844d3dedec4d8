"""The process that `forked_programs` forks programs from. It has imported what most of them import.

It is run as `python -m tests.program_server DESCRIPTOR`: its end of a socket pair, on which it gets orders.
An order is one message: what to run, as JSON, with descriptors. These are the program's standard input,
output and error, a socket for the report, and those that the program is to have besides. The report is the
program's process id (or minus the error number, if it could not be forked), then its exit status as in
`subprocess`.

It is single-threaded, and imports only modules that start nothing: no thread of Python's, no loop, no socket.
(OpenBLAS ends its threads before a fork, and starts them again when they are needed.) It reaps a program when
the other end of the report is closed. Until then the process id is the program's, as that of a child is until
its parent waits for it. When its own socket ends, it ends, and programs that still run go on.

An order may also be of a forkserver (`Order.forkserver`), which becomes a child of pytest's process. Its
descriptors are a socket for the report, standard output and error, and those of the forkserver.

A forked program leaves the server's loop, and runs in the place of the server's main module. So an error, an
exit, threads and exit handlers end it as they end any other program of this interpreter.
"""

from __future__ import annotations

import builtins
import errno
import faulthandler
import fcntl
import gc
import importlib
import io
import json
import os
import re
import runpy
import select
import signal
import socket
import struct
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from .spare_process import ForkserverOrder, be_forkserver, fork_spare

__all__ = ["LONGEST_ORDER", "MOST_DESCRIPTORS", "NUMBER", "STARTING"]

LONGEST_ORDER = 200_000
"""Bytes of JSON. A socket's buffer, by default, is a little larger."""
MOST_DESCRIPTORS = 64
NUMBER = struct.Struct("i")
"""What a report consists of."""

STARTING: Final = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LANG", "LC_", "TZ"),
    *("OPENBLAS_", "OMP_", "GOTO_", "MKL_", "NPY_"),
)
"""How the names of variables begin that are read when a process starts, or NumPy is imported."""

_PRELOADED = (
    "cudnn_actor",
    "cudnn_actor.attached",
    "cudnn_actor.cli",
    "cudnn_actor.engines.cpu.engine",
    "cudnn_actor.engines.cpu.measuring",
    "cudnn_actor.isolation.process.parent.process_isolation",
    "numpy",
    "numpy.random",
)


class Order(NamedTuple):
    """What to run, and how."""

    words: list[str]
    """What stands behind the interpreter's name."""
    environment: dict[str, str]
    folder: str
    numbers: list[int]
    """Those that the given descriptors are to have in the program; the first are 0, 1 and 2."""
    new_session: bool
    spare: bool
    """Whether a spare process becomes its first forkserver: see `spare_process`."""
    forkserver: ForkserverOrder | None = None
    """The forkserver to run, as a child of pytest's process; None to run a program."""


class _Server:
    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._running: dict[int, socket.socket] = {}
        """The reports of programs that run, by pidfd."""
        self._ended: dict[int, tuple[socket.socket, int]] = {}
        """Reports that are told all, with the pidfds of programs that are to be reaped, by descriptor."""
        self._poll = select.poll()
        self._poll.register(orders, select.POLLIN)

    def serve(self) -> tuple[Order, list[int]] | None:
        """Obey until the socket ends; then None. In a forked program: its order, and its descriptors."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._running:
                    self._report(descriptor)
                elif descriptor in self._ended:
                    self._reap(descriptor)
                else:
                    data, descriptors, _, _ = socket.recv_fds(self._orders, LONGEST_ORDER, MOST_DESCRIPTORS)
                    if not data:
                        return None
                    order = Order(**json.loads(data))
                    if order.forkserver is not None and self._hand_over(descriptors):
                        order = order._replace(forkserver=ForkserverOrder(*order.forkserver))
                        return order, descriptors
                    if order.forkserver is None and self._is_forked(descriptors):
                        return order, descriptors

    def _is_forked(self, descriptors: list[int]) -> bool:
        """Fork; whether this is the child, which has only to use the descriptors."""
        report = socket.socket(fileno=descriptors.pop(3))
        try:
            pid = _fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            for each in (report, self._orders):
                each.detach()  # the program closes all that it was not given
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            pidfd = os.pidfd_open(pid)
            self._running[pidfd] = report
            self._poll.register(pidfd, select.POLLIN)
        _tell(report, pid)
        if pid < 0:
            report.close()
        return False

    def _hand_over(self, descriptors: list[int]) -> bool:
        """Fork a process whose parent is pytest's. Returns whether this is that process.

        It is forked by a child of this process, which ends at once: pytest's process is the subreaper
        meanwhile, and adopts it. The report is its process id (or minus the error number), once it is
        adopted.
        """
        report = socket.socket(fileno=descriptors.pop(0))
        told, tells = os.pipe()
        try:
            between = _fork()
        except OSError as error:
            between, number = 0, -(error.errno or 1)
        else:
            if between == 0:
                itself = os.pidfd_open(os.getpid())
                if (adopted := _fork_or_end()) > 0:
                    os.write(tells, NUMBER.pack(adopted))
                    os._exit(0)
                select.select([itself], [], [])  # its end: this process has been adopted before
                for each in (report, self._orders):
                    each.detach()
                return True
        os.close(tells)
        if between:
            os.waitpid(between, 0)
            found = os.read(told, NUMBER.size)
            number = NUMBER.unpack(found)[0] if found else -errno.EAGAIN  # the second fork has failed
        for descriptor in (told, *descriptors):
            os.close(descriptor)
        with report:
            _tell(report, number)
        return False

    def _report(self, pidfd: int) -> None:
        report = self._running.pop(pidfd)
        self._poll.unregister(pidfd)
        end = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        assert end is not None, "its pidfd is readable"
        self._ended[report.fileno()] = report, pidfd
        self._poll.register(report, select.POLLIN)
        _tell(report, end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)

    def _reap(self, descriptor: int) -> None:
        report, pidfd = self._ended.pop(descriptor)
        self._poll.unregister(descriptor)
        report.close()
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)


def _tell(report: socket.socket, number: int) -> None:
    try:
        report.send(NUMBER.pack(number), socket.MSG_NOSIGNAL)
    except OSError:  # nobody wants to know
        return


def _fork() -> int:
    """`os.fork`, without its warning of threads: those of OpenBLAS, which ends them before a fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _fork_or_end() -> int:
    try:
        return _fork()
    except OSError:
        os._exit(1)


def _run(order: Order, descriptors: Sequence[int]) -> None:
    """Be the program, or the forkserver."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order.forkserver is not None:
        be_forkserver(order.forkserver, descriptors, _have_anew, STARTING)
        return
    if order.new_session:
        os.setsid()
    _have_only(dict(zip(order.numbers, descriptors, strict=True)))
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    importlib.import_module("numpy.random").seed()  # Python's own generator seeds itself
    _open_all_anew()
    if order.spare:
        fork_spare(_have_anew, STARTING)
    sys.orig_argv[:] = [sys.executable, *order.words]
    kind, what, arguments = _with_its_options(order.words)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-m":
        sys.argv[:] = ["-m", *arguments]
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.argv[:] = ["-c", *arguments]
        sys.path[0] = ""
        exec(compile(what, "<string>", "exec"), vars(main))
    else:
        sys.argv[:] = [what, *arguments]
        sys.path[0] = os.path.dirname(os.path.realpath(what))
        vars(main).update(__file__=what, __cached__=None)
        exec(compile(Path(what).read_bytes(), what, "exec"), vars(main))


def _have_only(wanted: Mapping[int, int]) -> None:
    """Give descriptors these numbers, and close all others."""
    above = max(wanted) + 1
    moved = {number: fcntl.fcntl(wanted[number], fcntl.F_DUPFD_CLOEXEC, above) for number in wanted}
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in wanted:
            try:
                os.close(int(name))
            except OSError:  # that of the listing
                continue


def _have_anew(wanted: dict[int, int]) -> None:
    """Have only these descriptors, and standard streams that nobody has used."""
    _have_only(wanted)
    _open_all_anew()


def _open_all_anew() -> None:
    buffered = not sys.stdout.write_through  # type: ignore[union-attr]
    for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        _open_anew(stream, number, buffered=buffered)


def _open_anew(stream: Any, number: int, *, buffered: bool) -> None:
    """Make a standard stream what it is in a new interpreter, in place: modules may have it already."""
    raw: Any = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
    raw.name = stream.name
    if number == 0:
        raw = io.BufferedReader(raw)
    elif buffered:
        raw = io.BufferedWriter(raw)
    lines = buffered and (number == 2 or os.isatty(number))
    stream.__init__(raw, stream.encoding, stream.errors, "\n", lines, not buffered)


def _with_its_options(words: Sequence[str]) -> tuple[str, str, list[str]]:
    """What runs: "-m", "-c" or a path's "", then the module, text or path, then its arguments.

    Of the interpreter's options those are applied that a running interpreter can still take.
    """
    rest = list(words)
    sys.warnoptions.clear()
    while rest:
        match rest:
            case ["-W", setting, *rest]:
                sys.warnoptions.append(setting)
                _filter_warnings(setting)
            case ["-X", "faulthandler", *rest]:
                faulthandler.enable()
            case ["-u", *rest]:
                _open_anew(sys.stdout, 1, buffered=False)
                _open_anew(sys.stderr, 2, buffered=False)
            case ["-m" | "-c" as kind, what, *rest]:
                return kind, what, rest
            case [what, *rest] if not what.startswith("-"):
                return "", what, rest
            case _:
                break
    raise ValueError(f"a forked program cannot have what is left of its options: {rest}")


def _filter_warnings(setting: str) -> None:
    """As the interpreter's option -W, with an action, a message's beginning and a built-in category."""
    action, message, category = (*setting.split(":"), "", "")[:3]
    kind: Any = getattr(builtins, category or "Warning")
    warnings.filterwarnings(action, re.escape(message), kind)  # type: ignore[arg-type]


def _prepare() -> socket.socket:
    """Import the modules, and let a fork share them. Returns the server's socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to pytest's whole group
    gc.disable()
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.enable()
    gc.freeze()  # a program's collector does not touch these pages, which would copy them
    return socket.socket(fileno=int(sys.argv[1]))


if __name__ == "__main__":
    if (forked := _Server(_prepare()).serve()) is not None:
        _run(*forked)
