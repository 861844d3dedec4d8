"""Which engine serves a device, and how a process gets one: this process, or a worker of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import Engine
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cuda import CudaEngine
from cudnn_actor.engines.cuda.device.external_arrays import adopt
from cudnn_actor.engines.cuda.diagnosis.gpus import Driver, find_driver, find_driver_apart
from cudnn_actor.engines.cuda.diagnosis.installation import Problem, obstacle
from cudnn_actor.protocol.checks import did_you_mean
from cudnn_actor.protocol.errors import InvalidRequest

__all__ = ["EngineChoice", "check_device", "choose_engine"]

log = Log("cudnn_actor")


class EngineChoice(NamedTuple):
    """An engine for a device, not made yet.

    Parameters
    ----------
    device
        "cpu" or "cuda:N".
    make
        Makes it; what it does is done when it is opened.
    outlives_context
        As the engine's own: whether memory outlives a dead context.
    reason
        Why this one, for people.
    adopt
        Takes an array of another library that lies on the device for `Engine.write`; called on the thread
        that has the array, whose stream it belongs to. None where the engine has no device of its own, and
        where it is in another process, which an array on the device cannot be handed to.
    worker
        How a worker process makes it: an import path, "package.module:Name", and what that is called with.
        Empty for one that can be made in this process alone.
    preload
        Modules that a process which forks workers imports before, so that none of them has to. Importing
        them initialises no device: what is forked after that could not use it.
    host_arenas
        Whether its arenas are memory of the host, which another process can map by their descriptors.
    """

    device: str
    make: Callable[[], Engine]
    outlives_context: bool
    reason: str = ""
    adopt: Callable[[object], Any] | None = None
    worker: tuple[str, tuple[str | int, ...]] = ("", ())
    preload: tuple[str, ...] = ()
    host_arenas: bool = False


_CUDA_PRELOAD = ("cudnn_actor.engines.cuda.engine", "cudnn_actor.engines.cuda.library.preload")


def choose_engine(
    device: str, *, apart: bool = False, executable: str | os.PathLike[str] | None = None
) -> EngineChoice:
    """The engine that `device` stands for: "cpu", "cuda:N" (N counts from 0), "cuda" for the first, "auto".

    "auto" is the first GPU that this process may use (`CUDA_VISIBLE_DEVICES` is respected) where one can be
    used, else the CPU. Asks the driver, and makes no context; the first time that takes a moment.

    Parameters
    ----------
    device
        As above.
    apart
        Whether the engine is for another process. Then no CUDA library is loaded into this one: a child
        process asks the driver, for which this blocks as `find_driver_apart` does.
    executable
        Path of the Python that runs processes of the engine; None for what `find_python` finds.

    Raises
    ------
    InvalidRequest
        The device is none, or cannot be used here; it says why. Or there is no Python to ask the driver.
    """
    check_device(device)
    text = str(device)
    process = _Process(apart, None if executable is None else os.fspath(executable))
    if text == "auto":
        return _automatic(process)
    if text == "cpu":
        return _cpu("it was asked for")
    return _asked_for(text, int(text.partition(":")[2] or 0), process)


class _Process(NamedTuple):
    """Where an engine is to live: whether in another process, and which Python runs what it starts."""

    apart: bool
    executable: str | None


def check_device(device: str) -> None:
    """Raise `InvalidRequest` for what is no device's name. Whether there is such a device is not asked."""
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,6})?", str(device)) is None:
        hint = did_you_mean(device, ("auto", "cpu", "cuda:0"))
        if str(device).casefold().startswith("gpu"):  # which is spelt more like the CPU
            hint = 'did you mean "cuda:0"? '
        raise _refused(device, "is not a device", f'{hint}use "auto", "cpu" or "cuda:0"')


def _automatic(process: _Process) -> EngineChoice:
    driver, problem = _examined(process)
    if problem is None:
        return _cuda(0, driver, f"{_gpu(driver, 0)} is the first GPU here", process)
    if driver.gpus:
        return _cpu(f"there is a GPU ({_gpu(driver, 0)}), but {problem}", warn=True)
    return _cpu(f"{problem.what}: {problem.detail}")


def _examined(process: _Process) -> tuple[Driver, Problem | None]:
    """The driver, and what prevents the use of its GPUs."""
    driver = find_driver_apart(executable=process.executable) if process.apart else find_driver()
    return driver, obstacle(driver if process.apart else None)


def _asked_for(device: str, ordinal: int, process: _Process) -> EngineChoice:
    driver, problem = _examined(process)
    if problem is not None:
        why = f"cannot be used here: {problem.what} ({problem.detail})"
        raise _refused(device, why, f"{problem.fix}; cudnn-actor doctor says more")
    if ordinal >= len(driver.gpus):
        raise _refused(
            device, f"is not a GPU of this machine, which {_shows(len(driver.gpus))}", 'use "cuda:0"'
        )
    return _cuda(ordinal, driver, f"it was asked for: {_gpu(driver, ordinal)}", process)


def _shows(count: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "has" if visible is None else f"by CUDA_VISIBLE_DEVICES={visible} shows"
    return f"{shown} {count}, cuda:0" + (f" to cuda:{count - 1}" if count > 1 else "")


def _cpu(reason: str, *, warn: bool = False) -> EngineChoice:
    (log.warning if warn else log.info)("device.chosen", device="cpu", reason=reason)
    return EngineChoice(
        "cpu",
        CpuEngine,
        CpuEngine.outlives_context,
        reason,
        worker=("cudnn_actor.engines.cpu:CpuEngine", ()),
        preload=("cudnn_actor.engines.cpu",),
        host_arenas=True,
    )


def _cuda(ordinal: int, driver: Driver, reason: str, process: _Process) -> EngineChoice:
    device = f"cuda:{ordinal}"
    log.info("device.chosen", device=device, reason=reason, driver=driver.version)
    return EngineChoice(
        device,
        partial(CudaEngine, ordinal),
        outlives_context=False,
        reason=reason,
        adopt=None if process.apart else partial(adopt, ordinal=ordinal),
        worker=("cudnn_actor.engines.cuda.engine:CudaEngine", (ordinal,)),
        preload=_CUDA_PRELOAD,
    )


def _gpu(driver: Driver, ordinal: int) -> str:
    return driver.gpus[ordinal].name


def _refused(device: object, problem: str, fix: str) -> InvalidRequest:
    return InvalidRequest(field="device", value=device, problem=problem, fix=fix)
