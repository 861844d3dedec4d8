"""Queries the NVIDIA driver and its GPUs directly: needs no CUDA package, and makes no context.

A query loads and initialises the driver's library, for the rest of the process's life. That takes memory and
descriptors, and children forked afterwards cannot use a GPU. So a process that leaves GPUs to its workers
queries in a child, which runs this file as a script (`find_driver_apart`). A driver that crashes or hangs
there is then reported here as an ordinary result.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["Driver", "Gpu", "expects_gpu", "find_driver", "find_driver_apart"]

_LIBRARY = "libcuda.so.1"
_APART_S = 20.0
_RUN_FILE = "exec(compile(open({0!r}, 'rb').read(), {0!r}, 'exec'))"
_RUN_MODULE = "import runpy; runpy.run_module({0!r}, run_name='__main__', alter_sys=True)"
_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
"""The kernel driver's device files, on Linux and in WSL."""
_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", *(f"/dev/nvidia{number}" for number in range(16)))
"""The kernel driver's device files on Linux. (WSL has `/dev/dxg` for GPUs of every maker.)"""
_HIDDEN = ("", "-1")
"""Values of `CUDA_VISIBLE_DEVICES` that are set to hide all GPUs."""
_FOLDERS = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/lib/wsl/lib")
_CACHE = Path("/etc/ld.so.cache")
_apart: dict[tuple[str | None, ...], Driver] = {}
"""Drivers with GPUs, by library and by the environment variables that select the visible GPUs."""

_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html
"""
_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE: `cuInit` returns it if the driver works but shows this process no GPU."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU: its name, compute `capability` like "9.0", total `memory_bytes`, PCI `bus_id` if known."""

    name: str
    capability: str
    memory_bytes: int
    bus_id: str = ""


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """The result of querying the driver.

    Parameters
    ----------
    found
        Whether there is a driver and it works.
    detail
        The newest CUDA that it supports, or why it does not work, or that it is not there.
    library
        Whether there is a driver library: False in a container started without one.
    version
        The kernel driver's version, like "580.65.06"; None if no kernel driver is loaded.
    device_files
        Whether there are device files of the kernel driver, `/dev/nvidia*`.
    cuda
        The newest supported CUDA as a number, 1000 * major + 10 * minor; 0 without a working driver.
    gpus
        The GPUs that this process may use, in the driver's order; `CUDA_VISIBLE_DEVICES` is respected.
    """

    found: bool
    detail: str
    library: bool = True
    version: str | None = None
    device_files: bool = False
    cuda: int = 0
    gpus: tuple[Gpu, ...] = ()


def find_driver_apart(
    library: str = _LIBRARY, *, within_s: float = _APART_S, executable: str | None = None
) -> Driver:
    """Like `find_driver`, but in a child process; nothing is loaded into this one.

    GPUs found are cached for the current environment variables. If no driver library can be found, no child
    is started. Blocks while a process starts and the driver initialises: some tenths of a second, at most
    `within_s` seconds; without a driver, less than a millisecond.

    The Python `executable` runs the child. Raises `InvalidRequest` if a child is needed and `find_python`
    finds no Python.
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
    """Paths of which at least one exists if there is a driver that is not in the loader's cache.

    Asking the loader would load the library, and `ctypes.util.find_library` runs compilers. The loader's
    search order does not matter, only whether any folder has the library: `LD_LIBRARY_PATH`, its cache, its
    built-in folders (those of a multi-architecture system are in the cache), and the interpreter's own lib
    folder, which Conda's Python is linked to search. A false positive costs a child that finds nothing. A
    false negative would hide a GPU, so the kernel's device files count too, wherever the library is.
    """
    yield from _DEVICES
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), *_FOLDERS, f"{sys.prefix}/lib"]
    for folder in filter(None, folders):
        yield os.path.join(folder, library)


def _is_cached(library: str) -> bool:
    """Whether the loader's cache names a library. The cache contains names as plain text."""
    try:
        return library.encode() in _CACHE.read_bytes()
    except OSError:
        return False


def _asked_apart(library: str, within_s: float, executable: str | None) -> Driver:
    # Not at the top: this file is also the child's script, which must not import the package.
    from cudnn_actor.processes.interpreter import OTHER_VERSION, VERSION, environment, python_command  # noqa: PLC0415

    # The file alone: importing it as a module would import the package, too. A frozen application does not
    # have the file.
    program = _RUN_FILE.format(__file__) if os.path.exists(__file__) else _RUN_MODULE.format(__name__)
    command = python_command(program, library, executable=executable)
    try:
        done = subprocess.run(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=within_s,
            check=False,
        )
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Driver)  # others may print too
    except OSError as error:
        return _broken_driver(f"no process could be started to query it: {error}")
    except subprocess.TimeoutExpired:
        return _broken_driver(f"it does not answer within {within_s:g} s")
    except msgspec.DecodeError:
        if done.returncode == OTHER_VERSION:
            return _broken_driver(
                f"{command[0]} cannot query it: it is not Python {VERSION}, as this process is"
            )
        words = done.stderr.decode(errors="replace").strip()
        return _broken_driver(f"querying it ends the process with {_status(done.returncode)}: {words[-500:]}")


def _status(returncode: int) -> str:
    known = {-int(number): number.name for number in signal.Signals}
    return known.get(returncode, f"status {returncode}")


def _broken_driver(why: str) -> Driver:
    return _driver(found=False, detail=why)


def _without(library: str) -> Driver:
    return _driver(found=False, detail=f"there is no {library}", library=False)


def _driver(**found: Any) -> Driver:
    """A result, with what the kernel shows of a driver."""
    return Driver(version=_kernel_version(), device_files=any(map(os.path.exists, _NODES)), **found)


def find_driver(library: str = _LIBRARY) -> Driver:
    """Query the driver library. Never raises for a machine without a driver or a GPU."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        if "cannot open shared object" in str(error):
            return _without(library)
        return _broken_driver(str(error))
    try:
        return _ask(cuda)
    except _DriverError as error:
        return _broken_driver(str(error))


def expects_gpu(driver: Driver) -> bool:
    """Whether a program here can expect a GPU, although `driver` may show none that works.

    It can if there is a GPU, a driver that does not work, the kernel's part of a driver, or a device file of
    one. A driver's library alone, which works and finds no GPU, is no sign of one: images and systems without
    a GPU have it too. Nor can a program expect one if `CUDA_VISIBLE_DEVICES` hides all on purpose.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN:
        return False
    broken = driver.library and not driver.found
    return bool(driver.gpus or broken or driver.version is not None or driver.device_files)


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


def _ask(cuda: ctypes.CDLL) -> Driver:
    count = _count(cuda)
    newest = _number(cuda, "cuDriverGetVersion")
    gpus = tuple(_gpu(cuda, index) for index in range(count))
    detail = f"supports CUDA up to {newest // 1000}.{newest % 1000 // 10}"
    return _driver(found=True, detail=detail, cuda=newest, gpus=gpus)


def _count(cuda: ctypes.CDLL) -> int:
    """How many GPUs this process may use; 0 is not an error."""
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
    return Gpu(
        name=name.value.decode(),
        capability=f"{major}.{minor}",
        memory_bytes=memory.value,
        bus_id=_bus_id(cuda, device),
    )


def _bus_id(cuda: ctypes.CDLL, device: ctypes.c_int) -> str:
    """The bus address of a device, such as "0000:01:00.0"; empty where the driver does not tell."""
    text = ctypes.create_string_buffer(32)
    try:
        _call(cuda, "cuDeviceGetPCIBusId", text, ctypes.c_int(len(text)), device)
    except _DriverError:
        return ""
    return text.value.decode()


def _number(cuda: ctypes.CDLL, function: str, *args: object) -> int:
    """The int that a driver function stores through its first argument."""
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
        raise _DriverError(f"{function} returned {(text.value or b'error').decode()} ({status})", status)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(find_driver(sys.argv[1])))
