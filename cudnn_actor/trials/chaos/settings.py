"""The settings of a run of the chaos harness, and its kinds of faults and of load."""

from __future__ import annotations

import enum

import msgspec

from cudnn_actor.options import Isolation

__all__ = ["NEEDED_LOAD", "OF_A_MODEL", "STALL_S", "FaultKind", "LoadKind", "Settings", "possible_faults"]

STALL_S = 5.0
"""Seconds: a request that takes longer has stalled, whatever faults came meanwhile."""


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


class LoadKind(enum.StrEnum):
    """A kind of caller, or a kind of request."""

    TASKS = "tasks"
    """Tasks of one event loop."""
    LOOPS = "loops"
    """Tasks of further event loops, each on its own thread."""
    THREADS = "threads"
    """Plain threads, each of which runs a new event loop for every few requests."""
    PYKKA = "pykka"
    """Plain threads that ask the service's pykka reference."""
    ALARMS = "alarms"
    """The main thread, with an alarm whose handler raises while it sends."""
    MODELS = "models"
    """Tasks of the first event loop that run the model of `--model`."""
    BATCHED = "batched"
    """Tasks of that loop that send samples to `gpu.batched` of that model."""
    SWAPS = "swaps"
    """Tasks of that loop that run the model while all its weights are overwritten every second."""
    ATTACHED = "attached"
    """Tasks of a further event loop that is attached to the service by its socket, as another process is."""
    DOOMED = "doomed"
    """Tasks of an event loop that is attached to another server, which is killed now and then."""
    UPLOADS = "uploads"
    """All of the above also send arrays of over 256 KiB."""
    CANCELS = "cancels"
    """All callers with an event loop also use cancellations and tiny timeouts."""


OF_A_MODEL = (LoadKind.MODELS, LoadKind.BATCHED, LoadKind.SWAPS)
"""The kinds that need a model."""
NEEDED_LOAD = {FaultKind.KILL_CLIENT: LoadKind.ATTACHED, FaultKind.KILL_SERVER: LoadKind.DOOMED}
"""Faults that only a kind of load feels, and that kind."""
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


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Parameters
    ----------
    seconds
        How long load and faults last. Requests in flight then are waited for: see `deadline_s`.
    engine
        "cpu" or "cuda".
    isolation
        "process" or "thread".
    standby
        Number of standby workers: 0 or 1.
    kill_every
        Mean seconds between two signals to processes. Before a signal to the serving worker they are counted
        from when that worker is ready. The scripted faults come about as often, or more often.
    faults
        The kinds to inject.
    load
        The kinds of callers and of requests.
    tasks
        Asyncio tasks that send requests, on the first event loop. The other loops have fewer.
    model
        The path of an ONNX model that is run, too; empty for none.
    required
        Kinds of load for which it is an error if the model does not allow them. Others are left out then.
    problems
        How many of the load's problems are computed, drawn by the seed; 0 for all. A run uploads the inputs
        of each at its beginning, and reads them back at its end: a short one spends most of its time on that.
    seed
        Determines the programs, which signal comes when, and the injected faults.
    hang_after_s
        The watchdog's limit, in seconds.
    deadline_s
        Requests are lost if they have not ended this many seconds after the end, the last fault that took a
        process, and the last request that ended.
    """

    seconds: float = 30.0
    engine: str = "cpu"
    isolation: Isolation = "process"
    standby: int = 0
    kill_every: float = 0.5
    faults: tuple[FaultKind, ...] = tuple(FaultKind)
    load: tuple[LoadKind, ...] = tuple(LoadKind)
    tasks: int = 8
    model: str = ""
    required: tuple[LoadKind, ...] = ()
    problems: int = 0
    seed: int = 0
    hang_after_s: float = 1.0
    deadline_s: float = 30.0
