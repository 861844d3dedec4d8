"""A worker process as its parent sees it: the process, its socket, and the status page."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cudnn_actor.actors import forks
from cudnn_actor.isolation.process.parent.in_flight import Violation
from cudnn_actor.isolation.process.parent.liveness import Claimed, Wait, stalled_since
from cudnn_actor.isolation.process.status import StatusPage
from cudnn_actor.isolation.process.wire import FROM_WORKER, FromParent, Hello, Internal, Ready
from cudnn_actor.processes.channel import Channel, channel_pair
from cudnn_actor.processes.launching import Child, Launcher
from cudnn_actor.processes.process_state import LOOK_EVERY_S, SilentTime, is_stopped, own_pidfd

__all__ = ["Recipe", "WakeEvent", "Worker"]

MAIN = "cudnn_actor.isolation.process.child.main:main"


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How workers of a service are made.

    Parameters
    ----------
    preload
        Modules that their forkserver has imported.
    executable
        Path of the Python that runs their forkserver; None for the one that `find_python` finds.
    hello
        The first frame for each worker, without its generation and whether its start fails.
    builders
        Descriptor of the queue to the service's builder process; -1 where workers build their plans.
    """

    preload: tuple[str, ...]
    executable: str | None = None
    hello: Hello
    builders: int = -1

    @property
    def launcher(self) -> Launcher:
        """The launcher of these workers."""
        return Launcher.of_process(self.preload, self.executable)


class Worker:
    """One worker process. Its maker must call `close`.

    Used by one thread at a time, except `claims` and `child`, which any thread may use.

    Parameters
    ----------
    recipe
        How the worker is made.
    generation
        The number of its incarnation.
    generations
        Descriptor of the service's generation table.
    unwanted
        Returns whether the worker is not wanted any more. Called while the launch waits.
    fails
        Whether the worker's start must fail.

    Raises
    ------
    OSError
        The system cannot start the process, or the worker is not wanted any more.
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
        """Whether it has reported that its engine is open."""
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
        """The worker's process id."""
        return self.child.pid

    def send(self, frame: FromParent, descriptors: Sequence[int] = ()) -> None:
        """Send a frame. Never blocks. If the socket has no room yet, the descriptors are duplicated.

        Raises `OSError` if that fails. Then nothing is sent.
        """
        self.channel.send(frame, descriptors)

    def ask(self, body: bytes) -> int:
        """Send work of the service itself, as an encoded message. Returns its number, for `InternalDone`."""
        self._internal += 1
        self.send(Internal(self._internal, body))
        return self._internal

    def silent_time(self, asked_s: float) -> SilentTime:
        """Measures how long the worker is stopped, or makes no progress with what it was asked at `asked_s`.

        Until its first heartbeat, which it sends when its engine is open, only a stopped worker is silent.
        There is another limit for the whole start.
        """
        page, wait = self.claims, Wait(asked_s, asked_s)

        def is_silent() -> bool:
            claimed = Claimed(page.since_ns / 1e9, page.built_ns / 1e9)
            idle_s = time.monotonic() - stalled_since(wait, 0.0, claimed)
            return is_stopped(self.pid) or (page.beat_ns > 0 and idle_s > 2 * LOOK_EVERY_S)

        return SilentTime(is_silent)

    def how_it_hangs(self, hang_after_s: float) -> str:
        """How to report a worker that has been silent for `hang_after_s` seconds in its start."""
        how = "was stopped" if is_stopped(self.pid) else "made no progress"
        return f"{how} for {hang_after_s:g} s in its start"

    def take_descriptor(self) -> int:
        """The descriptor that came with the frame just received. Raises `BadFrame`, `OSError`."""
        return self.channel.take_descriptor()

    def take_ready(self, frames: list[Any]) -> list[Any]:
        """Handle a `Ready` at the head of the frames, and return the others.

        A second `Ready` stays among the others, and the host refuses it. Raises `Violation` for a `Ready`
        with another generation.
        """
        if not self.ready and frames and isinstance(frames[0], Ready):
            said = frames.pop(0).generation
            if said != self.generation:
                raise Violation(f"it said that it is ready as incarnation {said}")
            self.ready = True
        return frames

    def close(self) -> None:
        """Close the socket, the page and the process, which is killed if it still runs. Idempotent."""
        self.channel.close()
        self.claims.close()
        self.child.close()


class WakeEvent:
    """Wakes a thread that waits for descriptors. Any thread calls `wake`; only the waiter uses the rest."""

    def __init__(self) -> None:
        self._open: _Eventfd | None = _Eventfd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self.descriptor = self._open.number
        self.wake_call: Callable[[], Any] = self._open.wake_call()
        """Does what `wake` does, in a single call of a C function. `actors.interrupts` says why."""
        forks.watch(self)

    def forget_parent(self) -> None:
        """Close the event in a forked child, because the waiter is a thread of the parent."""
        self.close()

    def wake(self) -> None:
        """Wake the waiter, now or at its next wait. Any thread; no effect after `close`."""
        self.wake_call()

    def clear(self) -> None:
        """Reset the event after a wake-up. No effect after `close`."""
        eventfd = self._open
        with contextlib.suppress(BlockingIOError):
            if eventfd is not None:
                os.eventfd_read(eventfd.number)

    def close(self) -> None:
        """Close the event. Idempotent."""
        self._open, self.wake_call = None, bool


class _Eventfd:
    """An eventfd, which is closed when no thread can write to it any more.

    If the waiter closed it, a thread that wakes the waiter at that moment could write to another file that
    has got the same number.

    Parameters
    ----------
    number
        The descriptor, owned by this object from now on.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def wake_call(self) -> Callable[[], Any]:
        """A call that writes to the eventfd. It keeps the eventfd open while it exists or runs."""
        write = functools.partial(os.eventfd_write, self.number, 1)
        vars(write)["keeps"] = self
        return write

    def __del__(self) -> None:
        os.close(self.number)
