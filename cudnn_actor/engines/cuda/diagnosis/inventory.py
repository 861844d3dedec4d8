"""Records what this machine and this Python provide for the CUDA engine. Imports no CUDA package."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from cudnn_actor.engines.cuda.diagnosis.gpus import Driver
from cudnn_actor.engines.cuda.library.cudnn_files import (
    Library,
    Loading,
    SearchPath,
    find_cudnn,
    mapped_cudnn,
)

__all__ = ["BINDINGS", "CUDNN", "CUPY", "FRONTEND", "Inventory", "Package", "take_inventory"]

CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-jit-cu13", "nvidia-cudnn-jit-cu12")
FRONTEND = ("nvidia-cudnn-frontend",)
BINDINGS = ("cuda-bindings",)
_NVRTC_FOLDERS = ("cu13", "cuda_nvrtc")


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """An installed distribution: its name, version and folder."""

    name: str
    version: str
    folder: str

    @property
    def cuda(self) -> int | None:
        """The major version of the CUDA that it is for; None if unknown."""
        if self.name in BINDINGS:
            return self.numbers[0]
        named = re.search(r"cu(?:da)?(\d\d)x?$", self.name)
        return int(named[1]) if named else None

    @property
    def numbers(self) -> tuple[int, ...]:
        """The version as a tuple of numbers, to compare; (0,) if it contains none."""
        return tuple(int(number) for number in re.findall(r"\d+", self.version.split("+")[0])) or (0,)


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides whether the CUDA engine can work.

    Parameters
    ----------
    driver
        The NVIDIA driver and its GPUs.
    visible
        `CUDA_VISIBLE_DEVICES`; None if it is not set.
    packages
        The installed packages among those that this module names.
    libraries
        cuDNN's libraries as a process would load them.
    mapped
        cuDNN's libraries that this process has loaded.
    nvrtc
        Path of CUDA's run-time compiler, which CuPy needs; empty if not found.
    loading
        The result of a test load of cuDNN; None if there was none.
    """

    driver: Driver
    visible: str | None = None
    packages: tuple[Package, ...] = ()
    libraries: tuple[Library, ...] = ()
    mapped: tuple[Library, ...] = ()
    nvrtc: str = ""
    loading: Loading | None = None

    def installed_packages(self, names: Iterable[str]) -> tuple[Package, ...]:
        """The installed packages that have one of these names."""
        return tuple(package for package in self.packages if package.name in names)

    @property
    def cudnn(self) -> Library | None:
        """The cuDNN that a process would load; None if there is none."""
        return self.libraries[0] if self.libraries else None

    @property
    def cudnn_version(self) -> str:
        """The version of `cudnn`: as the library, its package or its file's name says; empty if none does."""
        if self.loading is not None and self.loading.version:
            return self.loading.version
        main = self.cudnn
        if main is None:
            return ""
        owners = (
            package for package in self.installed_packages(CUDNN) if main.path.startswith(package.folder)
        )
        owner = next(owners, None)
        return owner.version if owner is not None else main.version or ""


def take_inventory(
    driver: Driver,
    *,
    path: Sequence[str] | None = None,
    search: SearchPath | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Inventory:
    """Look at packages and libraries; takes milliseconds, and loads none of them.

    Parameters
    ----------
    driver
        As `find_driver` found it.
    path, search
        Where to search for packages and for libraries; None for where this process searches.
    environ
        The environment.
    """
    search = SearchPath.of_this_process(environ) if search is None else search
    packages = find_packages((*CUPY, *CUDNN, *FRONTEND, *BINDINGS), path)
    return Inventory(
        driver=driver,
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        packages=packages,
        libraries=find_cudnn(search),
        mapped=mapped_cudnn(),
        nvrtc=_nvrtc(search),
    )


def find_packages(names: Iterable[str], path: Sequence[str] | None = None) -> tuple[Package, ...]:
    """The installed distributions with these names, from their metadata; imports none of them."""
    import importlib.metadata  # noqa: PLC0415 - slower than everything else here; only needed with a GPU

    where = list(sys.path if path is None else path)
    found = []
    for name in names:
        # The first on the path is the one that is imported.
        one = next(iter(importlib.metadata.Distribution.discover(name=name, path=where)), None)
        if one is not None:
            found.append(Package(name=name, version=one.version, folder=str(one.locate_file(""))))
    return tuple(found)


def _nvrtc(search: SearchPath) -> str:
    beside = {str(Path(folder).parents[1]) for folder in search.packages}  # site-packages/nvidia
    folders = (
        *search.first,
        *(f"{root}/{name}/lib" for root in sorted(beside) for name in _NVRTC_FOLDERS),
        *search.system,
    )
    found = (path for folder in folders for path in Path(folder).glob("libnvrtc.so.*"))
    return str(next(found, ""))
