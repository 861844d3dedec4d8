"""The NVIDIA driver and its GPUs, asked directly: needs no CUDA package, and makes no context.

To ask is to load the driver's library and to initialise it, which stays with a process for its life: some
memory and descriptors, and no child may be forked that is to use a GPU. So a process that leaves GPUs to its
workers asks apart, in a child that is this file run as a script (`find_driver_apart`): whatever becomes of
the driver there, a crash or a call that hangs among it, becomes an answer here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

__all__ = ["Driver", "Gpu", "find_driver", "find_driver_apart"]

_LIBRARY = "libcuda.so.1"
_APART_S = 20.0
_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
"""Where the kernel has the driver, on a machine and in Windows' Linux."""
_FOLDERS = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/lib/wsl/lib")
_CACHE = Path("/etc/ld.so.cache")
_apart: dict[tuple[str | None, ...], Driver] = {}
"""Drivers with GPUs, by what decides which of them are shown."""

_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html
"""
_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE: what `cuInit` says where the driver works and shows this process no GPU."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU: `capability` like "9.0", `memory_bytes` in all."""

    name: str
    capability: str
    memory_bytes: int


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver says.

    Parameters
    ----------
    found
        Whether there is one, and it works.
    detail
        The newest CUDA that it serves, or what is wrong.
    library
        Whether there is a driver library at all: false in a container that was given none.
    version
        The driver's own, like "580.65.06"; None where the kernel has none.
    cuda
        The newest CUDA as a number, 1000 * major + 10 * minor; 0 without a working driver.
    gpus
        Those that this process may use, in the driver's order: `CUDA_VISIBLE_DEVICES` is respected.
    """

    found: bool
    detail: str
    library: bool = True
    version: str | None = None
    cuda: int = 0
    gpus: tuple[Gpu, ...] = ()


def find_driver_apart(
    library: str = _LIBRARY, *, within_s: float = _APART_S, executable: str | None = None
) -> Driver:
    """As `find_driver`, which a child process does; nothing is loaded into this one.

    GPUs that were found are remembered, for the environment that they were found in. Where no driver library
    can be found, no child is started. Blocks: for as long as a process takes to start and the driver to be
    initialised, some tenths of a second and `within_s` seconds at most; without a driver, for less than a
    millisecond.

    The child is run by the Python `executable`; raises `InvalidRequest` where one is needed, and
    `find_python` finds none.
    """
    environment = tuple(os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"))
    key = (library, *environment)
    if (known := _apart.get(key)) is not None:
        return known
    if not any(map(os.path.exists, _traces_of(library))) and not _is_cached(library):
        return _without(library)
    driver = _asked_apart(library, within_s, executable)
    if driver.gpus:
        _apart[key] = driver
    return driver


def _traces_of(library: str) -> Iterator[str]:
    """What exists where there is a driver, if it is not in the loader's cache.

    The loader itself would have to load what it finds, and `ctypes.util.find_library` runs compilers to ask.
    But its order of places does not matter, only whether any has it: `LD_LIBRARY_PATH`, its cache, its
    built-in folders (those of a multi-architecture system are in the cache), and the interpreter's own, which
    Conda's is linked to look in. A trace too many costs a child that finds nothing; one too few would hide a
    GPU, so the kernel's device files count too, wherever the library may be.
    """
    yield from _DEVICES
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), *_FOLDERS, f"{sys.prefix}/lib"]
    for folder in filter(None, folders):
        yield os.path.join(folder, library)


def _is_cached(library: str) -> bool:
    """Whether the loader's cache names a library: its names are in there as they are."""
    try:
        return library.encode() in _CACHE.read_bytes()
    except OSError:
        return False


def _asked_apart(library: str, within_s: float, executable: str | None) -> Driver:
    # Not at the top: this file is also the child's script, which is not to import the package.
    from cudnn_actor.processes.interpreter import environment, find_python  # noqa: PLC0415

    # As a script with `-P`, so that no other file of this folder can stand in for a module of Python's. It
    # finds msgspec where this process does. In a frozen application there is no such file.
    script = [__file__] if os.path.exists(__file__) else ["-m", __name__]
    command = [find_python(executable), "-P", *script, library]
    try:
        done = subprocess.run(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=within_s,
            check=False,
        )
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Driver)  # others may print, too
    except OSError as error:
        return _broken(f"no process could be started to ask it: {error}")
    except subprocess.TimeoutExpired:
        return _broken(f"it does not answer within {within_s:g} s")
    except msgspec.DecodeError:
        words = done.stderr.decode(errors="replace").strip()
        return _broken(f"asking it ends the process with {_status(done.returncode)}: {words[-500:]}")


def _status(returncode: int) -> str:
    known = {-int(number): number.name for number in signal.Signals}
    return known.get(returncode, f"status {returncode}")


def _broken(why: str) -> Driver:
    return Driver(found=False, detail=f"does not work: {why}", version=_kernel_version())


def _without(library: str) -> Driver:
    return Driver(found=False, detail=f"there is no {library}", library=False, version=_kernel_version())


def find_driver(library: str = _LIBRARY) -> Driver:
    """Ask the driver library. Never raises for a machine without a driver or a GPU."""
    version = _kernel_version()
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        if "cannot open shared object" in str(error):
            return _without(library)
        return Driver(found=False, detail=f"does not work: {error}", version=version)
    try:
        return _ask(cuda, version)
    except _DriverError as error:
        return Driver(found=False, detail=f"does not work: {error}", version=version)


def _kernel_version() -> str | None:
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    except OSError:
        return None


class _DriverError(Exception):
    """Raised when a driver call fails; carries its `status`."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


def _ask(cuda: ctypes.CDLL, driver: str | None) -> Driver:
    count = _count(cuda)
    newest = _number(cuda, "cuDriverGetVersion")
    gpus = tuple(_gpu(cuda, index) for index in range(count))
    detail = f"serves CUDA up to {newest // 1000}.{newest % 1000 // 10}"
    return Driver(found=True, detail=detail, version=driver, cuda=newest, gpus=gpus)


def _count(cuda: ctypes.CDLL) -> int:
    """How many GPUs this process may use; a driver that serves none of them works all the same."""
    try:
        _call(cuda, "cuInit", ctypes.c_uint(0))
        return _number(cuda, "cuDeviceGetCount")
    except _DriverError as error:
        if error.status == _NO_DEVICE:
            return 0
        raise


def _gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    device = ctypes.c_int(_number(cuda, "cuDeviceGet", ctypes.c_int(index)))
    name = ctypes.create_string_buffer(256)
    _call(cuda, "cuDeviceGetName", name, ctypes.c_int(len(name)), device)
    memory = ctypes.c_size_t()
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    major, minor = (
        _number(cuda, "cuDeviceGetAttribute", ctypes.c_int(which), device) for which in (_MAJOR, _MINOR)
    )
    return Gpu(name=name.value.decode(), capability=f"{major}.{minor}", memory_bytes=memory.value)


def _number(cuda: ctypes.CDLL, function: str, *args: object) -> int:
    """The int that a driver function puts where its first argument points."""
    number = ctypes.c_int()
    _call(cuda, function, ctypes.byref(number), *args)
    return number.value


def _call(cuda: ctypes.CDLL, function: str, *args: object) -> None:
    try:
        status = getattr(cuda, function)(*args)
    except AttributeError:
        raise _DriverError(f"it has no {function}") from None
    if status:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(status, ctypes.byref(text))
        raise _DriverError(f"{function} says {(text.value or b'error').decode()} ({status})", status)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(find_driver(sys.argv[1])))
