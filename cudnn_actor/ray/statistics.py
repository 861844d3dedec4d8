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
        The replica's name in log lines and events.
    device
        The device of its service.
    state
        Whether the replica may get requests.
    node
        Ray's id of its node; None while it does not run.
    pid
        The id of the actor's process there; None while there is none.
    worker_pid
        The id of its service's worker process there; None without one.
    restarts
        How often Ray has started the replica again.
    finished
        How many requests of the pool the replica has answered.
    outstanding
        How many open requests the replica has.
    device_us
        The estimated device time of the open requests, in microseconds.
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
        How many requests wait until a replica is up.
    moved
        How often a request was taken from a replica that was lost.
    """

    members: tuple[ReplicaStatistics, ...]
    waiting: int
    moved: int
