"""The command that installs an extra. It works without a package index, because the project is on none."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["install_command"]

_ROOT = Path(__file__).resolve().parents[1]


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra ("demo", "cuda13", "cuda12").

    In a clone, it installs the clone again, with the extra. Else it installs the extra's packages, with the
    names and versions that the installed project declares.
    """
    if (_ROOT / "pyproject.toml").is_file():
        return f'pip install -e "{_ROOT}[{extra}]"'
    import importlib.metadata  # noqa: PLC0415 - slow to import, and rarely needed

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
