"""Which engines can be tested on this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable

from cudnn_actor.engines.base import Engine
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cuda import CudaEngine, unavailable

from .single_precision import SinglePrecision

EngineFactory = Callable[[], Engine]
EXACT = "exact"
"""The CPU engine that computes in float64."""
SESSIONS = "sessions"
"""The CPU engine that has ONNX Runtime run whatever it can."""
ENGINES = ("cpu", EXACT, SESSIONS, "cuda")
FUZZED = (*ENGINES, SinglePrecision.name)
"""Those that the fuzzers take."""


def why_not(name: str) -> str | None:
    """Why an engine cannot run here; None when it can."""
    if name != "cuda":
        return None
    why = unavailable()
    return None if why is None else f"no GPU to test on: {why}"


def factory(name: str) -> EngineFactory:
    """What makes engines of a name, not open yet."""
    made: dict[str, EngineFactory] = {
        engine.name: engine for engine in (CpuEngine, CudaEngine, SinglePrecision)
    }
    made[EXACT] = functools.partial(CpuEngine, exact=True)
    made[SESSIONS] = functools.partial(CpuEngine, sessions="wherever it can")
    return made[name]
