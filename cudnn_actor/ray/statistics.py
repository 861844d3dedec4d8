"""Figures of a pool of Ray actors."""

from __future__ import annotations

import msgspec

from cudnn_actor.pool import MemberState

__all__ = ["RayPoolStatistics", "ReplicaStatistics"]


class ReplicaStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A replica, as the pool knows it.

    Parameters
    ----------
    name
        In log lines and events.
    device
        What its service runs on.
    state
        Whether it may get requests.
    node
        Ray's id of its node; None while it does not run.
    pid
        The id of the actor's process there; None while there is none.
    worker_pid
        The id of its service's worker process there; None without one.
    restarts
        How often Ray has started it again.
    finished
        How many requests of the pool it has answered.
    outstanding
        How many it has now.
    device_us
        The estimated device time of these, in microseconds.
    """

    name: str
    device: str
    state: MemberState
    node: str | None
    pid: int | None
    worker_pid: int | None
    restarts: int
    finished: int
    outstanding: int
    device_us: int


class RayPoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a pool.

    Parameters
    ----------
    members
        The statistics of each replica.
    waiting
        Requests that wait for a replica to be up.
    moved
        How often a replica was lost that had a request, summed over all requests.
    """

    members: tuple[ReplicaStatistics, ...]
    waiting: int
    moved: int
