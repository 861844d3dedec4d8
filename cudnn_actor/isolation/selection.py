"""The choice of a service's isolation."""

from __future__ import annotations

from cudnn_actor.engines import EngineChoice
from cudnn_actor.isolation.base import Isolation
from cudnn_actor.isolation.process.parent.process_isolation import ProcessIsolation
from cudnn_actor.isolation.thread.thread_isolation import ThreadIsolation
from cudnn_actor.options import Options

__all__ = ["isolation_for"]


def isolation_for(options: Options, engine: EngineChoice) -> Isolation:
    """The isolation that `options.isolation` selects with this engine."""
    if engine.worker is None and options.isolation != "process":
        return ThreadIsolation(options, engine)
    kind = options.isolation_on(engine.device)
    return ProcessIsolation(options, engine) if kind == "process" else ThreadIsolation(options, engine)
