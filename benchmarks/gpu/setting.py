"""The setting of every part, and the libraries that only a machine with a GPU has."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.problems import Problem, small
from cudnn_actor import spawn
from cudnn_actor.options import Isolation
from cudnn_actor.service import Spawning
from cudnn_actor.trials.bench.cpu_time import actor_thread
from cudnn_actor.trials.bench.cpu_time import thread_cpu_s as cpu_s

__all__ = ["Setting", "actor_thread", "cpu_s", "cudnn", "cupy", "gpu_versions", "torch"]


class Setting(NamedTuple):
    """The setting of a part.

    Parameters
    ----------
    device
        "cuda:N", or "cpu" for a dry run: then what only a GPU has is left out.
    quick
        Whether a few seconds will do.
    profile
        Whether to sample the threads under small requests too.
    budget_s
        Seconds after which a part starts nothing more that it can leave out.
    began_s
        When it began, by `time.monotonic()`.
    say
        Shows what is being measured.
    """

    device: str
    quick: bool
    profile: bool
    budget_s: float
    began_s: float
    say: Callable[[str], None]

    @property
    def on_gpu(self) -> bool:
        """Whether there is anything to compare with."""
        return self.device.startswith("cuda")

    @property
    def ordinal(self) -> int:
        """The GPU's number."""
        return int(self.device.partition(":")[2] or 0)

    @property
    def spent(self) -> float:
        """The share of the budget that has gone."""
        return (time.monotonic() - self.began_s) / self.budget_s

    @property
    def small(self) -> Problem:
        """The small convolution of this device."""
        return small(on_gpu=self.on_gpu)

    def service(self, isolation: Isolation = "thread", **options: Any) -> Spawning:
        """A service on the device, not yet started."""
        return spawn(device=self.device, isolation=isolation, **options)

    def choose(self, full: Any, quick: Any) -> Any:
        """The amount that suits this run."""
        return quick if self.quick else full


def cupy() -> Any:
    """CuPy. Raises `ImportError`."""
    return importlib.import_module("cupy")


def cudnn() -> Any:
    """The cuDNN frontend. Raises `ImportError`."""
    return importlib.import_module("cudnn")


def torch() -> Any:
    """PyTorch, set for speed, but for TF32, which is off as it is here. Raises `ImportError`."""
    found = importlib.import_module("torch")
    found.backends.cudnn.benchmark = True
    found.backends.cudnn.allow_tf32 = False
    found.backends.cuda.matmul.allow_tf32 = False
    return found


def gpu_versions() -> dict[str, str]:
    """The versions of the GPU, its driver and the libraries. Needs a GPU."""
    runtime, frontend = cupy().cuda.runtime, cudnn()
    return {
        "GPU": runtime.getDeviceProperties(0)["name"].decode(),
        "CUDA driver": str(runtime.driverGetVersion()),
        "driver": Path("/sys/module/nvidia/version").read_text().strip(),
        "cuDNN": str(frontend.backend_version()),
        "frontend": frontend.__version__,
        "CuPy": cupy().__version__,
    }
