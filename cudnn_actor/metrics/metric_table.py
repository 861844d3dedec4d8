"""The table of all metrics, from which each face takes their names, texts and values.

Only this table has the name of each metric, and the place of its value in a `Metrics` record. Prometheus,
OpenTelemetry, `cudnn-actor top` and docs/observability.md take them from here.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from cudnn_actor.broker.request_counts import Histogram, RequestCounts
from cudnn_actor.engines.cuda.diagnosis.device_memory import DeviceMemory
from cudnn_actor.isolation.base import StandbyState
from cudnn_actor.service.health import HealthState
from cudnn_actor.service.metrics import Metrics

__all__ = ["FAMILIES", "Family", "Kind", "Rows", "cumulative", "markdown_table"]

Rows: TypeAlias = Iterable[tuple[Sequence[str], Any]]
"""The values of the labels except `service`, and the metric's value with these."""


class Kind(enum.Enum):
    """The kind of a metric's values."""

    COUNTER = "counter"
    """A number that never falls. Prometheus's names of these end with `_total`."""
    TRITON_COUNTER = "counter, by Triton's name"
    """A counter under a name of Triton's, which does not end with `_total`."""
    GAUGE = "gauge"
    """A number."""
    HISTOGRAM = "histogram"
    """A `Histogram`."""
    STATES = "states"
    """A dict of states → whether it is the present one."""


class Family(NamedTuple):
    """A metric: its kind, name, text and labels, and how its rows are found in the metrics of one service.

    Each row also has the label `service`, with the service's name.
    """

    kind: Kind
    name: str
    text: str
    labels: tuple[str, ...]
    rows: Callable[[Metrics], Rows]

    @property
    def unit(self) -> str:
        """The unit by its sign in UCUM, after the name's last word: "s", "By"; "" for a plain number."""
        return _UNITS.get(self.name.rpartition("_")[2], "")

    @property
    def exposed_name(self) -> str:
        """The name under which Prometheus's client exposes it, which adds `_total` to counters."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


_UNITS = {"seconds": "s", "bytes": "By"}


def cumulative(histogram: Histogram) -> list[tuple[str, int]]:
    """The upper bounds as text, "+Inf" the last, each with the count of numbers up to it."""
    bounds = [*map(repr, map(float, histogram.bounds)), "+Inf"]
    return list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))


def markdown_table() -> str:
    """The table of docs/observability.md."""
    lines = ["| metric | kind | labels besides `service` | what |", "| --- | --- | --- | --- |"]
    for family in FAMILIES:
        labels = family.labels
        if family.kind is Kind.STATES:
            labels = (*labels, family.name)
        listed = ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| `{family.exposed_name}` | {family.kind.value} | {listed} | {family.text} |")
    return "\n".join(lines) + "\n"


def _of_requests(value: Callable[[RequestCounts], Any]) -> Callable[[Metrics], Rows]:
    """A row for each message type and model."""

    def rows(metrics: Metrics) -> Rows:
        return [((each.operation, each.model or ""), value(each)) for each in metrics.requests]

    return rows


def _of_models(value: Callable[[RequestCounts], Any]) -> Callable[[Metrics], Rows]:
    """A row for each model."""

    def rows(metrics: Metrics) -> Rows:
        return [((each.model,), value(each)) for each in metrics.requests if each.model is not None]

    return rows


def _of_service(value: Callable[[Metrics], Any]) -> Callable[[Metrics], Rows]:
    """One row."""
    return lambda metrics: [((), value(metrics))]


def _of_gpu(value: Callable[[DeviceMemory], float]) -> Callable[[Metrics], Rows]:
    """One row, if the GPU's memory is known."""

    def rows(metrics: Metrics) -> Rows:
        memory = metrics.device_memory
        return [] if memory is None else [((memory.uuid,), value(memory))]

    return rows


_REQUEST, _MODEL = ("operation", "model"), ("model",)
FAMILIES: tuple[Family, ...] = (
    Family(
        Kind.HISTOGRAM,
        "cudnn_actor_request_queue_seconds",
        "Time of answered requests from admission to start.",
        _REQUEST,
        _of_requests(lambda each: each.queue),
    ),
    Family(
        Kind.HISTOGRAM,
        "cudnn_actor_request_run_seconds",
        "Time of answered requests from start to finish.",
        _REQUEST,
        _of_requests(lambda each: each.run),
    ),
    Family(
        Kind.HISTOGRAM,
        "cudnn_actor_request_seconds",
        "Time of answered requests from admission until the caller's process had the answer.",
        _REQUEST,
        _of_requests(lambda each: each.total),
    ),
    Family(
        Kind.COUNTER,
        "cudnn_actor_requests_failed",
        "Requests answered with an error.",
        _REQUEST,
        _of_requests(lambda each: each.failed),
    ),
    Family(
        Kind.COUNTER,
        "cudnn_actor_uploaded_bytes",
        "Bytes of arrays on the host that came with requests.",
        _REQUEST,
        _of_requests(lambda each: each.uploaded_bytes),
    ),
    Family(
        Kind.COUNTER,
        "cudnn_actor_downloaded_bytes",
        "Bytes of arrays on the host that were made for answers.",
        _REQUEST,
        _of_requests(lambda each: each.downloaded_bytes),
    ),
    Family(
        Kind.HISTOGRAM,
        "cudnn_actor_batch_samples",
        "Samples in a batch that was put together from requests.",
        _MODEL,
        _of_models(lambda each: each.batches),
    ),
    Family(
        Kind.TRITON_COUNTER,
        "nv_inference_exec_count",
        "Runs of a model that have finished; a batch is one.",
        _MODEL,
        _of_models(lambda each: each.finished),
    ),
    Family(
        Kind.COUNTER,
        "cudnn_actor_requests_withdrawn",
        "Requests that were cancelled before they started.",
        (),
        _of_service(lambda metrics: metrics.withdrawn),
    ),
    Family(
        Kind.COUNTER,
        "cudnn_actor_requests_expired",
        "Requests that were dropped because their deadline had passed.",
        (),
        _of_service(lambda metrics: metrics.expired),
    ),
    Family(
        Kind.COUNTER,
        "cudnn_actor_requests_replayed",
        "Requests run again after a crash.",
        (),
        _of_service(lambda metrics: metrics.replayed),
    ),
    Family(
        Kind.COUNTER,
        "cudnn_actor_restarts",
        "Replacements of the actor, by why the last one had ended.",
        ("cause",),
        lambda metrics: [((cause,), count) for cause, count in metrics.restarts_by_cause.items()],
    ),
    Family(
        Kind.STATES,
        "cudnn_actor_state",
        "What the service is doing.",
        (),
        _of_service(lambda metrics: {state.value: state is metrics.state for state in HealthState}),
    ),
    Family(
        Kind.STATES,
        "cudnn_actor_standby",
        "What the standby is doing.",
        (),
        _of_service(lambda metrics: {state.value: state is metrics.standby for state in StandbyState}),
    ),
    Family(
        Kind.GAUGE,
        "cudnn_actor_generation",
        "Incarnations of the actor that have become ready.",
        (),
        _of_service(lambda metrics: metrics.generation),
    ),
    Family(
        Kind.GAUGE,
        "cudnn_actor_restarts_left",
        "How many more failures would be answered by a restart now.",
        (),
        _of_service(lambda metrics: metrics.restarts_left),
    ),
    Family(
        Kind.GAUGE,
        "cudnn_actor_queued_requests",
        "Messages that wait.",
        (),
        _of_service(lambda metrics: metrics.queued),
    ),
    Family(
        Kind.GAUGE,
        "cudnn_actor_in_flight_requests",
        "Requests that have been sent to the worker, or have begun, and are not answered.",
        (),
        _of_service(lambda metrics: metrics.in_flight),
    ),
    Family(
        Kind.GAUGE,
        "cudnn_actor_plans",
        "Plans in the cache.",
        (),
        _of_service(lambda metrics: metrics.plans.size),
    ),
    Family(
        Kind.COUNTER,
        "cudnn_actor_plan_hits",
        "Look-ups that found a plan, since the incarnation started.",
        (),
        _of_service(lambda metrics: metrics.plans.hits),
    ),
    Family(
        Kind.COUNTER,
        "cudnn_actor_plan_misses",
        "Look-ups that found none, since the incarnation started.",
        (),
        _of_service(lambda metrics: metrics.plans.misses),
    ),
    Family(
        Kind.COUNTER,
        "cudnn_actor_plan_evictions",
        "Plans dropped to make room, since the incarnation started.",
        (),
        _of_service(lambda metrics: metrics.plans.evictions),
    ),
    Family(
        Kind.GAUGE,
        "cudnn_actor_buffers",
        "Buffers in use.",
        ("device",),
        lambda metrics: [((metrics.device,), metrics.live_buffers)],
    ),
    Family(
        Kind.GAUGE,
        "cudnn_actor_buffer_bytes",
        "Bytes of the buffers in use.",
        ("device",),
        lambda metrics: [((metrics.device,), metrics.live_bytes)],
    ),
    Family(
        Kind.GAUGE,
        "cudnn_actor_arena_bytes",
        "Bytes taken from the device, or on the CPU from the system, for buffers.",
        ("device",),
        lambda metrics: [((metrics.device,), metrics.arena_bytes)],
    ),
    Family(
        Kind.GAUGE,
        "cudnn_actor_worker_host_bytes",
        "Resident host memory of the worker's process.",
        (),
        _of_service(lambda metrics: metrics.worker_host_bytes),
    ),
    Family(
        Kind.GAUGE,
        "cudnn_actor_standby_host_bytes",
        "Resident host memory of the standby's process.",
        (),
        _of_service(lambda metrics: metrics.standby_host_bytes),
    ),
    Family(
        Kind.GAUGE,
        "nv_gpu_memory_used_bytes",
        "GPU memory that all processes use.",
        ("gpu_uuid",),
        _of_gpu(lambda memory: memory.used_bytes),
    ),
    Family(
        Kind.GAUGE,
        "nv_gpu_memory_total_bytes",
        "GPU memory in all.",
        ("gpu_uuid",),
        _of_gpu(lambda memory: memory.total_bytes),
    ),
    Family(
        Kind.GAUGE,
        "cudnn_actor_gpu_memory_age_seconds",
        "How long ago the driver has said these two: 0 unless it hangs.",
        ("gpu_uuid",),
        _of_gpu(lambda memory: memory.age_s),
    ),
)
