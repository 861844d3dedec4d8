"""The arguments of the driver's virtual memory management, in one place.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
"""

from __future__ import annotations

from typing import Any

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.library.failures import check
from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = ["access", "properties", "require_access", "round_up"]


def properties(ordinal: int, *, exported: bool = False) -> Any:
    """The driver's description of memory on a device. `exported`: it can be exported as a file descriptor."""
    driver = libraries().driver
    found = driver.CUmemAllocationProp()
    found.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    found.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = ordinal
    if exported:
        kinds = driver.CUmemAllocationHandleType
        found.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return found


def round_up(ordinal: int, nbytes: int) -> int:
    """A number of bytes, rounded up to the granularity of memory on a device."""
    driver = libraries().driver
    which = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    step = int(check(driver.cuMemGetAllocationGranularity(properties(ordinal, exported=True), which)))
    return -(-nbytes // step) * step


def require_access(ordinal: int, memory: Any) -> None:
    """Raise `EngineFailure` unless a device can read memory of another service, perhaps of another device."""
    driver = libraries().driver
    owner = int(check(driver.cuMemGetAllocationPropertiesFromHandle(memory)).location.id)
    if owner == ordinal:
        return
    reader, lender = check(driver.cuDeviceGet(ordinal)), check(driver.cuDeviceGet(owner))
    if not check(driver.cuDeviceCanAccessPeer(reader, lender)):
        raise EngineFailure("NO_PEER_ACCESS", f"device {ordinal} cannot read the memory of device {owner}")


def access(ordinal: int, *, writes: bool = True) -> Any:
    """The driver's description of access by a device: it may read memory and, if `writes`, write it."""
    driver = libraries().driver
    found = driver.CUmemAccessDesc()
    found.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = ordinal
    flags = driver.CUmemAccess_flags
    found.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writes else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    return found
