"""The engine that runs on an NVIDIA GPU, with cuDNN. Importing it imports no CUDA package.

`CudaEngine` is imported when it is first used: most of its modules make plans, and a process without a GPU,
or whose engine runs in another one, needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cudnn_actor.engines.cuda.diagnosis.installation import unavailable

if TYPE_CHECKING:
    from cudnn_actor.engines.cuda.engine import CudaEngine

__all__ = ["CudaEngine", "unavailable"]


def __getattr__(name: str) -> Any:
    if name != "CudaEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("cudnn_actor.engines.cuda.engine").CudaEngine
