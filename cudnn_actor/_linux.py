"""Refuses other systems than Linux when the package is imported, before anything else of it is."""

from __future__ import annotations

import sys

_platform = (
    sys.platform
)  # by a name of its own: type checkers elsewhere would take what follows for dead code
if _platform != "linux":
    raise ImportError(
        f"cudnn_actor runs on Linux only, and this is {_platform}: it needs memfd_create, pidfd_open and "
        "descriptors sent over Unix sockets; use Linux, WSL 2 or a Linux container",
        name="cudnn_actor",
    )
