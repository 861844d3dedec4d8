"""Which engine serves a device."""

from __future__ import annotations

import re
from collections.abc import Callable

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import Engine
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.protocol.errors import InvalidRequest

__all__ = ["choose_engine"]

log = Log("cudnn_actor")


def choose_engine(device: str) -> tuple[str, Callable[[], Engine]]:
    """The device that `device` ("auto", "cpu", "cuda:N") stands for, and what makes its engine.

    Raises `InvalidRequest` for a device that this release has no engine for.
    """
    if device == "cpu":
        return device, CpuEngine
    if device == "auto":
        log.info("device.chosen", device="cpu", reason="this release has the CPU engine only")
        return "cpu", CpuEngine
    known = re.fullmatch(r"cuda(:\d+)?", str(device)) is not None
    problem = "has no engine in this release" if known else "is no device"
    raise InvalidRequest(field="device", value=device, problem=problem, fix='use "cpu" or "auto"')
