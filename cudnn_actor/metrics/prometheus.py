"""Metrics of services for Prometheus. Needs the extra `prometheus`.

    from prometheus_client import REGISTRY, make_asgi_app
    from cudnn_actor.metrics.prometheus import ServiceCollector

    REGISTRY.register(ServiceCollector(gpu))
    app.mount("/metrics", make_asgi_app())

Nothing runs between two scrapes: a scrape reads the services' counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cudnn_actor.broker.request_counts import Histogram
from cudnn_actor.extras import install_command
from cudnn_actor.metrics.metric_table import FAMILIES, Kind, cumulative
from cudnn_actor.metrics.services import Services

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

_KINDS: dict[Kind, Callable[..., Any]] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.TRITON_COUNTER: UnknownMetricFamily,  # the name of what is said to be a counter gets a `_total`
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
    Kind.STATES: StateSetMetricFamily,
}


class ServiceCollector(Services):
    """A collector of `prometheus_client` with the metrics of any number of services; see `Services`.

    Register one collector in a registry, and add services to it.
    """

    def collect(self) -> Iterator[Metric]:
        """The metrics of all services at this moment. `prometheus_client` calls it at each scrape."""
        found = self._read()
        for family in FAMILIES:
            metric = _KINDS[family.kind](family.name, family.text, labels=("service", *family.labels))
            for metrics in found:
                for labels, value in family.rows(metrics):
                    _add(metric, (metrics.service, *labels), value)
            yield metric


def _add(metric: Any, labels: Sequence[str], value: Any) -> None:
    if isinstance(value, Histogram):
        metric.add_metric(labels, cumulative(value), value.sum)
    else:
        metric.add_metric(labels, value)
