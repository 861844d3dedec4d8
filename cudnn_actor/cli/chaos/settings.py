"""What a run of the chaos harness is told, and the kinds of faults that it knows."""

from __future__ import annotations

import enum

import msgspec

from cudnn_actor.options import Isolation

__all__ = ["EVERYWHERE", "FaultKind", "Settings"]


class FaultKind(enum.StrEnum):
    """What befalls the service."""

    KILL = "kill"
    """SIGKILL of the worker process."""
    HANG = "hang"
    """SIGSTOP of the worker process: the watchdog has to notice and replace it."""
    POISON = "poison"
    """A sticky error: the device context dies in the middle of a request."""
    START = "start"
    """A worker that fails in its start."""
    FAIL = "fail"
    """One run fails, and the context lives."""
    MEMORY = "memory"
    """One allocation fails."""


EVERYWHERE = (FaultKind.POISON, FaultKind.START, FaultKind.FAIL, FaultKind.MEMORY)
"""The kinds that need no worker process."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Parameters
    ----------
    seconds
        How long load and faults last. What is outstanding then has `deadline_s` more.
    engine
        "cpu" or "cuda".
    isolation
        "process" or "thread".
    standby
        Workers that stand by: 0 or 1.
    kill_every
        Mean seconds between two signals to the worker. The injected faults strike at message numbers that
        come about as often, or oftener.
    faults
        Which kinds strike.
    tasks
        Asyncio tasks that send requests.
    seed
        Decides the programs, which fault strikes and after how long, and the injected faults.
    hang_after_s
        The watchdog's patience, in seconds.
    deadline_s
        Seconds after the end, and after the last fault that took the worker, within which each request must
        have ended; those that have not are lost.
    """

    seconds: float = 30.0
    engine: str = "cpu"
    isolation: Isolation = "process"
    standby: int = 0
    kill_every: float = 0.5
    faults: tuple[FaultKind, ...] = tuple(FaultKind)
    tasks: int = 8
    seed: int = 0
    hang_after_s: float = 1.0
    deadline_s: float = 30.0
