"""The NumPy engine: the default without a GPU, and the reference for the CUDA engine.

`CpuEngine` is imported when it is first used: it is a third of what the package imports, and a process whose
engine runs in another one, or on a GPU, needs none of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cudnn_actor.engines.cpu.engine import CpuEngine

__all__ = ["CpuEngine"]


def __getattr__(name: str) -> Any:
    if name != "CpuEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("cudnn_actor.engines.cpu.engine").CpuEngine
