"""A service's metrics as a record, read without a message."""

from __future__ import annotations

import msgspec

from cudnn_actor.broker.request_counts import RequestCounts
from cudnn_actor.engines.cuda.diagnosis.device_memory import DeviceMemory
from cudnn_actor.isolation.base import StandbyState
from cudnn_actor.protocol.messages.receipts import PlanCounts
from cudnn_actor.protocol.types.html_table import html_table, record_table
from cudnn_actor.protocol.types.short_repr import short_repr
from cudnn_actor.service.health import HealthState

__all__ = ["Metrics", "requests_table"]


class Metrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service's counters, latencies and state at one moment, as far as its own process knows.

    Counters never fall while the service lives, nor when it is started again by a supervisor of yours.

    Parameters
    ----------
    service, device
        The service's name, and "cpu" or "cuda:N".
    state, generation, queued, restarts_left
        As in `Health`.
    in_flight
        Requests that run or wait in the worker; in thread isolation, requests that have begun.
    requests
        Counts and latencies by message type and, for `RunModel`, by model. A type or model of which no
        request has come yet is missing. The 64 models that were used last have entries; the others are
        counted together, as "other".
    finished, failed, withdrawn, expired, replayed
        As in `Statistics`.
    restarts_by_cause
        Every `ExitKind` → how often the actor was replaced for it.
    standby
        What the standby is doing.
    plans
        Counts of the plan cache, since the incarnation started. In process isolation they are as old as the
        worker's last heartbeat: up to a quarter of a second.
    live_buffers, live_bytes, arena_bytes
        As in `Statistics`: memory of the device, which on the CPU engine is memory of the host.
    worker_host_bytes
        Bytes of host memory that the worker's process has, as of its last heartbeat; 0 without a worker.
    standby_host_bytes
        The same for the standby's process.
    device_memory
        The GPU's memory, as a `DeviceMemory`, read when this record is made; if that would mean a longer wait
        for the driver, the value of the record before. None on the CPU, without NVML (`nvidia-ml-py`, which
        the extras of CUDA install), and until NVML is loaded, which the first record begins.
    """

    service: str
    device: str
    state: HealthState
    generation: int
    queued: int
    restarts_left: int
    in_flight: int
    requests: tuple[RequestCounts, ...]
    finished: int
    failed: int
    withdrawn: int
    expired: int
    replayed: int
    restarts_by_cause: dict[str, int]
    standby: StandbyState
    plans: PlanCounts
    live_buffers: int
    live_bytes: int
    arena_bytes: int
    worker_host_bytes: int
    standby_host_bytes: int
    device_memory: DeviceMemory | None

    __repr__ = short_repr

    def _repr_html_(self) -> str:
        """The HTML that notebooks show: tables of the numbers, and of the requests."""
        return f"{record_table(f'Metrics of {self.service!r}', self)}\n{requests_table(self)}"


def requests_table(metrics: Metrics) -> str:
    """The requests as a table in HTML: a row for each message type and model."""
    head = ("message", "model", "finished", "failed", "mean run, ms", "p99 total, ms")
    rows = [
        (
            each.operation,
            each.model or "",
            f"{each.finished:,}",
            f"{each.failed:,}",
            f"{each.run.mean * 1e3:,.3f}",
            f"{each.total.quantile(0.99) * 1e3:,.3f}",
        )
        for each in metrics.requests
    ]
    return html_table("Requests", head, rows)
