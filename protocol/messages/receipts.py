"""Replies that are records."""

from __future__ import annotations

import msgspec

from cudnn_actor.protocol.types.html_table import record_table
from cudnn_actor.protocol.types.short_repr import short_repr

__all__ = ["CacheStatistics", "PlanCounts", "PlanStatistics", "Receipt", "Statistics"]


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Proof that a request has finished on the device.

    Parameters
    ----------
    request_id
        The service's number for the request; increases in the order of admission.
    generation
        The incarnation of the actor that ran it.
    plan
        Tag of the plan: engine, operation, the first digits of the graph's digest, and on CUDA what cuDNN
        runs; of a loop, that of its body's plan, and `/loop`. The operation's name if no plan is involved.
    queue_us, run_us
        Microseconds from admission to start, and from start to finish.
    """

    request_id: int
    generation: int
    plan: str
    queue_us: float
    run_us: float

    __repr__ = short_repr


class PlanCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The counts of a plan cache that are known without a message. The parameters are as in
    `PlanStatistics`."""

    size: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0

    __repr__ = short_repr


class PlanStatistics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counters of a plan cache, since the incarnation started.

    Parameters
    ----------
    size, capacity
        Plans held, and the most it holds.
    nbytes, capacity_nbytes
        About the bytes of host memory that they take, and the most that they may take.
    hits, misses, evictions
        Look-ups that found a plan or a cached refusal, look-ups that did not, and plans dropped to make room.
    refused
        Graphs cached as unsupported.
    build_s
        Seconds spent building.
    """

    size: int
    capacity: int
    hits: int
    misses: int
    evictions: int
    refused: int
    build_s: float
    nbytes: int
    capacity_nbytes: int

    __repr__ = short_repr


class CacheStatistics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The counts of a process's cache of messages and graphs, by which they are not checked and lowered
    again.

    Parameters
    ----------
    size
        Entries: one for each message, and one for each graph.
    nbytes, capacity_nbytes
        About the bytes that they keep in memory, and the most that they may. A graph that several entries
        share is counted for each.
    evictions
        Entries dropped to make room.
    """

    size: int
    nbytes: int
    capacity_nbytes: int
    evictions: int

    __repr__ = short_repr


class Statistics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service's counters at one moment.

    Parameters
    ----------
    generation
        Incarnations of the actor so far; 1 is the first.
    queued
        Messages waiting in the mailbox.
    finished, failed, withdrawn, expired
        Requests answered with a result, answered with an error, cancelled before they started, and dropped
        because their deadline had passed, since the service started. Requests that were refused when they
        were sent are not counted.
    replayed
        Requests run again after a crash.
    restarts
        Times the supervisor replaced the actor.
    live_buffers, live_bytes, arena_bytes
        Buffers in use, the bytes they hold, and the bytes taken from the system for them.
    plans
        The plan cache.
    dropped_replies
        Replies dropped because the caller's event loop had closed.
    graphs, worker_graphs
        The caches of messages and graphs, of your process and of the worker; None if there is no worker.
    cudnn_version
        The version of the cuDNN that the service has loaded, such as "9.28.1"; None on the CPU.
    converted_bytes
        Bytes of memory for what the engine keeps of models' weights in another form: of host memory on the
        CPU, which keeps half types as float32, of device memory on CUDA.
    """

    generation: int
    queued: int
    finished: int
    failed: int
    withdrawn: int
    expired: int
    replayed: int
    restarts: int
    live_buffers: int
    live_bytes: int
    arena_bytes: int
    plans: PlanStatistics
    dropped_replies: int
    graphs: CacheStatistics
    worker_graphs: CacheStatistics | None = None
    cudnn_version: str | None = None
    converted_bytes: int = 0

    def _repr_html_(self) -> str:
        """The HTML that notebooks show: a table of the counters."""
        return record_table("Statistics", self)

    __repr__ = short_repr
