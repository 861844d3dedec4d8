"""Supervision: policies, the pure core, lifecycle events, fault plans. Knows nothing of cuDNN."""

from __future__ import annotations

from cudnn_actor.supervision.child import ChildSpec
from cudnn_actor.supervision.clock import Clock
from cudnn_actor.supervision.core import decide
from cudnn_actor.supervision.events import (
    Escalated,
    LifecycleEvent,
    Restarted,
    Restarting,
    Started,
    Stopped,
    log_event,
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
from cudnn_actor.supervision.signals import (
    CancelTimer,
    ChildExited,
    ChildLost,
    ChildReady,
    Effect,
    Emit,
    Escalate,
    Finish,
    KillChild,
    ReportReady,
    RestartRequested,
    SetTimer,
    Signal,
    StartChild,
    StartRequested,
    StopChild,
    StopRequested,
    TimerFired,
    TimerKey,
    TimerKind,
)
from cudnn_actor.supervision.state import SupervisorState
from cudnn_actor.supervision.supervisor import RestartsExhausted, Supervisor

__all__ = [
    "Backoff",
    "CancelTimer",
    "ChildExited",
    "ChildLost",
    "ChildPolicy",
    "ChildReady",
    "ChildSpec",
    "Clock",
    "Effect",
    "Emit",
    "Escalate",
    "Escalated",
    "ExitKind",
    "ExitReason",
    "Fault",
    "FaultInjector",
    "FaultPlan",
    "FaultRule",
    "FaultSource",
    "Finish",
    "Fired",
    "KillChild",
    "LifecycleEvent",
    "ReportReady",
    "Restart",
    "RestartIntensity",
    "RestartRequested",
    "Restarted",
    "Restarting",
    "RestartsExhausted",
    "SetTimer",
    "Signal",
    "StartChild",
    "StartRequested",
    "Started",
    "StopChild",
    "StopRequested",
    "Stopped",
    "Strategy",
    "Supervisor",
    "SupervisorPolicy",
    "SupervisorState",
    "TimerFired",
    "TimerKey",
    "TimerKind",
    "decide",
    "log_event",
]
