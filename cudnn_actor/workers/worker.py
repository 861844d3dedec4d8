"""A worker process as its parent sees it: the process, its socket, and the page that both write."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cudnn_actor.actors import forks
from cudnn_actor.processes.channel import Channel, channel_pair
from cudnn_actor.processes.launching import Child, Launcher
from cudnn_actor.processes.process_state import own_pidfd
from cudnn_actor.workers.in_flight import Violation
from cudnn_actor.workers.status import StatusPage
from cudnn_actor.workers.wire import FROM_WORKER, FromParent, Hello, Internal, Ready

__all__ = ["Recipe", "WakeEvent", "Worker"]

MAIN = "cudnn_actor.workers.process.main:main"


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How workers of a service are made.

    Parameters
    ----------
    preload
        Modules that their forkserver has imported.
    executable
        Path of the Python that their forkserver is run by; None for what `find_python` finds.
    hello
        What each is told first, but for its generation and whether its start fails.
    builders
        Descriptor of the queue to the service's builder process; -1 where workers build their plans.
    """

    preload: tuple[str, ...]
    executable: str | None = None
    hello: Hello
    builders: int = -1

    @property
    def launcher(self) -> Launcher:
        """What launches them."""
        return Launcher.shared(self.preload, self.executable)


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
    unwanted
        Whether it is not wanted any more: asked while its launch waits.
    fails
        Whether its start is to fail.

    Raises
    ------
    OSError
        There is no process to be had, or it is not wanted any more.
    """

    def __init__(
        self,
        recipe: Recipe,
        generation: int,
        generations: int,
        unwanted: Callable[[], bool],
        *,
        fails: bool = False,
    ) -> None:
        self.generation = generation
        self.ready = False
        """Whether it has said that its engine is open."""
        self.started = time.monotonic()
        self._internal = 0
        self.claims = StatusPage.create(recipe.hello.window)
        try:
            ours, theirs = channel_pair()
        except BaseException:
            self.claims.close()
            raise
        self.channel = Channel(ours, FROM_WORKER)
        try:
            with theirs, own_pidfd() as parent:
                builders = () if recipe.builders < 0 else (recipe.builders,)
                fds = (theirs.fileno(), generations, self.claims.fd, parent, *builders)
                self.child: Child = recipe.launcher.launch(MAIN, fds, unwanted)
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
        """Tell it something. Never blocks. Descriptors are duplicated where the socket has no room yet.

        Raises `OSError` where that cannot be done: then it is told nothing.
        """
        self.channel.send(frame, descriptors)

    def ask(self, body: bytes) -> int:
        """Have it do work of the service's own, a message as bytes; the number of its `InternalDone`."""
        self._internal += 1
        self.send(Internal(self._internal, body))
        return self._internal

    def take_descriptor(self) -> int:
        """The descriptor that came with the frame just received. Raises `BadFrame`, `OSError`."""
        return self.channel.take_descriptor()

    def take_ready(self, frames: list[Any]) -> list[Any]:
        """Note a `Ready` at the head of frames; the others, where a second one is for the host to refuse.

        Raises `Violation` for one of another incarnation.
        """
        if not self.ready and frames and isinstance(frames[0], Ready):
            said = frames.pop(0).generation
            if said != self.generation:
                raise Violation(f"it said that it is ready as incarnation {said}")
            self.ready = True
        return frames

    def close(self) -> None:
        """Let go of the socket, the page and the process, which is killed if it still runs. Idempotent."""
        self.channel.close()
        self.claims.close()
        self.child.close()


class WakeEvent:
    """Wakes a thread that waits at descriptors. `wake` on any thread; all else is the waiter's."""

    def __init__(self) -> None:
        self._open: _Eventfd | None = _Eventfd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self.descriptor = self._open.number
        self.wake_call: Callable[[], Any] = self._open.wake_call()
        """What `wake` does, in one call of C, for `actors.interrupts`."""
        forks.watch(self)

    def forget_parent(self) -> None:
        """In a forked child: whoever waits is a thread of the parent."""
        self.close()

    def wake(self) -> None:
        """Wake the waiter, now or when it waits next. Any thread; harmless after the end."""
        self.wake_call()

    def clear(self) -> None:
        """Take back that it was woken. Harmless after the end."""
        eventfd = self._open
        with contextlib.suppress(BlockingIOError):
            if eventfd is not None:
                os.eventfd_read(eventfd.number)

    def close(self) -> None:
        """End it. Idempotent."""
        self._open, self.wake_call = None, bool


class _Eventfd:
    """An eventfd, closed when nobody can write to it any more.

    Were it closed by the waiter, a thread that wakes it at that moment would write to whatever has its number
    by then.

    Parameters
    ----------
    number
        The descriptor, owned from here on.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def wake_call(self) -> Callable[[], Any]:
        """What writes to it, and keeps it open for as long as it is held, or runs."""
        write = functools.partial(os.eventfd_write, self.number, 1)
        vars(write)["keeps"] = self
        return write

    def __del__(self) -> None:
        os.close(self.number)
