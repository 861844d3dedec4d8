"""Has the watchdog notice a hang that the test knows of.

A short `hang_after_s` holds for every incarnation of a service, and for its whole life. On a busy machine it
takes a slow request, or the successor that runs the request again, for hung. Here only the incarnation that
hangs has a short limit, and has it only from when it hangs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from cudnn_actor import CudnnRef
from cudnn_actor.actors import Actor
from cudnn_actor.isolation.process.parent.monitor import WorkerMonitor
from cudnn_actor.service.service import CHILD

from ..inside import actors_of, service_behind, specs_of, supervisor_of, worker_source_of

__all__ = [
    "LATE_S",
    "NOTICED_S",
    "hanging_standby",
    "late_standby",
    "no_progress_since",
    "notice_hang",
    "short_limit",
]

NOTICED_S = 0.2
"""The limit of an incarnation that hangs, in seconds."""
LATE_S = 1.0
"""That of a start that hangs."""


def notice_hang(gpu: CudnnRef) -> None:
    """Give the present incarnation `NOTICED_S` for progress. Its successors have the service's own limit.

    Call it when the incarnation hangs, and before anything else can end it. Any thread; never blocks.
    """
    supervisor = supervisor_of(service_behind(gpu))
    specs, actor = specs_of(supervisor), actors_of(supervisor)[CHILD]
    own = specs[CHILD]

    def make_successor(incarnation: int) -> Actor:
        specs[CHILD] = own  # on the supervisor's thread, before that looks at the successor
        return own.make(incarnation)

    if isinstance(actor, WorkerMonitor):
        actor.hang_after_s = NOTICED_S  # first: the supervisor reads its own limit before it asks the monitor
    specs[CHILD] = msgspec.structs.replace(own, hang_after_s=NOTICED_S, make=make_successor)
    supervisor.mailbox.nudge()  # it may be asleep for an eighth of the service's own limit


def no_progress_since(gpu: CudnnRef) -> float | None:
    """Since when the watchdog finds no progress in the present incarnation; None without unfinished work.

    In seconds of the monotonic clock. The watchdog takes an incarnation for hung by the age of this time, and
    by nothing else. So work that moves it on is no hang, however slow the machine is.
    """
    supervisor = supervisor_of(service_behind(gpu))
    actor = actors_of(supervisor)[CHILD]
    assert actor is not None
    return actor.working_since()


@contextmanager
def short_limit(gpu: CudnnRef, seconds: float) -> Iterator[None]:
    """Give the present incarnation so many seconds for progress, during the block: for what is no hang, but
    would look like one. What comes before and after the block may take its time."""
    supervisor = supervisor_of(service_behind(gpu))
    specs, actor = specs_of(supervisor), actors_of(supervisor)[CHILD]
    own = specs[CHILD]
    if isinstance(actor, WorkerMonitor):
        actor.hang_after_s = seconds  # first: see `notice_hang`
    specs[CHILD] = msgspec.structs.replace(own, hang_after_s=seconds)
    supervisor.mailbox.nudge()
    try:
        yield
    finally:
        specs[CHILD] = own
        if isinstance(actor, WorkerMonitor):
            actor.hang_after_s = service_behind(gpu).options.hang_after_s


@contextmanager
def hanging_standby(gpu: CudnnRef) -> Iterator[None]:
    """Give a standby that starts `NOTICED_S` for progress, during the block. The next one has more again."""
    source = worker_source_of(service_behind(gpu))
    own, source.hang_after_s = source.hang_after_s, NOTICED_S
    try:
        yield
    finally:
        source.hang_after_s = own


@contextmanager
def late_standby(gpu: CudnnRef) -> Iterator[None]:
    """Give a standby `LATE_S` to start, during the block. The next one has more again."""
    source = worker_source_of(service_behind(gpu))
    own, source.ready_within_s = source.ready_within_s, LATE_S
    try:
        yield
    finally:
        source.ready_within_s = own
