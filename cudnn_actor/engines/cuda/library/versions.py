"""cuDNN's versions: their text, and which of them have passed the GPU tests."""

from __future__ import annotations

__all__ = ["RUN", "is_too_old", "version_text", "was_run"]

RUN = ("9.19", "9.28")
"""The minor versions with which the GPU tests have passed. docs/gpu.md has the results of each."""


def version_text(number: int) -> str:
    """The version as a text, "9.28.1", of the number that `cudnnGetVersion` returns, 92801."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def was_run(version: str) -> bool:
    """Whether the GPU tests have passed with the minor version of a version like "9.28.1.4"."""
    return _minor(version) in map(_minor, RUN)


def is_too_old(version: str) -> bool:
    """Whether a version is older than all those with which the GPU tests have passed."""
    return _minor(version) < min(map(_minor, RUN))


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))
