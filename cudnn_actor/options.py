"""What a service is told when it is spawned."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec

from cudnn_actor.protocol.checks import require_seconds, require_whole
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.supervision import Fault, FaultPlan

__all__ = ["Options", "SpawnOptions", "make_options"]

_ISOLATIONS = (None, "thread", "process")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `spawn`, `start` and `child_spec`.

    Parameters
    ----------
    device
        "auto", "cpu" or "cuda:N".
    isolation
        "process": the actor runs in a worker process, whose death harms nobody; "thread": on a thread of
        this one. None: a process for a GPU, and wherever `standby`, `verify` or a fault asks for one; else
        a thread.
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
    plan_store
        A directory where built plans are kept between processes, which may share it; None for none. What
        lies there is run as native code, so point it only at a directory that nobody but you can write.
        Without effect on the CPU engine, whose plans take no time to build.
    autotune
        Whether `warm` measures every plan that the library offers and keeps the fastest (in `plan_store`
        too, if there is one). Until it is found the library's own first choice serves, as it does for
        requests that were never warmed. Without effect on the CPU engine.
    standby
        1 keeps a second worker ready, which takes over when the first one dies; on a GPU it takes as much
        device memory as that. 0 starts a new one then.
    executable
        Path of the Python that runs the processes of the service; None for the one that runs this process.
        For a frozen application and for embedded Python, where that is not to be found: a Python of the same
        version that has this package and its dependencies.
    verify
        Whether uploaded values are checked after a crash: a checksum of each is kept while nothing else is
        written to its buffer, and a buffer that has another is torn. Uploads and restarts take longer.

    Raises
    ------
    InvalidRequest
        A value is out of its range, or `isolation="thread"` is given what needs a process.
    """

    device: str = "auto"
    isolation: str | None = None
    faults: FaultPlan | None = None
    mailbox: int = 1024
    max_restarts: int = 3
    period_s: float = 60.0
    hang_after_s: float = 30.0
    workspace_limit: int | None = None
    memory_limit: int | None = None
    plan_store: str | os.PathLike[str] | None = None
    autotune: bool = False
    standby: int = 0
    verify: bool = False
    executable: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.isolation not in _ISOLATIONS:
            raise _invalid("isolation", self.isolation, "is unknown", 'use "process" or "thread"')
        require_whole("standby", self.standby, 0)
        if self.standby > 1:
            raise _invalid("standby", self.standby, "is more than one", "use 0 or 1")
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
        for name in ("autotune", "verify"):
            if type(getattr(self, name)) is not bool:
                raise _invalid(name, getattr(self, name), "is no bool", "use True or False")
        _check_plan_store(self.plan_store)
        _check_executable(self.executable)
        _check_faults(self.faults)
        if self.isolation == "thread" and (needy := self._needs_process()) is not None:
            value = getattr(self, needy)
            raise _invalid(needy, value, "needs a worker process", 'use isolation="process", or leave it out')

    def _needs_process(self) -> str | None:
        """The option that only a worker process can honour; None where there is none."""
        if self.standby:
            return "standby"
        if self.verify:
            return "verify"
        kills = self.faults is not None and any(rule.fault is Fault.KILL for rule in self.faults.rules)
        return "faults" if kills else None

    def isolation_on(self, device: str) -> str:
        """What `isolation` stands for on a device."""
        if self.isolation is not None:
            return self.isolation
        return "thread" if device == "cpu" and self._needs_process() is None else "process"


class SpawnOptions(TypedDict, total=False):
    """The fields of `Options` as keyword arguments, for type checkers and completion."""

    device: str
    isolation: str | None
    faults: FaultPlan | None
    mailbox: int
    max_restarts: int
    period_s: float
    hang_after_s: float
    workspace_limit: int | None
    memory_limit: int | None
    plan_store: str | os.PathLike[str] | None
    autotune: bool
    standby: int
    verify: bool
    executable: str | os.PathLike[str] | None


def make_options(given: Mapping[str, Any]) -> Options:
    """Options from keyword arguments. Raises `InvalidRequest`, also for a name that is none."""
    for name, value in given.items():
        if name not in Options.__struct_fields__:
            known = ", ".join(Options.__struct_fields__)
            raise _invalid(name, value, "is no option", f"the options are {known}")
    return Options(**given)


def _check_plan_store(path: object) -> None:
    if path is None:
        return
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise _invalid("plan_store", path, "is no path", "give a directory's, as in 'plans'; None for none")


def _check_executable(path: object) -> None:
    if path is None:
        return
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise _invalid("executable", path, "is no path", "give a Python's, as in '/usr/bin/python3'")
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        raise _invalid(
            "executable", os.fspath(path), "is no program", "give the path of a Python that exists"
        )


def _check_faults(faults: FaultPlan | None) -> None:
    if faults is None:
        return
    if not isinstance(faults, FaultPlan):
        raise _invalid("faults", faults, "is no FaultPlan", "build one: FaultPlan().at(3, Fault.STICKY)")


def _invalid(field: str, value: object, problem: str, fix: str) -> InvalidRequest:
    return InvalidRequest(field=field, value=value, problem=problem, fix=fix)
