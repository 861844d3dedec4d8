"""The workers that a service has at one time: the one that serves, the one that starts, and the standby.

Each of them maps the same memory. So whatever is mapped or unmapped is announced to all of them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cudnn_actor.isolation.process.parent.in_flight import Claims
from cudnn_actor.isolation.process.wire import Dying, FromParent, MapStage, UnmapStage

__all__ = ["WorkerEnd", "Workers"]


class WorkerEnd(Protocol):
    """A worker as its host sees it."""

    @property
    def claims(self) -> Claims:
        """Says which requests have begun."""

    def send(self, frame: FromParent, descriptors: Sequence[int] = ()) -> None:
        """Send a frame. Never blocks. Frames for a worker that has ended are dropped.

        If a frame must wait, its descriptors are duplicated. Raises `OSError` if that fails; then nothing is
        sent.
        """

    def take_descriptor(self) -> int:
        """The descriptor that came with the frame just received. Raises `BadFrame`, `OSError`."""


class Workers:
    """The workers, and what is known about the one that serves. Used with the host held."""

    def __init__(self) -> None:
        self.serving: WorkerEnd | None = None
        self.starting: WorkerEnd | None = None
        """The worker that serves next: set before it is told of the memory, until it serves."""
        self.standby: WorkerEnd | None = None
        self.stopping = False
        """Whether the serving worker has been asked to end, so that nothing more is dispatched."""
        self.arena_asked_s: float | None = None
        """Since when the serving worker owes an arena, in `time.monotonic()` seconds; None if it owes none.

        The watchdog reads it on its own thread. It is one value for that reason: if there were a flag beside
        it, the flag could be seen with an old time, and the worker would seem to have hung since then."""
        self.last_word: Dying | None = None
        """The `Dying` frame of the serving or starting worker; None if it has sent none."""

    def attach(self, worker: WorkerEnd) -> None:
        """Let a worker serve. It must have mapped every arena and segment."""
        self.serving = worker
        self.starting = None
        self.last_word = None
        self.stopping = False

    def detach(self) -> None:
        """Note that no worker serves, because the serving one has ended."""
        self.serving = None
        self.arena_asked_s = None
        self.last_word = None  # it must not be attributed to the next worker

    def tell_all(self, frame: FromParent) -> None:
        """Send a frame to every worker."""
        for worker in self._all():
            worker.send(frame)

    def tell_others(self, frame: FromParent) -> None:
        """Send a frame to every worker but the one that serves."""
        for worker in self._all():
            if worker is not self.serving:
                worker.send(frame)

    def have_mapped(
        self, frame: FromParent, descriptor: int, undo: FromParent, *, maker: WorkerEnd | None = None
    ) -> None:
        """Let every worker map an arena or segment, except the worker that has made it.

        If this raises `OSError`, none of them has it mapped.
        """
        told: list[WorkerEnd] = []
        for worker in self._all():
            if worker is maker:
                continue
            try:
                worker.send(frame, (descriptor,))
            except OSError:
                for other in told:
                    other.send(undo)
                raise
            told.append(worker)

    def map_segment(self, number: int, nbytes: int, descriptor: int) -> None:
        """Let every worker map a new segment of staging memory. Raises as `have_mapped`."""
        self.have_mapped(MapStage(number, nbytes), descriptor, UnmapStage(number))

    def unmap_segment(self, number: int) -> None:
        """Let every worker unmap a segment."""
        self.tell_all(UnmapStage(number))

    def _all(self) -> list[WorkerEnd]:
        return [worker for worker in (self.serving, self.starting, self.standby) if worker is not None]
