"""Metrics of services, and spans of their requests, for OpenTelemetry.

Needs the extra `opentelemetry`, which is its API.

    from cudnn_actor.metrics.opentelemetry import RequestSpans, ServiceMetrics

    ServiceMetrics(gpu)                     # of the global meter provider, which the program has set
    async with RequestSpans(gpu):           # of the global tracer provider
        ...

For metrics, nothing runs between two collections: a collection reads the services' counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import cudnn_actor
from cudnn_actor.broker.request_counts import Histogram
from cudnn_actor.extras import install_command
from cudnn_actor.metrics.metric_table import FAMILIES, Family, Kind, cumulative
from cudnn_actor.metrics.services import HasMetrics, Services
from cudnn_actor.metrics.spans import RequestSpans
from cudnn_actor.service.metrics import Metrics

try:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation, get_meter
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ImportError(
        f"metrics for OpenTelemetry need opentelemetry-api: {install_command('opentelemetry')}"
    ) from error

__all__ = ["RequestSpans", "ServiceMetrics"]

Numbers: TypeAlias = Iterable[tuple[Sequence[str], float]]
"""The values of an instrument's attributes except `service`, and the number with these."""


class ServiceMetrics(Services):
    """Observable instruments with the metrics of any number of services; see `Services`.

    They have their names in Prometheus (docs/observability.md), without the `_total` of counters.
    OpenTelemetry has no observable histograms. So each histogram is three counters: NAME_bucket, whose
    attribute `le` is the upper bound, as in Prometheus; NAME_count; and NAME_sum. A state is a gauge with the
    attribute `state`, which is 1 for the present one.

    Instruments stay for their meter's life. Make one `ServiceMetrics` for a meter provider, and add services
    to it.

    Parameters
    ----------
    services
        Services, or handles of them.
    meter_provider
        The program's meter provider; None for the global one.

    Raises
    ------
    InvalidRequest
        Two services have the same name.
    """

    def __init__(self, *services: HasMetrics, meter_provider: MeterProvider | None = None) -> None:
        super().__init__(*services)
        self._lock = threading.Lock()
        self._found: list[Metrics] = []
        self._observed_by: set[str] | None = None
        """The instruments that have taken `_found`; None before the first reading."""
        meter = get_meter("cudnn_actor", cudnn_actor.__version__, meter_provider)
        for family in FAMILIES:
            for suffix, labels, numbers in _PARTS[family.kind]:
                self._observe(meter, family, suffix, labels, numbers)

    def _observe(
        self,
        meter: Meter,
        family: Family,
        suffix: str,
        more: tuple[str, ...],
        numbers: Callable[[Any], Numbers],
    ) -> None:
        name = family.name + suffix
        keys = ("service", *family.labels, *more)

        def observations(_: CallbackOptions) -> Iterator[Observation]:
            for metrics in self._readings(name):
                for labels, value in family.rows(metrics):
                    for suffix_labels, number in numbers(value):
                        attributes = (metrics.service, *labels, *suffix_labels)
                        yield Observation(number, dict(zip(keys, attributes, strict=True)))

        counts = family.kind not in (Kind.GAUGE, Kind.STATES)
        create = meter.create_observable_counter if counts else meter.create_observable_gauge
        unit = "" if suffix in ("_bucket", "_count") else family.unit
        create(name, callbacks=[observations], unit=unit, description=family.text)

    def _readings(self, name: str) -> list[Metrics]:
        """The metrics for one instrument. Each service is read once for a collection.

        A collection asks each instrument once, and nothing tells when one begins. So a reading serves each
        instrument once, and the first instrument that asks for it again begins the next.
        """
        with self._lock:
            if self._observed_by is None or name in self._observed_by:
                self._found, self._observed_by = self._read(), set()
            self._observed_by.add(name)
            return self._found


def _number(value: float) -> Numbers:
    return [((), value)]


def _buckets(value: Histogram) -> Numbers:
    return [((bound,), count) for bound, count in cumulative(value)]


def _count(value: Histogram) -> Numbers:
    return _number(value.count)


def _sum(value: Histogram) -> Numbers:
    return _number(value.sum)


def _states(value: dict[str, bool]) -> Numbers:
    return [((state,), int(present)) for state, present in value.items()]


_PLAIN = (("", (), _number),)
_PARTS: dict[Kind, Sequence[tuple[str, tuple[str, ...], Callable[[Any], Numbers]]]] = {
    Kind.COUNTER: _PLAIN,
    Kind.TRITON_COUNTER: _PLAIN,
    Kind.GAUGE: _PLAIN,
    Kind.HISTOGRAM: (("_bucket", ("le",), _buckets), ("_count", (), _count), ("_sum", (), _sum)),
    Kind.STATES: (("", ("state",), _states),),
}
"""A kind → the instruments of a metric of that kind: for each, the suffix of its name, the attributes in
addition to the labels, and its numbers."""
