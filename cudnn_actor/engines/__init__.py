"""Device libraries behind one protocol, and the choice between them."""

from __future__ import annotations

from cudnn_actor.engines.base import Binding, Engine, EngineFailure, Fence, Plan, StickyError
from cudnn_actor.engines.choice import choose_engine

__all__ = ["Binding", "Engine", "EngineFailure", "Fence", "Plan", "StickyError", "choose_engine"]
