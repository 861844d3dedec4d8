"""The NVIDIA driver and its GPUs, asked directly: needs no CUDA package, and makes no context."""

from __future__ import annotations

import ctypes
from pathlib import Path

import msgspec

__all__ = ["Driver", "Gpu", "find_driver"]

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


def find_driver(library: str = "libcuda.so.1") -> Driver:
    """Ask the driver library. Never raises for a machine without a driver or a GPU."""
    version = _kernel_version()
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        missing = "cannot open shared object" in str(error)
        detail = f"there is no {library}" if missing else f"does not work: {error}"
        return Driver(found=False, detail=detail, library=not missing, version=version)
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
