"""A worker process as its parent sees it: the process, its socket, and the page that both write."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cudnn_actor.workers.channel import Channel, channel_pair
from cudnn_actor.workers.launching import Child, Launcher
from cudnn_actor.workers.ledger import Violation
from cudnn_actor.workers.status import StatusPage
from cudnn_actor.workers.wire import FROM_WORKER, FromParent, Hello, Ready

__all__ = ["Bell", "Recipe", "Worker", "is_stopped", "wait_for"]

_ONE = (1).to_bytes(8, sys.byteorder)
MAIN = "cudnn_actor.workers.process.main:main"


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How workers of a service are made.

    Parameters
    ----------
    preload
        Modules that their forkserver has imported.
    hello
        What each is told first, but for its generation and whether its start fails.
    """

    preload: tuple[str, ...]
    hello: Hello


class Worker:
    """One process. Its maker must call `close`. One thread's at a time, but for `claims` and `child`.

    Parameters
    ----------
    recipe
        How it is made.
    generation
        Which incarnation it is to be.
    generations
        Descriptor of the service's generation table.
    fails
        Whether its start is to fail.

    Raises
    ------
    OSError
        There is no process to be had.
    """

    def __init__(self, recipe: Recipe, generation: int, generations: int, *, fails: bool = False) -> None:
        self.generation = generation
        self.ready = False
        """Whether it has said that its engine is open."""
        self.started = time.monotonic()
        self.claims = StatusPage.create(recipe.hello.window)
        ours, theirs = channel_pair()
        self.channel = Channel(ours, FROM_WORKER)
        try:
            with theirs:
                launcher = Launcher.shared(recipe.preload)
                self.child: Child = launcher.launch(MAIN, (theirs.fileno(), generations, self.claims.fd))
        except BaseException:
            self.channel.close()
            self.claims.close()
            raise
        self.send(msgspec.structs.replace(recipe.hello, generation=generation, fails=fails))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.child.pid

    def send(self, frame: FromParent, descriptors: Sequence[int] = ()) -> None:
        """Tell it something. Never blocks. Descriptors are duplicated where the socket has no room yet."""
        self.channel.send(frame, descriptors)

    def take_descriptor(self) -> int:
        """The descriptor that came with the frame just received. Raises `BadFrame`."""
        return self.channel.take_descriptor()

    def take_ready(self, frames: list[Any]) -> list[Any]:
        """Note a `Ready` at the head of frames; the others, where a second one is for the desk to refuse.

        Raises `Violation` for one of another incarnation.
        """
        if not self.ready and frames and isinstance(frames[0], Ready):
            said = frames.pop(0).generation
            if said != self.generation:
                raise Violation(f"it said that it is ready as incarnation {said}")
            self.ready = True
        return frames

    def close(self) -> None:
        """Let go of the socket, the page and the process, which has ended. Idempotent."""
        self.channel.close()
        self.claims.close()
        self.child.close()


def wait_for(descriptors: Sequence[int], timeout_s: float | None) -> set[int]:
    """Those of some descriptors that have something to read, or have ended. Blocks until one has."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {
        descriptor for descriptor, _ in poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1e3)
    }


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger. False where there is no such process.

    The kernel's word for it is in `/proc/PID/stat`, behind the name: proc(5).
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in (b"T", b"t")


class Bell:
    """Wakes a thread that waits at descriptors. `ring` on any thread; all else is the waiter's."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._file = io.FileIO(self.descriptor, "r+")
        self.strike: Callable[[], Any] = functools.partial(self._file.write, _ONE)
        """What `ring` does, in one call of C, for `actors.interrupts`. `ValueError` after the end."""

    def ring(self) -> None:
        """Wake the waiter, now or when it waits next. Any thread; harmless after the end."""
        with contextlib.suppress(ValueError):
            self.strike()

    def quiet(self) -> None:
        """Take back what was rung."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """End it. Idempotent."""
        self._file.close()
