"""Loads cuDNN's plans from their bytes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import GraphStep, Recipe

__all__ = ["load", "load_plan"]


def load_plan(recipe: Recipe, load: Callable[[bytes], Any]) -> CudaPlan:
    """Returns the plan of a recipe, with the graphs that `load` makes of its steps' bytes.

    Steps of equal bytes share a graph.
    """
    load_once = functools.cache(load)
    return CudaPlan(
        recipe, tuple(load_once(step.plan) for step in recipe.steps if isinstance(step, GraphStep))
    )


def load(data: bytes, handle: Any, stream: Any) -> Any:
    """Returns cuDNN's graph from a plan's bytes. Raises what cuDNN does."""
    lowered = libraries().cudnn.pygraph(handle=handle)
    try:
        lowered.deserialize(handle, data)
    except Exception:
        # To load the kernels, the frontend captures a run. If a call during the capture fails, such as
        # its cudaMalloc on a full device, the stream is left capturing (1.32, `Graph::warmup`).
        with contextlib.suppress(Exception):
            if stream.is_capturing():
                stream.end_capture()
        raise
    return lowered
