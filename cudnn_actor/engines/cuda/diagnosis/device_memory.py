"""How much of a GPU's memory is in use, by NVML: needs no context, and no worker is asked.

The package is `nvidia-ml-py` (its module: `pynvml`), which the extras of CUDA bring. Where it or the driver's
library is missing, nothing is known.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from cudnn_actor.actors.logs import Log
from cudnn_actor.actors.threads import ThreadRefused, start_thread
from cudnn_actor.protocol.types.short_repr import short_repr

__all__ = ["DeviceMemory", "DeviceMemoryReader"]

log = Log("cudnn_actor")


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of a GPU.

    Parameters
    ----------
    uuid
        The GPU's, as NVML and `nvidia-smi -L` say it: "GPU-...".
    used_bytes
        What all processes use, and what the driver keeps for itself: `nvmlDeviceGetMemoryInfo`'s `used`. Of a
        GPU that is divided (MIG), of all of it.
    total_bytes
        What there is: its `total`.
    """

    uuid: str
    used_bytes: int
    total_bytes: int

    __repr__ = short_repr


class DeviceMemoryReader:
    """Reads the memory of one GPU. Any thread.

    Parameters
    ----------
    bus_id
        The GPU's PCI bus id, "0000:01:00.0", by which NVML finds it: its indices are not CUDA's. Empty for a
        device that has none; nothing is read then.
    """

    def __init__(self, bus_id: str) -> None:
        self._bus_id = bus_id
        self._asked = False
        self.loaded = threading.Event()
        """Whether the attempt to load NVML has ended."""
        self._nvml: Any = None
        self._handle: Any = None
        self._uuid = ""

    def read(self) -> DeviceMemory | None:
        """The memory now: a call of the driver, of some tens of microseconds. None if nothing is known.

        The first call begins to load NVML on a thread, and returns None, as do further ones until then.
        """
        if not self._bus_id:
            return None
        if not self._asked:
            self._asked = True  # two threads may both come here: the library counts how often it is opened
            try:
                start_thread(threading.Thread(target=self._load, name="cudnn-actor-nvml", daemon=True))
            except ThreadRefused:
                self.loaded.set()
            return None
        if self._handle is None:
            return None
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError:  # the GPU is lost, say
            return None
        return DeviceMemory(uuid=self._uuid, used_bytes=int(memory.used), total_bytes=int(memory.total))

    def _load(self) -> None:
        try:
            import pynvml  # noqa: PLC0415 - in an extra, and slow

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(self._bus_id)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
        except Exception as error:  # noqa: BLE001 - without the package, the library or a device that it knows
            log.info("nvml.unavailable", error=repr(error))
        else:
            self._nvml, self._uuid = pynvml, uuid if isinstance(uuid, str) else uuid.decode()
            self._handle = handle  # last: whoever sees it sees the others
        finally:
            self.loaded.set()
