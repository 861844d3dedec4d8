"""The linear algebra library that NumPy uses, and its number of threads."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

__all__ = ["Blas", "find_blas"]

_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
_COUNTERS = (
    "scipy_openblas_get_num_threads64_",
    "scipy_openblas_get_num_threads",
    "openblas_get_num_threads64_",
    "openblas_get_num_threads",
)


class Blas(msgspec.Struct, frozen=True, kw_only=True):
    """The library's name and version. `threads` is None if unknown; `settings` are the environment's
    variables for it."""

    name: str
    threads: int | None
    settings: dict[str, str]


def find_blas() -> Blas:
    """The library that NumPy was built with, and its settings in this process."""
    built: Any = np.show_config(mode="dicts")
    blas = built.get("Build Dependencies", {}).get("blas", {})
    settings = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return Blas(
        name=f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip(),
        threads=_threads(),
        settings=settings,
    )


def _threads() -> int | None:
    """The number of threads of the library that this process has loaded. Only OpenBLAS is asked: NumPy's
    wheels contain it."""
    for path in _loaded_libraries("openblas"):
        library = ctypes.CDLL(path)
        for name in _COUNTERS:
            if hasattr(library, name):
                return int(getattr(library, name)())
    return None


def _loaded_libraries(part: str) -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if part in line}
    return sorted(path for path in paths if path.startswith("/"))
