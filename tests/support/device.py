"""An H200 as cuDNN describes it. Used in a child: it loads cuDNN."""

from __future__ import annotations

import functools
import json
from typing import Any

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.candidates import AbsentDevice

__all__ = ["h200"]

_PROPERTIES = {
    "deviceName": "NVIDIA H200",
    "deviceVer": 900,
    "driverVer": 13000,
    "cudaDeviceId": 0,
    "pciDeviceId": 0,
    "isTccDriver": 0,
    "multiProcessorCount": 132,
    "warpSize": 32,
    "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "maxCtasPerSM": 32,
    "regsPerBlock": 65536,
    "maxRegistersPerSM": 65536,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024,
    "supportCoopLaunch": 1,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000,
    "l2CacheSize": 62914560,
    "totalGlobalMem": 150000000000,
    # cuDNN asks for these from 9.20 on, and ignores them before.
    "smCountOrigin": 0,
    "oversizedSharedMemoryPerBlock": 0,
    "memoryBusWidth": 6144,
}


@functools.cache
def h200() -> AbsentDevice:
    """The device to give to `candidates` in a handle's place."""
    properties: Any = libraries().cudnn.create_device_properties(json.dumps(_PROPERTIES))
    return AbsentDevice(device_property=properties, sm_version=90, sm_count=132)
