"""Engines for workers that do real harm when they are asked to: by filling a buffer with a certain value.

A worker makes one by its import path (`EngineChoice.worker`); see `choice_of`. On a GPU the harm is real: a
kernel that writes to an address that nobody has mapped, or one that never ends. On the CPU, for a dry run of
what uses this, a sticky error is raised, or the call does not return.

A `Fill` is pure, so it is run again by the next worker, which would come to the same harm. Where that is not
wanted there is **ammunition**: a folder with a file for each time that harm is to be done.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.engines import EngineChoice, WorkerEngine, choose_engine
from cudnn_actor.engines.base import StickyError
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cuda import CudaEngine

__all__ = ["ILLEGAL", "PREPARING", "SPINNING", "Ammunition", "FaultyCpuEngine", "FaultyEngine", "choice_of"]

ILLEGAL, SPINNING, PREPARING = -77_777.0, -88_888.0, -66_666.0
"""The values: to write where nothing is; to run for ever; to compile the kernels of both, and do no harm."""
_NOWHERE = 0x10
_STRAY = 'extern "C" __global__ void stray(unsigned long long a) { *(volatile int *)a = 1; }'
_SPIN = 'extern "C" __global__ void spin(volatile int *on) { while (*on == 0) {} }'


class Ammunition:
    """How many times harm is still to be done, in all processes that know the folder.

    Parameters
    ----------
    folder
        Where it lies; empty for as much as one likes.
    """

    def __init__(self, folder: str = "") -> None:
        self._folder = folder

    def load(self, times: int = 1) -> None:
        """Allow so many times more."""
        for _ in range(times):
            name = f"{time.monotonic_ns()}-{os.getpid()}"
            Path(self._folder, name).touch()

    def spend(self) -> bool:
        """Take one; whether there was any. Two that take at the same time don't get the same one."""
        if not self._folder:
            return True
        for name in os.listdir(self._folder):
            try:
                os.unlink(Path(self._folder, name))
            except FileNotFoundError:
                continue
            return True
        return False

    @property
    def left(self) -> int:
        """How many times more."""
        return len(os.listdir(self._folder))


class Kernels(NamedTuple):
    """What does harm, and what the spinning one waits for in vain."""

    stray: Any
    spin: Any
    on: Any


class FaultyEngine(CudaEngine):
    """The CUDA engine with the two values that do harm.

    Parameters
    ----------
    ordinal
        The device's number.
    folder
        Of its `Ammunition`.
    """

    def __init__(self, ordinal: int = 0, folder: str = "") -> None:
        super().__init__(ordinal)
        self._ammunition = Ammunition(folder)

    @functools.cached_property
    def _kernels(self) -> Kernels:
        """Compiled at their first use: an engine that is never asked to do harm opens as fast as any."""
        import cupy

        stray, spin = cupy.RawKernel(_STRAY, "stray"), cupy.RawKernel(_SPIN, "spin")
        stray.compile()
        spin.compile()
        on = cupy.zeros(1, np.int32)
        cupy.cuda.runtime.deviceSynchronize()
        return Kernels(stray, spin, on)

    def fill(self, dst: Any, value: float) -> None:
        """Fill, or do harm on the engine's own stream."""
        if value == PREPARING:
            self._kernels  # noqa: B018 - it is made by being looked at
        elif value == ILLEGAL and self._ammunition.spend():
            with self.stream:
                self._kernels.stray((1,), (1,), (np.uint64(_NOWHERE),))
        elif value == SPINNING and self._ammunition.spend():
            with self.stream:
                self._kernels.spin((1,), (1,), (self._kernels.on,))
        super().fill(dst, value)


class FaultyCpuEngine(CpuEngine):
    """Its stand-in on the CPU."""

    def __init__(self, folder: str = "") -> None:
        super().__init__()
        self._ammunition = Ammunition(folder)

    def fill(self, dst: np.ndarray, value: float) -> None:
        """Fill, fail for good, or never return."""
        if value == ILLEGAL and self._ammunition.spend():
            raise StickyError("ILLEGAL_ADDRESS", "a stand-in for a kernel that writes where nothing is")
        while value == SPINNING and self._ammunition.spend():
            time.sleep(3600)
        super().fill(dst, value)


def choice_of(device: str, folder: str = "") -> EngineChoice:
    """The engine for a device, faulty in workers. Loads no CUDA library into this process."""
    choice = choose_engine(device, apart=True)
    if choice.device == "cpu":
        return choice._replace(worker=WorkerEngine(f"{__name__}:{FaultyCpuEngine.__name__}", (folder,)))
    ordinal = int(choice.device.partition(":")[2])
    return choice._replace(worker=WorkerEngine(f"{__name__}:{FaultyEngine.__name__}", (ordinal, folder)))
