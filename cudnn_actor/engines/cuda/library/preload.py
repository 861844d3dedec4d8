"""Imports everything that an engine and its builder ever import; for a process that forks them.

Nothing here initialises a device: a process forked afterwards could not use it then. Modules that the
packages import only at their first use are listed here; modules that an installed version lacks are skipped.
CuPy loads NVRTC at its first use, too, also where it finds a compiled kernel in its cache.
"""

from __future__ import annotations

import contextlib
import importlib

from cudnn_actor.engines.cuda.library.libraries import libraries

__all__: list[str] = []

_LATE = (
    "cudnn.engines.heuristics",
    "cudnn.frost.buffers",
    "cudnn.frost.device",
    "cudnn._plan_serdes",
    "cupyx",
    "cupyx.scipy.special",
)

libraries().load()
with contextlib.suppress(Exception):  # whoever compiles first meets it
    libraries().cupy.cuda.nvrtc.getVersion()  # loads the library, of 100 MB, and asks no device
for _name in _LATE:
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
