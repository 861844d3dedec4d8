"""Machines with a GPU, whole and broken: made of folders, files and a driver library of our own."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cudnn_actor.engines.cuda.library.cudnn_files import SONAMES

from ..patience import PATIENCE_S

PACKAGES = {
    "cupy-cuda13x": "14.2.0",
    "cuda-bindings": "13.5.0",
    "nvidia-cudnn-cu13": "9.28.0.42",
    "nvidia-cudnn-frontend": "1.32.0",
}
_DRIVER = """
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return STATUS ? STATUS : GPUS ? 0 : 100; }
int cuDriverGetVersion(int *version) { *version = CUDA; return 0; }
int cuDeviceGetCount(int *count) { *count = GPUS; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "Toy GPU", length); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)8 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? 9 : 0; return 0; }
int cuGetErrorName(int status, const char **text) { *text = "CUDA_ERROR_OF_A_TOY"; return 0; }
"""
_CUDNN = """
#include <stddef.h>
size_t cudnnGetVersion(void) { return 92800; }
size_t cudnnGetCudartVersion(void) { return 13000; }
int cudnnGraphVersionCheck(void) { return STATUS; }
const char *cudnnGetErrorString(int status) { return "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH"; }
"""


WITHOUT_DRIVER = """
from cudnn_actor.engines.cuda.diagnosis import gpus
gpus.find_driver.__defaults__ = gpus.find_driver_apart.__defaults__ = ("libcuda-of-no-machine.so",)
gpus._DEVICES = ()
gpus._NODES = ()
gpus._kernel_version = lambda: None
"""
"""The beginning of a program that is to find no NVIDIA driver, though this machine may have one."""

CLONE = Path(__file__).resolve().parents[2]
"""Where this runs from: what is missing is installed from there."""
_OURS = ["cudnn_actor", "pykka", "structlog", "msgspec", "numpy", "numpy.libs", "ml_dtypes"]
_OURS += ["rich", "pygments", "markdown_it", "mdurl", "typing_extensions", "threadpoolctl"]
"""This package and what it imports without a GPU, for a process that sees nothing else of this machine."""


class Machine:
    """A folder with a driver, libraries and packages, which a process can be run on.

    What this machine has installed is not on it, whatever that is.
    """

    def __init__(self, root: Path) -> None:
        self.site, self.lib = root / "site", root / "lib"
        self.site.mkdir(parents=True)
        self.lib.mkdir()
        for name in _OURS:
            if (place := _place_of(name)) is not None:
                (self.site / place.name).symlink_to(place)

    def install(self, name: str, version: str) -> None:
        """A distribution as pip leaves it: what it says of itself."""
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def driver(self, gpus: int, cuda: int = 13_000, status: int = 0) -> None:
        """The driver's library; a `status` other than 0 is what its initialisation fails with."""
        self.compile("libcuda.so.1", _DRIVER, GPUS=gpus, CUDA=cuda, STATUS=status)

    def cudnn(self, status: int = 0) -> None:
        """All of cuDNN's libraries; `status` is what its check of a sub-library says."""
        self.compile(SONAMES[0], _CUDNN, STATUS=status)
        for name in SONAMES[1:]:
            shutil.copy(self.lib / SONAMES[0], self.lib / name)

    def run(
        self, *words: str, warnings: str = "error", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python on this machine. `warnings` is what becomes of them, as `python -W` takes it."""
        ours = {"LD_LIBRARY_PATH": str(self.lib), "PYTHONPATH": str(self.site)}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA")}
        command = [sys.executable, "-S", "-W", warnings, *words]
        return subprocess.run(
            command,
            env=inherited | ours | environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def compile(self, name: str, code: str, **values: int) -> None:
        """Make a library of C code."""
        (self.lib / name).write_bytes(_library(code, *sorted(values.items())))


@functools.cache
def _library(code: str, *values: tuple[str, int]) -> bytes:
    """The library that C code makes, with these values of its names."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make a driver with")
    defines = [f"-D{key}={value}" for key, value in values]
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        command = [compiler, "-shared", "-fPIC", "-w", *defines, "-x", "c", "-", "-o", file.name]
        subprocess.run(command, input=code, text=True, check=True)
        return Path(file.name).read_bytes()


def _place_of(name: str) -> Path | None:
    """The folder or file that a package is imported from here; beside NumPy's for its libraries."""
    if name == "numpy.libs":
        numpy = _place_of("numpy")
        libraries = None if numpy is None else numpy.parent / name
        return libraries if libraries is not None and libraries.exists() else None
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin).resolve()
    return place.parent if spec.submodule_search_locations else place


def whole_machine(root: Path, gpus: int = 1) -> Machine:
    """A machine on which nothing is missing."""
    machine = Machine(root)
    machine.driver(gpus)
    machine.cudnn()
    (machine.lib / "libnvrtc.so.13").touch()
    for name, version in PACKAGES.items():
        machine.install(name, version)
    return machine


def bare_machine(root: Path) -> Machine:
    """A machine with a GPU, and none of the packages that use it."""
    machine = Machine(root)
    machine.driver(gpus=1)
    return machine
