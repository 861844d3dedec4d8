"""Which engine serves a device."""

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
from cudnn_actor.engines.cuda.foreign import adopt
from cudnn_actor.engines.cuda.gpus import Driver, find_driver
from cudnn_actor.engines.cuda.installation import obstacle
from cudnn_actor.protocol.errors import InvalidRequest

__all__ = ["EngineChoice", "choose_engine"]

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
        that has the array, whose stream it belongs to. None where the engine has no device of its own.
    """

    device: str
    make: Callable[[], Engine]
    outlives_context: bool
    reason: str = ""
    adopt: Callable[[object], Any] | None = None


def choose_engine(device: str) -> EngineChoice:
    """The engine that `device` stands for: "cpu", "cuda:N" (N counts from 0), "cuda" for the first, "auto".

    "auto" is the first GPU that this process may use (`CUDA_VISIBLE_DEVICES` is respected) where one can be
    used, else the CPU. Asks the driver, and makes no context; the first time that takes a moment.

    Raises `InvalidRequest` for a device that is none, or that cannot be used here; it says why.
    """
    text = str(device)
    if text == "auto":
        return _automatic()
    if text == "cpu":
        return _cpu("it was asked for")
    asked = re.fullmatch(r"cuda(?::(\d{1,6}))?", text)
    if asked is None:
        raise _refused(device, "is no device", 'use "auto", "cpu" or "cuda:0"')
    return _asked_for(text, int(asked[1] or 0))


def _automatic() -> EngineChoice:
    problem = obstacle()
    driver = find_driver()
    if problem is None:
        return _cuda(0, driver, f"{_gpu(driver, 0)} is the first GPU here")
    if driver.gpus:
        return _cpu(f"there is a GPU ({_gpu(driver, 0)}), but {problem}", warn=True)
    return _cpu(f"{problem.what}: {problem.detail}")


def _asked_for(device: str, ordinal: int) -> EngineChoice:
    problem = obstacle()
    if problem is not None:
        why = f"cannot be used here: {problem.what} ({problem.detail})"
        raise _refused(device, why, f"{problem.fix}; cudnn-actor doctor says more")
    driver = find_driver()
    if ordinal >= len(driver.gpus):
        raise _refused(device, f"is no GPU of this machine, which {_shows(len(driver.gpus))}", 'use "cuda:0"')
    return _cuda(ordinal, driver, f"it was asked for: {_gpu(driver, ordinal)}")


def _shows(count: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "has" if visible is None else f"by CUDA_VISIBLE_DEVICES={visible} shows"
    return f"{shown} {count}, cuda:0" + (f" to cuda:{count - 1}" if count > 1 else "")


def _cpu(reason: str, *, warn: bool = False) -> EngineChoice:
    (log.warning if warn else log.info)("device.chosen", device="cpu", reason=reason)
    return EngineChoice("cpu", CpuEngine, CpuEngine.outlives_context, reason)


def _cuda(ordinal: int, driver: Driver, reason: str) -> EngineChoice:
    device = f"cuda:{ordinal}"
    log.info("device.chosen", device=device, reason=reason, driver=driver.version)
    return EngineChoice(
        device,
        partial(CudaEngine, ordinal),
        outlives_context=False,
        reason=reason,
        adopt=partial(adopt, ordinal=ordinal),
    )


def _gpu(driver: Driver, ordinal: int) -> str:
    return driver.gpus[ordinal].name


def _refused(device: object, problem: str, fix: str) -> InvalidRequest:
    return InvalidRequest(field="device", value=device, problem=problem, fix=fix)
