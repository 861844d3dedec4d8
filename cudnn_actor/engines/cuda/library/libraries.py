"""Imports the CUDA packages; no other module of the engine does.

None of them has type annotations, so they are `Any` here. The modules that use
them declare types at their own interfaces.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

__all__ = ["ON_DEVICE", "TO_DEVICE", "TO_HOST", "Libraries", "libraries"]

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
"""cudaMemcpyKind: from the host to the device, back, and between places on the device."""


class Libraries:
    """The modules that the engine works with, each imported when it is first used. Raises `ImportError`."""

    @functools.cached_property
    def cupy(self) -> Any:
        """Streams, events, arrays, kernels."""
        return importlib.import_module("cupy")

    @functools.cached_property
    def runtime(self) -> Any:
        """`cupy.cuda.runtime`: the CUDA runtime's calls."""
        return self.cupy.cuda.runtime

    @functools.cached_property
    def cudnn(self) -> Any:
        """nvidia-cudnn-frontend: graphs and plans, without the frontend's own engines in Python."""
        cudnn = importlib.import_module("cudnn")
        _leave_out_python_engines()
        return cudnn

    @functools.cached_property
    def driver(self) -> Any:
        """`cuda.bindings.driver`: memory that can be exported."""
        return importlib.import_module("cuda.bindings.driver")

    def load(self) -> Libraries:
        """Import all of them. Raises `ImportError`. Blocks for about half a second the first time."""
        _ = self.cupy, self.runtime, self.cudnn, self.driver
        return self


def _leave_out_python_engines() -> None:
    """Make the frontend leave out its engines that are written in Python, of which we use none.

    To ask them, it imports their compilers with the first product, norm or attention of a process: 2 to 4 s.
    It finds them by a table of the operations that they serve, which has been there since 1.32. If another
    version has no such table, `build_candidate` still passes over its Python engines.
    """
    manifest = importlib.import_module("cudnn.engines.manifest")
    served: dict[str, str] = getattr(manifest, "_ANCHOR_NODE_TO_FAMILY", {})
    served.clear()


_LIBRARIES = Libraries()


def libraries() -> Libraries:
    """The packages, of which none need be imported yet."""
    return _LIBRARIES
