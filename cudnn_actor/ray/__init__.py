"""Services on a Ray cluster: a pool of replicas behind one handle, and deployments of Ray Serve."""

from __future__ import annotations

from cudnn_actor.ray.deployment import deployment
from cudnn_actor.ray.held import RayBuffer, RayModel
from cudnn_actor.ray.one_replica import OneReplica
from cudnn_actor.ray.ray_pool import RayPool
from cudnn_actor.ray.statistics import RayPoolStatistics, ReplicaStatistics

__all__ = [
    "OneReplica",
    "RayBuffer",
    "RayModel",
    "RayPool",
    "RayPoolStatistics",
    "ReplicaStatistics",
    "deployment",
]
