"""How much of a GPU's memory is in use, by NVML: needs no context, and no worker is asked.

The package is `nvidia-ml-py` (its module: `pynvml`), which the extras of CUDA bring. Where it or the driver's
library is missing, nothing is known.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import msgspec

from cudnn_actor.actors.logs import Log
from cudnn_actor.actors.threads import ThreadRefused, start_thread
from cudnn_actor.protocol.types.short_repr import short_repr

__all__ = ["MOST_WAIT_S", "DeviceMemory", "DeviceMemoryReader"]

log = Log("cudnn_actor")

MOST_WAIT_S = 0.005
"""Seconds that a reader waits for the driver, which takes some tens of microseconds."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of a GPU.

    Parameters
    ----------
    uuid
        The GPU's, as NVML and `nvidia-smi -L` say it: "GPU-...".
    used_bytes
        The bytes that all processes use, and those that the driver keeps for itself:
        `nvmlDeviceGetMemoryInfo`'s `used`. If a GPU is divided (MIG), those of all its parts together.
    total_bytes
        The bytes that the GPU has: `nvmlDeviceGetMemoryInfo`'s `total`.
    age_s
        How many seconds ago this was read: 0, unless the driver has not answered within 5 ms, or the record
        was made on the thread of an event loop, which does not wait for the driver.
    """

    uuid: str
    used_bytes: int
    total_bytes: int
    age_s: float = 0.0

    __repr__ = short_repr


class DeviceMemoryReader:
    """Reads the memory of one GPU. Any thread.

    The driver is called on a thread, which ends after it: a driver that hangs, as that of a GPU that has
    fallen off its bus may, keeps that one thread, and no reader for longer than `MOST_WAIT_S`.

    Parameters
    ----------
    bus_id
        The GPU's PCI bus id, "0000:01:00.0", by which NVML finds it: its indices are not CUDA's. Empty for a
        device that has none; nothing is read then.
    """

    def __init__(self, bus_id: str) -> None:
        self._bus_id = bus_id
        self._done = threading.Event()
        """Set unless a thread calls the driver."""
        self._done.set()
        self._began = 0.0
        """When the last thread began, in `time.monotonic()` seconds."""
        self._device: _Device | None = None
        self._last: tuple[DeviceMemory, float] | None = None
        """The last reading and its time; None if nothing is known."""

    def read(self) -> DeviceMemory | None:
        """The memory now, or, if the driver has not answered so soon, as it was last, with its age.

        Blocks for `MOST_WAIT_S` at most, as a rule for 0.1 ms. It does not block while an earlier call of the
        driver hangs, nor on the thread of an event loop, which gets the reading of the call before. None if
        nothing is known: without NVML, without the GPU, and until the first call's thread has loaded NVML.
        """
        if not self._bus_id:
            return None
        if self._done.is_set():
            self._begin()
        if asyncio._get_running_loop() is None:
            self._done.wait(max(0.0, self._began + MOST_WAIT_S - time.monotonic()))
        began, last = self._began, self._last
        if last is None:
            return None
        memory, read_at = last
        return (
            memory if read_at >= began else msgspec.structs.replace(memory, age_s=time.monotonic() - read_at)
        )

    def wait_for_driver(self, timeout_s: float) -> bool:
        """Wait until no call of the driver is under way. Returns whether none is."""
        return self._done.wait(timeout_s)

    def _begin(self) -> None:
        # Two threads may both come here: then both call the driver, which allows that.
        self._began = time.monotonic()
        self._done = done = threading.Event()
        try:
            start_thread(
                threading.Thread(target=self._read, args=(done,), name="cudnn-actor-nvml", daemon=True)
            )
        except ThreadRefused:
            done.set()

    def _read(self, done: threading.Event) -> None:
        try:
            if self._device is None:
                self._device = _Device(self._bus_id)
            self._last = self._device.memory(), time.monotonic()
        except Exception as error:  # noqa: BLE001 - without the package, the library or a device that it knows
            if self._device is None:
                log.info("nvml.unavailable", error=repr(error))
                self._bus_id = ""
            self._last = None  # the GPU is lost, say
        finally:
            done.set()


class _Device:
    """A GPU, as NVML knows it. Raises what importing it and its calls raise."""

    def __init__(self, bus_id: str) -> None:
        import pynvml  # noqa: PLC0415 - in an extra, and slow

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)
        uuid = pynvml.nvmlDeviceGetUUID(self._handle)
        self._uuid = uuid if isinstance(uuid, str) else uuid.decode()

    def memory(self) -> DeviceMemory:
        """The GPU's memory now."""
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return DeviceMemory(uuid=self._uuid, used_bytes=int(memory.used), total_bytes=int(memory.total))
