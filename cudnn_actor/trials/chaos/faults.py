"""The kinds of faults of the chaos harness: what each does to a service, and where it is possible.

A new fault of a service has its lines here: a `FaultKind`; how it is carried out, by a signal (`KILLS`,
`HANGS`) or by a fault plan inside the service (`RULES`); what callers or events see of it (`ERRORS`,
`CAUSES`); and when it is not possible (`possible_faults`). `strikes` decides when a fault comes and how often
each kind does, and `attached` kills clients and servers. `cudnn_actor.supervision` has `Fault`, the faults
that a plan can inject into any service.
"""

from __future__ import annotations

import enum

from cudnn_actor.protocol import ExecutionFailed, OutOfMemory
from cudnn_actor.protocol.messages.messages import COMPUTE
from cudnn_actor.supervision import ExitKind, Fault
from cudnn_actor.trials.chaos.load_kinds import LoadKind
from cudnn_actor.trials.chaos.processes import Role

__all__ = [
    "CAUSES",
    "ERRORS",
    "HANGS",
    "KILLS",
    "NEEDED_LOAD",
    "OF_A_WRITE",
    "RULES",
    "TARGETS",
    "FaultKind",
    "possible_faults",
]


class FaultKind(enum.StrEnum):
    """A kind of fault."""

    KILL = "kill"
    """SIGKILL of the serving worker process."""
    HANG = "hang"
    """SIGSTOP of the serving worker process: the watchdog must notice and replace it."""
    KILL_STANDBY = "kill-standby"
    """SIGKILL of a worker that does not serve: the standby, or a starting one."""
    HANG_STANDBY = "hang-standby"
    """SIGSTOP of such a worker."""
    KILL_FORKSERVER = "kill-forkserver"
    """SIGKILL of the process that workers are forked from."""
    HANG_FORKSERVER = "hang-forkserver"
    """SIGSTOP of that process."""
    KILL_BUILDER = "kill-builder"
    """SIGKILL of a process that builds plans; on CUDA only."""
    HANG_BUILDER = "hang-builder"
    """SIGSTOP of such a process."""
    POISON = "poison"
    """A sticky error: the device context dies in the middle of a request."""
    START = "start"
    """A start of a worker fails."""
    FAIL = "fail"
    """One run fails, and the context survives."""
    MEMORY = "memory"
    """One allocation fails."""
    KILL_CLIENT = "kill-client"
    """SIGKILL of a process that is attached to the service, holds buffers and has requests in flight."""
    KILL_SERVER = "kill-server"
    """SIGKILL of a process with a service of its own, to which a caller is attached."""


KILLS = {
    FaultKind.KILL: Role.WORKER,
    FaultKind.KILL_STANDBY: Role.WORKER,
    FaultKind.KILL_FORKSERVER: Role.FORKSERVER,
    FaultKind.KILL_BUILDER: Role.BUILDER,
    FaultKind.KILL_CLIENT: Role.OTHER,
    FaultKind.KILL_SERVER: Role.OTHER,
}
"""The faults that are a SIGKILL, with the role of the process that gets it."""
HANGS = {
    FaultKind.HANG: Role.WORKER,
    FaultKind.HANG_STANDBY: Role.WORKER,
    FaultKind.HANG_FORKSERVER: Role.FORKSERVER,
    FaultKind.HANG_BUILDER: Role.BUILDER,
}
"""The faults that are a SIGSTOP, likewise."""
TARGETS = KILLS | HANGS
_COMPUTE = sorted(message.__name__ for message in COMPUTE)
_FALLIBLE = (*_COMPUTE, "Allocate", "Upload", "Download", "Copy", "Fill", "RunModel")
RULES: dict[FaultKind, tuple[Fault, float, tuple[str | None, ...]]] = {
    FaultKind.POISON: (Fault.STICKY, 0.5, (None,)),
    FaultKind.FAIL: (Fault.FAIL_EXECUTION, 4.0, _FALLIBLE),
    FaultKind.MEMORY: (Fault.OUT_OF_MEMORY, 4.0, _FALLIBLE),
}
"""For each kind that comes with a message: the fault that the plan injects, approximately how often per
signal, and the messages affected; None: all. No `Free` is made to fail: for a buffer that no caller received,
no one would repeat it."""
OF_A_WRITE = {FaultKind.POISON: (Fault.STICKY, 0.25), FaultKind.FAIL: (Fault.FAIL_EXECUTION, 0.1)}
"""Faults of writes of weights, which are rare, with their probabilities: some writes end two workers."""
ERRORS = ((ExecutionFailed, FaultKind.FAIL), (OutOfMemory, FaultKind.MEMORY))
"""The error that a caller gets for each kind of fault that affects one request."""
CAUSES = (
    (ExitKind.CRASH, "INJECTED_STICKY_ERROR", FaultKind.POISON),
    (ExitKind.START_FAILED, "injected crash in start", FaultKind.START),
)
"""The kind and a part of the text of the cause that a restart has if it was injected."""
NEEDED_LOAD = {FaultKind.KILL_CLIENT: LoadKind.ATTACHED, FaultKind.KILL_SERVER: LoadKind.DOOMED}
"""The faults that hit only one kind of load, with that kind."""
_OF_THE_PLAN = (FaultKind.POISON, FaultKind.START, FaultKind.FAIL, FaultKind.MEMORY)
"""Faults that a fault plan injects inside the service. All others are signals to processes."""
_OF_A_STANDBY = (FaultKind.KILL_STANDBY, FaultKind.HANG_STANDBY)
_OF_A_BUILDER = (FaultKind.KILL_BUILDER, FaultKind.HANG_BUILDER)


def possible_faults(engine: str, isolation: str, standby: int) -> dict[FaultKind, str]:
    """Each kind, with the reason why it cannot be injected into such a service; empty if it can."""
    why = dict.fromkeys(FaultKind, "")
    if isolation == "thread":
        signals = [kind for kind in FaultKind if kind not in _OF_THE_PLAN and kind not in NEEDED_LOAD]
        why |= dict.fromkeys(signals, "in thread isolation there is no worker process to send a signal to")
        if engine == "cuda":
            why[FaultKind.POISON] = "in thread isolation on CUDA nothing survives a sticky error"
        return why
    if not standby:
        why |= dict.fromkeys(_OF_A_STANDBY, "there is no standby")
    if engine == "cpu":
        why |= dict.fromkeys(_OF_A_BUILDER, "on the CPU engine no process builds plans")
    return why
