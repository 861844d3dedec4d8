"""Gathers the findings of `cudnn-actor doctor` as data; `doctor` prints them."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import threading
import time
from typing import Literal

import msgspec
import numpy as np

from cudnn_actor.cli.blas import Blas, find_blas
from cudnn_actor.cli.obstacles import find_obstacles
from cudnn_actor.engines import choose_engine
from cudnn_actor.engines.cuda.diagnosis.gpus import Driver, expects_gpu
from cudnn_actor.engines.cuda.diagnosis.installation import Problem, examine
from cudnn_actor.engines.cuda.diagnosis.inventory import Inventory
from cudnn_actor.engines.cuda.diagnosis.rules import problems_of
from cudnn_actor.extras import install_command
from cudnn_actor.processes.launching import close_launchers
from cudnn_actor.protocol import ConvSpec
from cudnn_actor.service.spawning import spawn

__all__ = ["Check", "Diagnosis", "Library", "Missing", "diagnose"]

_LIMIT_S, _END_S = 30.0, 10.0
_PACKAGES = {
    "cuDNN": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cuDNN frontend": ("nvidia-cudnn-frontend",),
    "CuPy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "CUDA bindings": ("cuda-bindings",),
    "matplotlib": ("matplotlib",),
    "onnx": ("onnx",),
    "onnxruntime": ("onnxruntime",),
}
_OPTIONAL = {
    "matplotlib": ("cudnn-actor demo", "demo"),
    "onnx": ("ONNX models: gpu.load and cudnn-actor run", "onnx"),
    "onnxruntime": ("ONNX Runtime, which runs large graphs on the CPU", "cpu"),
}
"""For each package that is not for a GPU: the feature that needs it, and the extra that has it. All other
packages in `_PACKAGES` are for a GPU."""
_CUDA_PACKAGES = tuple(name for name in _PACKAGES if name not in _OPTIONAL)
_REQUIRED = ("numpy", "pykka", "msgspec", "ml-dtypes", "structlog", "rich")


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """A package that is not installed, the feature that needs it, and the command that installs it."""

    what: str
    needed_for: str
    command: str


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one convolution by a service. `reason` says why `device="auto"` took that device."""

    isolation: str
    ok: bool
    detail: str
    device: str | None = None
    reason: str | None = None


class Library(msgspec.Struct, frozen=True, kw_only=True):
    """The cuDNN that a process here would load: its version if known, and its file."""

    version: str | None
    path: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Everything found. Packages that are not installed have version None.

    `check` is the check of the isolation that a service on that device has by default; `isolations` has the
    checks of both. `obstacles` are things that services need and the system denies. `problems` concern the
    CUDA engine; there are none on a machine with nothing of CUDA. `gpu_wanted` says whether a GPU should be
    used: there are signs of one, and the user did not ask for the CPU.
    """

    version: str
    check: Check
    isolations: dict[str, Check]
    obstacles: tuple[Problem, ...]
    driver: Driver
    cudnn: Library | None
    problems: tuple[Problem, ...]
    gpu_wanted: bool
    packages: dict[str, str | None]
    missing: tuple[Missing, ...]
    python: str
    platform: str
    required: dict[str, str | None]
    blas: Blas
    cores: int


def diagnose(device: str = "auto") -> Diagnosis:
    """Check everything, and try the service on a device.

    This takes a second or two on a machine without a GPU, and somewhat longer with one. Blocks; a check that
    takes more than 30 s is given up.
    """
    found = examine()
    packages = {name: first_version(names) for name, names in _PACKAGES.items()}
    cudnn = _cudnn(found)
    if cudnn is not None:  # possibly the system's, which no package installed
        packages["cuDNN"] = cudnn.version or packages["cuDNN"] or "unknown"
    related = found.driver.library or found.driver.version is not None or found.driver.device_files
    problems = tuple(problems_of(found)) if related or found.packages else ()
    isolations = _checks(device, problems)
    on_a_gpu = (isolations["process"].device or "cpu") != "cpu"
    return Diagnosis(
        version=first_version(("cudnn-actor",)) or "unknown",
        check=isolations["process" if on_a_gpu else "thread"],
        isolations=isolations,
        obstacles=find_obstacles(),
        driver=found.driver,
        cudnn=cudnn,
        problems=problems,
        gpu_wanted=device != "cpu" and expects_gpu(found.driver),
        packages=packages,
        missing=_missing(packages, found.driver, problems),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        required={name: first_version((name,)) for name in _REQUIRED},
        blas=find_blas(),
        cores=len(os.sched_getaffinity(0)),
    )


def _cudnn(found: Inventory) -> Library | None:
    if found.cudnn is None:
        return None
    loaded = found.loading.version if found.loading is not None else ""
    return Library(version=loaded or found.cudnn.version, path=found.cudnn.path)


def _checks(device: str, problems: tuple[Problem, ...]) -> dict[str, Check]:
    """Run the checks of the device. With "auto", a broken cuDNN is avoided: it may end the process that runs
    it, which may be this one."""
    preventing = [problem for problem in problems if problem.prevents]
    if device != "auto" or not preventing:
        return try_both(device)
    reason = str(preventing[0])
    return {name: msgspec.structs.replace(each, reason=reason) for name, each in try_both("cpu").items()}


def try_both(device: str) -> dict[str, Check]:
    """Run the check in each isolation.

    Process isolation comes first: on a GPU, a library that ends its process then ends only a worker. On a
    thread it would end this process.
    """
    process = _run_bounded(device, "process")
    if process.ok or device == "cpu" or process.device == "cpu":
        return {"thread": _run_bounded(device, "thread"), "process": process}
    why = "not tried, since it might end this process: no worker process could do it"
    return {"thread": Check(isolation="thread", ok=False, detail=why), "process": process}


def _run_bounded(device: str, isolation: Literal["thread", "process"]) -> Check:
    """Run one check on a thread of its own. A check that hangs is abandoned, and ends with this process."""
    answer: list[Check] = []
    trying = threading.Thread(
        target=lambda: answer.append(_try(device, isolation)), name=f"doctor-{isolation}", daemon=True
    )
    trying.start()
    trying.join(_LIMIT_S)
    if trying.is_alive():  # it may wait for a forkserver: ending the forkserver ends the check, too
        closing = threading.Thread(target=close_launchers, name="doctor-closing", daemon=True)
        closing.start()
        closing.join(_END_S)
        trying.join(_END_S)
        return Check(isolation=isolation, ok=False, detail=f"no answer in {_LIMIT_S:g} s")
    return answer[0]


def _try(device: str, isolation: Literal["thread", "process"]) -> Check:
    """Spawn a service, and run a convolution of ones with ones."""
    chosen: str | None = None
    reason: str | None = None
    try:
        choice = choose_engine(device, apart=isolation == "process")
        chosen, reason = choice.device, choice.reason
        detail = asyncio.run(_convolve(device, isolation))
    except BaseException as error:  # noqa: BLE001 - any error is a finding
        text = f"{type(error).__name__}: {error}"
        return Check(isolation=isolation, ok=False, detail=text, device=chosen, reason=reason)
    return Check(isolation=isolation, ok=True, detail=detail, device=chosen, reason=reason)


async def _convolve(device: str, isolation: Literal["thread", "process"]) -> str:
    """Convolve with a 3x3 filter of ones. Raises unless each result is the number of taps inside the
    image."""
    began = time.perf_counter()
    async with spawn(device=device, isolation=isolation) as gpu:
        x = await gpu.upload(np.ones((1, 1, 4, 4), dtype=np.float32))
        w = await gpu.upload(np.ones((1, 1, 3, 3), dtype=np.float32))
        result = await gpu.download(await gpu.conv_fwd(x, w, conv=ConvSpec.symmetric(2, pad=1)))
    along = np.array([2, 3, 3, 2])
    if not np.array_equal(result[0, 0], np.outer(along, along)):
        raise ValueError(f"a convolution of ones gave {result.tolist()}")
    return f"started, convolved, checked and stopped in {(time.perf_counter() - began) * 1e3:.0f} ms"


def _missing(
    packages: dict[str, str | None], driver: Driver, problems: tuple[Problem, ...]
) -> tuple[Missing, ...]:
    missing = [_extra(name, *of) for name, of in _OPTIONAL.items() if packages[name] is None]
    absent = [name for name in _CUDA_PACKAGES if packages[name] is None]
    if absent and not problems:  # the problems report it themselves
        # A driver of CUDA 12 runs no program of CUDA 13; the other way round is fine.
        extra = "cuda12" if 0 < driver.cuda < 13_000 else "cuda13"
        missing.append(_extra(", ".join(absent), "services on a GPU", extra))
    return tuple(missing)


def _extra(what: str, needed_for: str, extra: str) -> Missing:
    return Missing(what=what, needed_for=needed_for, command=install_command(extra))


def first_version(names: tuple[str, ...]) -> str | None:
    """The version of the first of these distributions that is installed. Imports none of them."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
