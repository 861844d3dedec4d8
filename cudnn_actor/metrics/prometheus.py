"""Metrics of services for Prometheus. Needs the extra `prometheus`.

    from prometheus_client import REGISTRY, make_asgi_app
    from cudnn_actor.metrics.prometheus import ServiceCollector

    REGISTRY.register(ServiceCollector(gpu))
    app.mount("/metrics", make_asgi_app())

Nothing runs between two scrapes: a scrape reads what the services have counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from cudnn_actor.broker.request_counts import Histogram, RequestCounts
from cudnn_actor.extras import install_command
from cudnn_actor.isolation.base import StandbyState
from cudnn_actor.protocol.errors import InvalidRequest, ServiceStopped
from cudnn_actor.service.health import HealthState
from cudnn_actor.service.metrics import Metrics

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
        StateSetMetricFamily,
        UnknownMetricFamily,
    )
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ImportError(
        f"metrics for Prometheus need prometheus-client: {install_command('prometheus')}"
    ) from error

__all__ = ["ServiceCollector"]

Rows = Iterable[tuple[Sequence[str], Any]]
"""The values of labels besides `service`, and the value with these."""


class HasMetrics(Protocol):
    """A service, or a handle of one: `CudnnRef`, `CudnnService`, `cudnn_actor.blocking.BlockingRef`."""

    def metrics(self) -> Metrics:
        """The service's metrics. Any thread; never blocks."""


class _Family(NamedTuple):
    """A metric: its kind, name, text and labels, and how its rows are found in the metrics of one service."""

    kind: Callable[..., Any]
    name: str
    text: str
    labels: tuple[str, ...]
    rows: Callable[[Metrics], Rows]


class ServiceCollector:
    """A collector of `prometheus_client` with the metrics of any number of services.

    The label `service` has a service's name, so no two may have the same: `spawn(name=...)`. A service that
    has ended keeps its last numbers until it is removed. Register one collector in a registry, and add
    services to it. Any thread may use it. In a forked child, it skips the services of its parent.

    Parameters
    ----------
    services
        Services, or handles of them.

    Raises
    ------
    InvalidRequest
        Two services have the same name.
    """

    def __init__(self, *services: HasMetrics) -> None:
        self._services: dict[str, HasMetrics] = {}
        for service in services:
            self.add(service)

    def add(self, service: HasMetrics) -> None:
        """Collect the metrics of one more service.

        Raises `InvalidRequest` if another has the same name, and `ServiceStopped` in a forked child.
        """
        name = service.metrics().service
        # One call of a C function: of two threads that add services of one name, one finds the other's.
        if self._services.setdefault(name, service) is not service:
            raise InvalidRequest(
                field="service",
                value=name,
                problem="is the name of another service of this collector",
                fix='spawn one of them with another name: spawn(name="...")',
            )

    def remove(self, service: HasMetrics) -> None:
        """Collect those of a service no more. Nothing happens if it was not added."""
        for name, each in tuple(self._services.items()):
            if each is service:
                self._services.pop(name, None)

    def collect(self) -> Iterator[Metric]:
        """The metrics of all services at this moment. `prometheus_client` calls it at each scrape."""
        found: list[Metrics] = []
        for service in tuple(self._services.values()):
            try:
                found.append(service.metrics())
            except ServiceStopped:  # a forked child
                continue
        for family in _FAMILIES:
            metric = family.kind(family.name, family.text, labels=("service", *family.labels))
            for metrics in found:
                for labels, value in family.rows(metrics):
                    _add(metric, (metrics.service, *labels), value)
            yield metric


def _add(metric: Any, labels: Sequence[str], value: Any) -> None:
    if isinstance(value, Histogram):
        bounds = [*map(repr, map(float, value.bounds)), "+Inf"]
        metric.add_metric(
            labels, list(zip(bounds, itertools.accumulate(value.counts), strict=True)), value.sum
        )
    else:
        metric.add_metric(labels, value)


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


_REQUEST, _MODEL = ("operation", "model"), ("model",)
_FAMILIES = (
    _Family(
        HistogramMetricFamily,
        "cudnn_actor_request_queue_seconds",
        "Time of answered requests from admission to start.",
        _REQUEST,
        _of_requests(lambda each: each.queue),
    ),
    _Family(
        HistogramMetricFamily,
        "cudnn_actor_request_run_seconds",
        "Time of answered requests from start to finish.",
        _REQUEST,
        _of_requests(lambda each: each.run),
    ),
    _Family(
        HistogramMetricFamily,
        "cudnn_actor_request_seconds",
        "Time of answered requests from admission until the caller's process had the answer.",
        _REQUEST,
        _of_requests(lambda each: each.total),
    ),
    _Family(
        CounterMetricFamily,
        "cudnn_actor_requests_failed",
        "Requests answered with an error.",
        _REQUEST,
        _of_requests(lambda each: each.failed),
    ),
    _Family(
        CounterMetricFamily,
        "cudnn_actor_uploaded_bytes",
        "Bytes of arrays on the host that came with requests.",
        _REQUEST,
        _of_requests(lambda each: each.uploaded_bytes),
    ),
    _Family(
        CounterMetricFamily,
        "cudnn_actor_downloaded_bytes",
        "Bytes of arrays on the host that were made for answers.",
        _REQUEST,
        _of_requests(lambda each: each.downloaded_bytes),
    ),
    _Family(
        HistogramMetricFamily,
        "cudnn_actor_batch_samples",
        "Samples in a batch that was put together from requests.",
        _MODEL,
        _of_models(lambda each: each.batches),
    ),
    _Family(
        UnknownMetricFamily,  # a counter's name would end with _total, and Triton's does not
        "nv_inference_exec_count",
        "Runs of a model that have finished; a batch is one.",
        _MODEL,
        _of_models(lambda each: each.finished),
    ),
    _Family(
        CounterMetricFamily,
        "cudnn_actor_requests_withdrawn",
        "Requests that were cancelled before they started.",
        (),
        _of_service(lambda metrics: metrics.withdrawn),
    ),
    _Family(
        CounterMetricFamily,
        "cudnn_actor_requests_expired",
        "Requests that were dropped because their deadline had passed.",
        (),
        _of_service(lambda metrics: metrics.expired),
    ),
    _Family(
        CounterMetricFamily,
        "cudnn_actor_requests_replayed",
        "Requests run again after a crash.",
        (),
        _of_service(lambda metrics: metrics.replayed),
    ),
    _Family(
        CounterMetricFamily,
        "cudnn_actor_restarts",
        "Replacements of the actor, by why the last one had ended.",
        ("cause",),
        lambda metrics: [((cause,), count) for cause, count in metrics.restarts_by_cause.items()],
    ),
    _Family(
        StateSetMetricFamily,
        "cudnn_actor_state",
        "What the service is doing.",
        (),
        _of_service(lambda metrics: {state.value: state is metrics.state for state in HealthState}),
    ),
    _Family(
        StateSetMetricFamily,
        "cudnn_actor_standby",
        "What the standby is doing.",
        (),
        _of_service(lambda metrics: {state.value: state is metrics.standby for state in StandbyState}),
    ),
    _Family(
        GaugeMetricFamily,
        "cudnn_actor_generation",
        "Incarnations of the actor that have become ready.",
        (),
        _of_service(lambda metrics: metrics.generation),
    ),
    _Family(
        GaugeMetricFamily,
        "cudnn_actor_restarts_left",
        "How many more failures would be answered by a restart now.",
        (),
        _of_service(lambda metrics: metrics.restarts_left),
    ),
    _Family(
        GaugeMetricFamily,
        "cudnn_actor_queued_requests",
        "Messages that wait.",
        (),
        _of_service(lambda metrics: metrics.queued),
    ),
    _Family(
        GaugeMetricFamily,
        "cudnn_actor_in_flight_requests",
        "Requests that have been sent to the worker, or have begun, and are not answered.",
        (),
        _of_service(lambda metrics: metrics.in_flight),
    ),
    _Family(
        GaugeMetricFamily,
        "cudnn_actor_plans",
        "Plans in the cache.",
        (),
        _of_service(lambda metrics: metrics.plans.size),
    ),
    _Family(
        CounterMetricFamily,
        "cudnn_actor_plan_hits",
        "Look-ups that found a plan, since the incarnation started.",
        (),
        _of_service(lambda metrics: metrics.plans.hits),
    ),
    _Family(
        CounterMetricFamily,
        "cudnn_actor_plan_misses",
        "Look-ups that found none, since the incarnation started.",
        (),
        _of_service(lambda metrics: metrics.plans.misses),
    ),
    _Family(
        CounterMetricFamily,
        "cudnn_actor_plan_evictions",
        "Plans dropped to make room, since the incarnation started.",
        (),
        _of_service(lambda metrics: metrics.plans.evictions),
    ),
    _Family(
        GaugeMetricFamily,
        "cudnn_actor_buffers",
        "Buffers in use.",
        ("device",),
        lambda metrics: [((metrics.device,), metrics.live_buffers)],
    ),
    _Family(
        GaugeMetricFamily,
        "cudnn_actor_buffer_bytes",
        "Bytes of the buffers in use.",
        ("device",),
        lambda metrics: [((metrics.device,), metrics.live_bytes)],
    ),
    _Family(
        GaugeMetricFamily,
        "cudnn_actor_arena_bytes",
        "Bytes taken from the device, or on the CPU from the system, for buffers.",
        ("device",),
        lambda metrics: [((metrics.device,), metrics.arena_bytes)],
    ),
    _Family(
        GaugeMetricFamily,
        "cudnn_actor_worker_host_bytes",
        "Resident host memory of the worker's process.",
        (),
        _of_service(lambda metrics: metrics.worker_host_bytes),
    ),
)
