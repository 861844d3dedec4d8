"""The interface of both kinds of isolation.

Both supply the same parts: the mailbox, the memory, the actor that the supervisor starts, and the backoff
between restarts.
"""

from __future__ import annotations

import enum
from typing import Protocol, TypeVar

from cudnn_actor.actors import Actor, Mailbox
from cudnn_actor.broker.progress import Progress
from cudnn_actor.broker.service_state import ServiceState
from cudnn_actor.engines import EngineChoice
from cudnn_actor.memory import MemoryTable
from cudnn_actor.memory.container import staging_limit
from cudnn_actor.options import Options
from cudnn_actor.protocol.errors import StartFailed
from cudnn_actor.protocol.messages.receipts import PlanCounts
from cudnn_actor.supervision import Backoff

__all__ = ["READY_WITHIN_S", "Isolation", "StandbyState", "check_lost_thread", "if_lost", "limit_arenas"]

A = TypeVar("A", bound=Actor)

READY_WITHIN_S = 30.0
"""Seconds that the start of an actor, or of a standby, may take."""


class StandbyState(enum.StrEnum):
    """The state of a service's standby."""

    NONE = "none"
    """The service keeps no standby."""
    STARTING = "starting"
    """The standby starts, or waits to be started."""
    READY = "ready"
    """The standby can take over, and has yet to build plans that have run lately."""
    WARM = "warm"
    """The standby can take over, and has built these plans."""


class Isolation(Protocol):
    """The interface of both kinds of isolation."""

    name: str
    replaceable: bool
    """Whether a successor can continue with the state of an ended incarnation."""
    backoff: Backoff
    ready_within_s: float
    """Seconds from an incarnation's start until it is given up, if it is not ready."""

    @property
    def worker_pid(self) -> int | None:
        """Process id of the serving worker; None if there is none."""

    def mailbox(self) -> Mailbox:
        """The service's mailbox; the same for all its lives."""

    def memory(self, device: str) -> MemoryTable:
        """A new memory table, for a new life of the service."""

    def begin(self, state: ServiceState) -> None:
        """Prepare for a new life; `state` has its table. Never blocks."""

    def actor(self, incarnation: int) -> Actor:
        """The actor that the supervisor starts as this incarnation.

        Raises `StartFailed` while a thread that was given up lives: it may still write the same state.
        """

    def progress(self) -> Progress:
        """Progress of the current incarnation's work. Any thread; never blocks."""

    @property
    def in_flight(self) -> int:
        """Requests that have been taken from the mailbox to be run, and are not answered. Any thread."""

    @property
    def standby(self) -> StandbyState:
        """The state of the standby. Any thread; never blocks."""

    @property
    def worker_host_bytes(self) -> int:
        """Bytes of host memory that the serving worker has; 0 without one. Any thread; never blocks."""

    @property
    def standby_host_bytes(self) -> int:
        """Bytes of host memory that the standby has; 0 without one. Any thread; never blocks."""

    @property
    def plans(self) -> PlanCounts:
        """Counts of the serving incarnation's plan cache. Any thread; never blocks."""

    def end(self) -> None:
        """Release the resources of the life that has ended. Blocks until its process, if any, is killed."""


def limit_arenas(memory: MemoryTable, options: Options, engine: EngineChoice) -> None:
    """Limit the staging memory, and the arenas: to the engine's default, unless the options have a limit, or
    arenas exist already.

    Called on the supervisor's thread, which may read files, before a worker is there to make an arena.
    """
    if options.memory_limit is None and not memory.arena_bytes:
        memory.limit = engine.default_limit()
    if memory.staging_limit is None:
        memory.staging_limit = staging_limit()


def if_lost(actor: A | None) -> A | None:
    """The actor if it was given up, since it must be remembered; else None."""
    return actor if actor is not None and actor.lost else None


def check_lost_thread(before: Actor | None) -> None:
    """Raise `StartFailed` if the previous actor was given up and its thread has not ended."""
    if before is not None and before.lost and not before.join(0.0):
        raise StartFailed(detail="an actor thread of this service hung, was given up, and has not ended")
