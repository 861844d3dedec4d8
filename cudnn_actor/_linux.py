"""Raises `ImportError` on systems other than Linux, before any other module of the package is imported."""

from __future__ import annotations

import sys

_platform = (
    sys.platform
)  # a separate name: on other systems, type checkers would take the code below for unreachable
if _platform != "linux":
    raise ImportError(
        f"cudnn_actor runs on Linux only, and this is {_platform}: it needs memfd_create, pidfd_open and "
        "descriptors sent over Unix sockets; use Linux, WSL 2 or a Linux container",
        name="cudnn_actor",
    )
