"""Imports all that an engine and a builder of it ever import: for a process that forks them.

None of it initialises a device, which what is forked afterwards could not use then. What the packages import
only at their first use is named here; a version that has no such module does without it.
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

libraries()
for _name in _LATE:
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
