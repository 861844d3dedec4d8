"""Supervision: policies, the pure core, lifecycle events, fault plans. Knows nothing of cuDNN."""

from __future__ import annotations

from cudnn_actor.supervision.child import ChildSpec
from cudnn_actor.supervision.events import (
    Clock,
    Escalated,
    LifecycleEvent,
    Restarted,
    Restarting,
    Started,
    Stopped,
)
from cudnn_actor.supervision.exits import ExitKind, ExitReason, Restart
from cudnn_actor.supervision.faults import Fault, FaultPlan, FaultRule
from cudnn_actor.supervision.injector import FaultInjector, FaultSource, Fired
from cudnn_actor.supervision.policy import (
    Backoff,
    ChildPolicy,
    RestartIntensity,
    Strategy,
    SupervisorPolicy,
)
from cudnn_actor.supervision.state import SupervisorState
from cudnn_actor.supervision.supervisor import RestartsExhausted, Supervisor

__all__ = [
    "Backoff",
    "ChildPolicy",
    "ChildSpec",
    "Clock",
    "Escalated",
    "ExitKind",
    "ExitReason",
    "Fault",
    "FaultInjector",
    "FaultPlan",
    "FaultRule",
    "FaultSource",
    "Fired",
    "LifecycleEvent",
    "Restart",
    "RestartIntensity",
    "Restarted",
    "Restarting",
    "RestartsExhausted",
    "Started",
    "Stopped",
    "Strategy",
    "Supervisor",
    "SupervisorPolicy",
    "SupervisorState",
]
