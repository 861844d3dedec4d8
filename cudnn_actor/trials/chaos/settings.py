"""The settings of a run of the chaos harness."""

from __future__ import annotations

import msgspec

from cudnn_actor.options import Isolation
from cudnn_actor.trials.chaos.faults import FaultKind
from cudnn_actor.trials.chaos.load_kinds import LoadKind

__all__ = ["STALL_S", "Settings"]

STALL_S = 5.0
"""Seconds: a request that takes longer has stalled, whatever faults came meanwhile."""


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
