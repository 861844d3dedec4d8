"""Imports the CUDA packages; no other module of the engine does.

None of them has type annotations, so they are `Any` here. The modules that use
them declare types at their own interfaces.
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
    """Import the packages, once. Raises `ImportError`. Blocks for about half a second the first time."""
    cupy = importlib.import_module("cupy")
    return Libraries(
        cupy=cupy,
        runtime=cupy.cuda.runtime,
        cudnn=importlib.import_module("cudnn"),
        driver=importlib.import_module("cuda.bindings.driver"),
    )
