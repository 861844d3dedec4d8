"""What workers run in the tests of launching, and parents that meet a bad end.

A worker's main gets the worker's numbers of the descriptors that it was launched with, as the real one does.
The parents are run in processes of their own (`python -c`), by name.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import struct
import sys
import warnings
from collections.abc import Iterator
from typing import NoReturn

import msgspec

from cudnn_actor.processes.launching import Child, Launcher, LaunchFailed

from ..patience import PATIENCE_S

HERE = "tests.isolation.launching_rigs"
PRELOAD = (HERE,)


class Situation(msgspec.Struct, frozen=True):
    """A worker's own account of itself."""

    pid: int
    parent: int
    session: int
    open_descriptors: dict[int, str]
    inheritable: list[bool]
    ignores_interrupts: bool
    blocked_signals: int
    frozen_objects: int
    collects_garbage: bool
    variable: str | None
    ignores_deprecations: bool


# Mains of workers.


def says_hello(fds: list[int]) -> None:
    """Write a byte and return."""
    os.write(fds[0], b"x")


def stays(fds: list[int]) -> NoReturn:
    """Write a byte and never end."""
    os.write(fds[0], b"x")
    while True:
        signal.pause()


def stays_and_tells(fds: list[int]) -> NoReturn:
    """Write its process id, in four bytes, and never end."""
    os.write(fds[0], struct.pack("=i", os.getpid()))
    while True:
        signal.pause()


def stays_silent(_fds: list[int]) -> NoReturn:
    """Never end."""
    while True:
        signal.pause()


def copies(fds: list[int]) -> None:
    """Write to the second what is in the first."""
    os.write(fds[1], os.read(fds[0], 100))


def leaves_with_three(_fds: list[int]) -> None:
    """Exit with status 3."""
    sys.exit(3)


def raises(_fds: list[int]) -> None:
    """Fail."""
    raise LookupError("the main of this worker fails")


def describes(fds: list[int]) -> None:
    """Write a `Situation`, encoded."""
    os.write(fds[0], msgspec.msgpack.encode(_situation(fds)))


def _situation(fds: list[int]) -> Situation:
    return Situation(
        pid=os.getpid(),
        parent=os.getppid(),
        session=os.getsid(0),
        open_descriptors=open_descriptors(),
        inheritable=[os.get_inheritable(fd) for fd in fds],
        ignores_interrupts=signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        blocked_signals=len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        frozen_objects=gc.get_freeze_count(),
        collects_garbage=gc.isenabled(),
        variable=os.environ.get("CUDNN_ACTOR_TEST"),
        ignores_deprecations=warnings.filters[0][:3] == ("ignore", None, DeprecationWarning),
    )


def open_descriptors() -> dict[int, str]:
    """Number and target of each that is open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


# On both sides.


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """Both ends of one, closed at the end; the writing end may be closed before."""
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)
        with contextlib.suppress(OSError):
            os.close(writing)


def launch_and_hear(launcher: Launcher, main: str = "stays") -> Child:
    """A worker whose main has begun."""
    with pipe() as (reading, writing):
        child = launcher.launch(f"{HERE}:{main}", [writing])
        os.close(writing)
        assert os.read(reading, 1) == b"x"
    return child


def launch_and_hear_it(launcher: Launcher) -> Child:
    """A worker whose main has begun; others may have the same descriptor, and be heard first."""
    with pipe() as (reading, writing):
        child = launcher.launch(f"{HERE}:{stays_and_tells.__name__}", [writing])
        os.close(writing)
        while struct.unpack("=i", os.read(reading, 4)) != (child.pid,):
            pass
    return child


# Parents.


def parent_is_killed() -> None:
    """Die of SIGKILL with a worker."""
    _launch_and_tell()
    os.kill(os.getpid(), signal.SIGKILL)


def parent_returns() -> None:
    """Come to the end of the program with a worker."""
    _launch_and_tell()


def parent_leaves_at_once() -> None:
    """Exit with a worker, without any exit handler."""
    _launch_and_tell()
    os._exit(0)


def parent_forks_and_returns() -> None:
    """Come to the end of the program while a fork of it lives on."""
    child = launch_and_hear(Launcher.of_process(PRELOAD))
    lingering = _fork_that_lingers()
    _tell(child, lingering)


def parent_is_killed_with_a_copy_about() -> None:
    """Die of SIGKILL while a fork of it holds copies of its sockets."""
    child = launch_and_hear(Launcher.of_process(PRELOAD))
    copies = [os.dup(fd) for fd, target in open_descriptors().items() if target.startswith("socket:")]
    assert copies
    lingering = _fork_that_lingers()
    _tell(child, lingering)
    os.kill(os.getpid(), signal.SIGKILL)


def parent_forks_and_both_launch() -> None:
    """Check that a fork has launchers of its own, and the parent's go on."""
    launcher = Launcher.of_process(PRELOAD)
    child = launch_and_hear(launcher)
    sockets = {fd for fd, target in open_descriptors().items() if target.startswith("socket:")}
    forked = os.fork()
    if forked == 0:
        status = 1
        try:
            assert Launcher.of_process(PRELOAD) is not launcher
            assert (child.pidfd, launcher.pid) == (-1, None)
            assert not sockets & open_descriptors().keys()
            child.signal(signal.SIGKILL)
            for one in (launcher, Launcher.of_process(PRELOAD)):
                launch_and_hear(one, "says_hello").close()
                one.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    server = launcher.pid
    assert not child.wait(0.0)
    launch_and_hear(launcher).close()
    assert launcher.pid == server
    child.signal(signal.SIGTERM)
    assert child.how_it_ended(PATIENCE_S) == "was killed by SIGTERM"
    child.close()


def parent_hands_down_odd_signals() -> None:
    """Check that workers can be told to end, and reaped, whatever the parent does with its signals."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    child = launch_and_hear(Launcher.of_process(PRELOAD))
    child.signal(signal.SIGTERM)
    assert child.how_it_ended(PATIENCE_S) == "was killed by SIGTERM"
    child.close()


def parent_has_no_room_for_a_pidfd() -> None:
    """Check that a worker which the parent cannot hold by anything is not left running."""
    launcher = Launcher.of_process(PRELOAD)
    launch_and_hear(launcher, "says_hello").close()
    with pipe() as (reading, writing):
        of_lifeline = [os.dup(0) for _ in range(2)]
        for fd in of_lifeline:
            os.close(fd)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(of_lifeline) + 1, limits[1]))
        try:
            launcher.launch(f"{HERE}:stays_silent", [writing])
            failure = ""
        except LaunchFailed as error:
            failure = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert "no room" in failure
        os.close(writing)
        assert os.read(reading, 1) == b""  # the worker had the last copy
    launch_and_hear(launcher, "says_hello").close()


def _launch_and_tell() -> None:
    _tell(launch_and_hear(Launcher.of_process(PRELOAD)))


def _tell(child: Child, *others: int) -> None:
    """Say who there is, and wait until those who watch have taken hold of all."""
    sys.stdout.write(" ".join(map(str, (Launcher.of_process(PRELOAD).pid, child.pid, *others))) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


def _fork_that_lingers() -> int:
    """A fork of this process, which does not end by itself."""
    forked = os.fork()
    while forked == 0:
        signal.pause()
    return forked
