"""cuDNN's versions: their text, and which of them this package's GPU tests have run."""

from __future__ import annotations

__all__ = ["RUN", "version_text", "was_run"]

RUN = ("9.19", "9.28")
"""The minor versions with which the GPU tests have passed. docs/gpu.md has the results of each."""


def version_text(number: int) -> str:
    """The text of what `cudnnGetVersion` returns: "9.28.1" for 92801."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def was_run(version: str) -> bool:
    """Whether the GPU tests have run with this version, such as "9.28.1.4", or with another of its minor version."""
    return ".".join(version.split(".")[:2]) in RUN
