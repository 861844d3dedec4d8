"""NVTX ranges around launches, for Nsight Systems and other profilers: off unless the environment asks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["VARIABLE", "with_ranges"]

VARIABLE = "CUDNN_ACTOR_NVTX"
"""The environment variable that asks for ranges, if it is "1" when the engine is opened."""


def with_ranges(execute: Callable[..., None], nvtx: Any) -> Callable[..., None]:
    """The engine's `execute`, within a range that is named by its plan's tag. `nvtx` is `cupy.cuda.nvtx`."""
    push, pop = nvtx.RangePush, nvtx.RangePop

    @functools.wraps(execute)
    def in_range(plan: Any, *arguments: Any) -> None:
        push(plan.tag)
        try:
            execute(plan, *arguments)
        finally:
            pop()

    return in_range
