"""Which engines can be tested on this machine."""

from __future__ import annotations

from collections.abc import Callable

from cudnn_actor.engines.base import Engine
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cuda import CudaEngine, unavailable

EngineFactory = Callable[[], Engine]
ENGINES = ("cpu", "cuda")


def why_not(name: str) -> str | None:
    """Why an engine cannot run here; None when it can."""
    if name == "cpu":
        return None
    why = unavailable()
    return None if why is None else f"no GPU to test on: {why}"


def factory(name: str) -> EngineFactory:
    """What makes engines of a name, not open yet."""
    made: dict[str, EngineFactory] = {"cpu": CpuEngine, "cuda": CudaEngine}
    return made[name]
