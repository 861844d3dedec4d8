"""The service as its users see it: `spawn`, the handle, scopes, health and metrics."""

from __future__ import annotations

from cudnn_actor.broker.request_counts import Histogram, RequestCounts
from cudnn_actor.isolation.base import StandbyState
from cudnn_actor.protocol.graphs.limits import GraphLimits
from cudnn_actor.service.health import HealthState
from cudnn_actor.service.spawning import Spawning

__all__ = ["GraphLimits", "HealthState", "Histogram", "RequestCounts", "Spawning", "StandbyState"]
