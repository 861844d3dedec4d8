"""The one place that imports the CUDA packages, and the types under which the rest knows them.

None of them has types of its own, so what comes out of here is `Any`: the
modules of this folder give it names and types at their own edges.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

__all__ = ["Libraries", "libraries"]


class Libraries(NamedTuple):
    """The modules that the engine works with.

    Parameters
    ----------
    cupy
        Streams, events, arrays, kernels.
    runtime
        `cupy.cuda.runtime`: the CUDA runtime's calls.
    cudnn
        nvidia-cudnn-frontend: graphs and plans.
    driver
        `cuda.bindings.driver`: memory that can be exported.
    """

    cupy: Any
    runtime: Any
    cudnn: Any
    driver: Any


@functools.cache
def libraries() -> Libraries:
    """Import them, once. Raises `ImportError`. Blocks for about half a second the first time."""
    cupy = importlib.import_module("cupy")
    return Libraries(
        cupy=cupy,
        runtime=cupy.cuda.runtime,
        cudnn=importlib.import_module("cudnn"),
        driver=importlib.import_module("cuda.bindings.driver"),
    )
