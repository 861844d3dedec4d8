"""Figures of a pool of Ray actors."""

from __future__ import annotations

from cudnn_actor.pool import MemberStatistics, PoolStatistics

__all__ = ["RayPoolStatistics", "ReplicaStatistics"]


class ReplicaStatistics(MemberStatistics, frozen=True, kw_only=True):
    """A replica, as the pool knows it: as `MemberStatistics`, of the actor's process.

    Parameters
    ----------
    node
        Ray's id of its node; None while it does not run.
    worker_pid
        The id of its service's worker process there; None without one.
    """

    node: str | None
    worker_pid: int | None


class RayPoolStatistics(PoolStatistics, frozen=True, kw_only=True):
    """Figures of a pool: as `PoolStatistics`, of replicas."""

    members: tuple[ReplicaStatistics, ...]
