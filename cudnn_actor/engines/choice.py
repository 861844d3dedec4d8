"""Which engine serves a device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import Engine
from cudnn_actor.engines.cpu import CpuEngine
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
    """The engine that `device` ("auto", "cpu", "cuda:N") stands for.

    Raises `InvalidRequest` for a device that this release has no engine for.
    """
    if device in ("auto", "cpu"):
        reason = "it was asked for" if device == "cpu" else "this release has the CPU engine only"
        log.info("device.chosen", device="cpu", reason=reason)
        return EngineChoice("cpu", CpuEngine, CpuEngine.outlives_context, reason)
    known = re.fullmatch(r"cuda(:\d+)?", str(device)) is not None
    problem = "has no engine in this release" if known else "is no device"
    raise InvalidRequest(field="device", value=device, problem=problem, fix='use "cpu" or "auto"')
