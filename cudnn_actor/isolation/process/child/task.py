"""A request in a worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import msgspec

from cudnn_actor.broker.deployments import ModelRun
from cudnn_actor.broker.message_cache import CachedMessage
from cudnn_actor.execution.model_runs import ModelPlaces
from cudnn_actor.isolation.process.status import StatusPage
from cudnn_actor.isolation.process.wire import ReadStaged, RunPlaced, WriteStaged
from cudnn_actor.supervision import FaultRule

__all__ = ["InternalTask", "KnownCopy", "KnownRun", "PlacedRun", "WorkerTask"]


class KnownRun(NamedTuple):
    """A worker's record of a `KnowRun`: the `RunGraph`, and the indices of the buffers to which runs copy
    their inputs."""

    cached: CachedMessage
    copied: tuple[int, ...]


class KnownCopy(NamedTuple):
    """A worker's record of a `WriteStaged` or a `ReadStaged`. The parent sends the same ones again and
    again."""

    message: WriteStaged | ReadStaged


class PlacedRun(ModelRun, eq=False, kw_only=True):
    """A worker's record of a `RunPlaced`. The parent names the same places again and again, in the same
    bytes.

    Parameters
    ----------
    message
        The message.
    places
        The places that its last run has found; None if it has not run, or if memory that it names was
        unmapped.
    """

    message: RunPlaced
    places: ModelPlaces | None = None


class WorkerTask(msgspec.Struct, eq=False):
    """One request, with its place in the window and its fault.

    Parameters
    ----------
    message
        The decoded message.
    number, place, fault
        As in the `Request`.
    page
        The status page, on which `begin` notes that the request has begun.
    """

    message: Any
    number: int
    place: int
    fault: FaultRule | None
    page: StatusPage
    found: CachedMessage | ModelRun | KnownCopy | None = None
    """The record of the message, once it has been looked up: see `ExecutionState.cached_message`."""
    started_ns: int = 0
    """When it began, on `time.perf_counter_ns`'s clock; 0 if it has not."""
    answer: Callable[[int, int, int], None] | None = None
    """See `Arrival.answer`; None if its values do not arrive."""

    def begin(self) -> bool:
        """Start the request unless it was withdrawn. Returns whether it started. See `StatusPage.begin`."""
        if not self.page.begin(self.place, self.number):
            return False
        self.started_ns = time.perf_counter_ns()
        return True

    @property
    def unwanted(self) -> bool:
        """Whether its caller has left since it began. One that runs again after a crash is never unwanted."""
        return self.page.is_withdrawn(self.place, self.number)


class InternalTask(msgspec.Struct, eq=False):
    """Work of the service itself. It has no place in the window, so the page does not say when it begins.

    Parameters
    ----------
    message
        The decoded message.
    number
        As in the `Internal` frame. Its `InternalDone` has the same number.
    """

    message: Any
    number: int
    started_ns: int = 0
    fault: ClassVar[None] = None
    unwanted: ClassVar[bool] = False

    def begin(self) -> bool:
        """Start the work. It is never withdrawn, so this always returns True."""
        self.started_ns = time.perf_counter_ns()
        return True
