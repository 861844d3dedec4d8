"""Several GPUs of one machine behind one handle: each member is a service in a process of its own."""

from __future__ import annotations

from cudnn_actor.pool.pool import MemberStatistics, Pool, PoolStatistics
from cudnn_actor.pool.replicas import PoolBuffer, PoolModel
from cudnn_actor.pool.routing import MemberState
from cudnn_actor.pool.spawning import SpawningPool, spawn_pool

__all__ = [
    "MemberState",
    "MemberStatistics",
    "Pool",
    "PoolBuffer",
    "PoolModel",
    "PoolStatistics",
    "SpawningPool",
    "spawn_pool",
]
