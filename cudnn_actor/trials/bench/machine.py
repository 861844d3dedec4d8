"""The machine and the software that a benchmark ran on."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from cudnn_actor.trials.placement import cores

__all__ = ["machine", "versions"]


def machine() -> dict[str, Any]:
    """The processor and the system."""
    return {
        "cpu": _cpu_model(),
        "cores": len(cores()),
        "system": platform.system(),
        "arch": platform.machine(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of those packages among `names` that are installed."""
    known = {"python": platform.python_version()}
    for name in names:
        try:
            known[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return known
