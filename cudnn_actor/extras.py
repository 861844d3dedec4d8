"""How to install what an extra brings, as a command that works here: the project is on no package index."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["install_command"]

_ROOT = Path(__file__).resolve().parents[1]


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra ("demo", "cuda13", "cuda12").

    Where this runs from a clone: the clone anew, with its extra. Else the packages themselves, by the names
    and versions that the installed project declares.
    """
    if (_ROOT / "pyproject.toml").is_file():
        return f'pip install -e "{_ROOT}[{extra}]"'
    import importlib.metadata  # noqa: PLC0415 - takes longer than all else, and is rarely needed

    try:
        declared = importlib.metadata.requires("cudnn-actor") or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    packages = [text for text, _, marker in map(_split, declared) if _is_of(extra, marker)]
    if not packages:
        return f'pip install -e ".[{extra}]" in a clone of cudnn-actor'
    return "pip install " + " ".join(f'"{package}"' for package in packages)


def _split(requirement: str) -> tuple[str, str, str]:
    package, semicolon, marker = requirement.partition(";")
    return package.strip(), semicolon, marker


def _is_of(extra: str, marker: str) -> bool:
    return re.search(rf"""extra\s*==\s*["']{re.escape(extra)}["']""", marker) is not None
