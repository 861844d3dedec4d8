"""What `cudnn-actor doctor` finds: gathered here, as data; shown by `doctor`."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import time

import msgspec
import numpy as np

from cudnn_actor.cli.blas import Blas, find_blas
from cudnn_actor.cli.driver import Driver, find_driver
from cudnn_actor.engines import choose_engine
from cudnn_actor.protocol import ConvSpec, CudnnActorError
from cudnn_actor.spawning import spawn

__all__ = ["Diagnosis", "Missing", "Trial", "diagnose"]

_LIMIT_S = 30.0
_PACKAGES = {
    "cuDNN": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cuDNN frontend": ("nvidia-cudnn-frontend",),
    "CuPy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "CUDA bindings": ("cuda-bindings",),
    "matplotlib": ("matplotlib",),
}
_CUDA_PACKAGES = tuple(name for name in _PACKAGES if name != "matplotlib")
_REQUIRED = ("numpy", "pykka", "msgspec", "ml-dtypes", "structlog", "rich")


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not installed, what needs it, and the command that installs it."""

    what: str
    needed_for: str
    command: str


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One real convolution through a real service. `reason` says why `device="auto"` took that device."""

    ok: bool
    detail: str
    device: str | None = None
    reason: str | None = None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Everything found. Packages that are not installed have version None."""

    version: str
    trial: Trial
    driver: Driver
    packages: dict[str, str | None]
    missing: tuple[Missing, ...]
    python: str
    platform: str
    required: dict[str, str | None]
    blas: Blas
    cores: int


def diagnose() -> Diagnosis:
    """Look at everything, and try the service. Takes well under a second on a healthy machine."""
    driver = find_driver()
    packages = {name: _first_version(names) for name, names in _PACKAGES.items()}
    return Diagnosis(
        version=_first_version(("cudnn-actor",)) or "unknown",
        trial=asyncio.run(try_service()),
        driver=driver,
        packages=packages,
        missing=_missing(packages, driver),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        required={name: _first_version((name,)) for name in _REQUIRED},
        blas=find_blas(),
        cores=len(os.sched_getaffinity(0)),
    )


async def try_service() -> Trial:
    """Spawn the service that `device="auto"` gives, and let it convolve ones with ones."""
    try:
        detail = await asyncio.wait_for(_convolve(), _LIMIT_S)
        device, reason = _chosen()
    except TimeoutError:
        return Trial(ok=False, detail=f"no answer within {_LIMIT_S:g} s")
    except (CudnnActorError, OSError, ImportError, ValueError) as error:
        return Trial(ok=False, detail=f"{type(error).__name__}: {error}")
    return Trial(ok=True, detail=detail, device=device, reason=reason)


async def _convolve() -> str:
    """A 3x3 filter of ones counts how many of its taps lie on the image. Raises where it miscounts."""
    began = time.perf_counter()
    async with spawn(device="auto") as gpu:
        x = await gpu.upload(np.ones((1, 1, 4, 4), dtype=np.float32))
        w = await gpu.upload(np.ones((1, 1, 3, 3), dtype=np.float32))
        result = await gpu.download(await gpu.conv_fwd(x, w, conv=ConvSpec.symmetric(2, pad=1)))
    along = np.array([2, 3, 3, 2])
    if not np.array_equal(result[0, 0], np.outer(along, along)):
        raise ValueError(f"a convolution of ones gave {result.tolist()}")
    return f"started, convolved, checked and stopped in {(time.perf_counter() - began) * 1e3:.0f} ms"


def _chosen() -> tuple[str, str]:
    """The device that "auto" stands for, and why."""
    choice = choose_engine("auto")
    return choice.device, choice.reason


def _missing(packages: dict[str, str | None], driver: Driver) -> tuple[Missing, ...]:
    missing = []
    if packages["matplotlib"] is None:
        missing.append(_extra("matplotlib", "cudnn-actor demo", "demo"))
    absent = [name for name in _CUDA_PACKAGES if packages[name] is None]
    if absent:
        # A driver of CUDA 12 runs no program of CUDA 13; the other way round is fine.
        extra = "cuda12" if 0 < driver.cuda < 13_000 else "cuda13"
        missing.append(_extra(", ".join(absent), "the CUDA engine of a later release", extra))
    return tuple(missing)


def _extra(what: str, needed_for: str, extra: str) -> Missing:
    return Missing(what=what, needed_for=needed_for, command=f'pip install "cudnn-actor[{extra}]"')


def _first_version(names: tuple[str, ...]) -> str | None:
    """The version of the first of these distributions that is installed. Imports none of them."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
