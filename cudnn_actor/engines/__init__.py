"""Device libraries behind one protocol, and the choice between them."""

from __future__ import annotations

from cudnn_actor.engines.base import Binding, Builder, Engine, EngineFailure, Fence, Plan, StickyError
from cudnn_actor.engines.engine_choice import (
    EngineChoice,
    WorkerEngine,
    check_device,
    choose_engine,
    visible_gpus,
)

__all__ = [
    "Binding",
    "Builder",
    "Engine",
    "EngineChoice",
    "EngineFailure",
    "Fence",
    "Plan",
    "StickyError",
    "WorkerEngine",
    "check_device",
    "choose_engine",
    "visible_gpus",
]
