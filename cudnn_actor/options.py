"""What a service is told when it is spawned."""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from cudnn_actor.protocol.checks import require_seconds, require_whole
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.supervision import Fault, FaultPlan

__all__ = ["Options", "make_options"]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `spawn`, `start` and `child_spec`.

    Parameters
    ----------
    device
        "auto", "cpu" or "cuda:N".
    isolation
        "thread": the actor runs in this process.
    faults
        Scripted failures, for tests; None for none.
    mailbox
        Messages that may wait before `submit` and `tell` are refused.
    max_restarts, period_s
        The actor is replaced at most so many times within so many seconds; then the service stops.
    hang_after_s
        Seconds that one message may take before the actor counts as hung and is replaced.
    workspace_limit
        Bytes of workspace that plans may use; None for the engine's own bound.
    memory_limit
        Bytes that buffers may take from the system, in arenas of 64 MiB; None for no limit.

    Raises
    ------
    InvalidRequest
        A value is out of its range, or asks for what this release does not have.
    """

    device: str = "auto"
    isolation: str = "thread"
    faults: FaultPlan | None = None
    mailbox: int = 1024
    max_restarts: int = 3
    period_s: float = 60.0
    hang_after_s: float = 30.0
    workspace_limit: int | None = None
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        if self.isolation != "thread":
            raise _invalid("isolation", self.isolation, "is not in this release", 'use "thread"')
        require_whole("mailbox", self.mailbox, 1)
        require_whole("max_restarts", self.max_restarts, 0)
        for name in ("workspace_limit", "memory_limit"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name), 1)
        for name in ("period_s", "hang_after_s"):
            require_seconds(name, getattr(self, name), positive=True)
        if self.hang_after_s > threading.TIMEOUT_MAX:
            raise _invalid(
                "hang_after_s", self.hang_after_s, "is longer than a thread can wait", "1e6 is eleven days"
            )
        _check_faults(self.faults)


def make_options(given: dict[str, Any]) -> Options:
    """Options from keyword arguments. Raises `InvalidRequest`, also for a name that is none."""
    for name, value in given.items():
        if name not in Options.__struct_fields__:
            known = ", ".join(Options.__struct_fields__)
            raise _invalid(name, value, "is no option", f"the options are {known}")
    return Options(**given)


def _check_faults(faults: FaultPlan | None) -> None:
    if faults is None:
        return
    if not isinstance(faults, FaultPlan):
        raise _invalid("faults", faults, "is no FaultPlan", "build one: FaultPlan().at(3, Fault.STICKY)")
    if any(rule.fault is Fault.KILL for rule in faults.rules):
        raise _invalid(
            "faults", "kill", "cannot strike a thread of this process", "use Fault.STICKY, or CRASH_IN_START"
        )


def _invalid(field: str, value: object, problem: str, fix: str) -> InvalidRequest:
    return InvalidRequest(field=field, value=value, problem=problem, fix=fix)
