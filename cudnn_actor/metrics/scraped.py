"""Reads a scrape of `prometheus.ServiceCollector` back into `Metrics` records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from cudnn_actor.broker.request_counts import Histogram, RequestCounts
from cudnn_actor.engines.cuda.diagnosis.device_memory import DeviceMemory
from cudnn_actor.extras import install_command
from cudnn_actor.isolation.base import StandbyState
from cudnn_actor.protocol.messages.receipts import PlanCounts
from cudnn_actor.service.health import HealthState
from cudnn_actor.service.metrics import Metrics

try:
    from prometheus_client.parser import text_string_to_metric_families
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ImportError(f"this needs prometheus-client: {install_command('prometheus')}") from error

__all__ = ["metrics_of"]

_MOST_SERVICES, _MOST_REQUESTS = 64, 256
_MOST_LETTERS = 100
Labels = frozenset[tuple[str, str]]


def metrics_of(text: str) -> tuple[Metrics, ...]:
    """The metrics of the services in a scrape, in Prometheus's text format, sorted by name.

    Other metrics are skipped, and missing ones count as 0. `finished` and `failed` are summed over the
    requests. The text may be a stranger's: names are cut to 100 letters, of which those that cannot be
    printed are replaced, and no more than 64 services with 256 sorts of requests each are read.

    Raises
    ------
    ValueError
        The text is not in that format.
    """
    by_service: dict[str, _Samples] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.labels.get("service")
                if name is None or not sample.name.startswith(("cudnn_actor_", "nv_")):
                    continue
                if name in by_service or len(by_service) < _MOST_SERVICES:
                    by_service.setdefault(name, _Samples()).add(sample.name, sample.labels, sample.value)
        found = [_service(name, samples) for name, samples in by_service.items() if samples.is_ours]
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise ValueError(f"no metrics in Prometheus's text format: {error}") from error
    return tuple(sorted(found, key=lambda metrics: metrics.service))


class _Samples:
    """The samples of one service: a name → labels → the value."""

    def __init__(self) -> None:
        self._by_name: dict[str, dict[Labels, float]] = defaultdict(dict)
        self._buckets: dict[str, dict[Labels, list[tuple[float, int]]]] = defaultdict(dict)
        """Histograms, without the label `le`: each upper bound with the count up to it."""

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Note a sample."""
        without_service = frozenset((key, each) for key, each in labels.items() if key != "service")
        bound = labels.get("le")
        if bound is None:
            self._by_name[name][without_service] = value
        else:
            kept = without_service - {("le", bound)}
            self._buckets[name].setdefault(kept, []).append((float(bound), int(value)))

    @property
    def is_ours(self) -> bool:
        """Whether a service has published them."""
        return "cudnn_actor_state" in self._by_name

    def of(self, name: str) -> dict[Labels, float]:
        """All samples of a name."""
        return self._by_name.get(name, {})

    def count(self, name: str, **labels: str) -> int:
        """A whole number; 0 if it is missing."""
        return int(self.of(name).get(frozenset(labels.items()), 0))

    def only(self, name: str) -> int:
        """The whole number of a name that has one, whatever its labels; 0 if it is missing."""
        return int(next(iter(self.of(name).values()), 0))

    def label(self, name: str, label: str) -> str:
        """The value of a label of the first sample of a name; empty if there is none."""
        return next((_show(dict(labels).get(label, "")) for labels in self.of(name)), "")

    def present(self, name: str) -> str:
        """The state that is 1."""
        return next((dict(labels)[name] for labels, value in self.of(name).items() if value), "")

    def histogram(self, name: str, **labels: str) -> Histogram | None:
        """A histogram; None if it is missing."""
        wanted = frozenset(labels.items())
        below = sorted(self._buckets.get(f"{name}_bucket", {}).get(wanted, ()))
        if not below:
            return None
        counts = [count for _, count in below]
        each = [count - before for before, count in zip([0, *counts], counts, strict=False)]
        total = self.of(f"{name}_sum").get(wanted, 0.0)
        return Histogram(bounds=tuple(bound for bound, _ in below[:-1]), counts=tuple(each), sum=total)


def _service(name: str, samples: _Samples) -> Metrics:
    sorts = sorted(samples.of("cudnn_actor_request_seconds_count"), key=sorted)[:_MOST_REQUESTS]
    requests = tuple(_requests(samples, dict(labels)) for labels in sorts)
    causes = {
        dict(key)["cause"]: int(value) for key, value in samples.of("cudnn_actor_restarts_total").items()
    }
    count = samples.count
    return Metrics(
        service=_show(name),
        device=samples.label("cudnn_actor_arena_bytes", "device"),
        state=HealthState(samples.present("cudnn_actor_state")),
        generation=count("cudnn_actor_generation"),
        queued=count("cudnn_actor_queued_requests"),
        restarts_left=count("cudnn_actor_restarts_left"),
        in_flight=count("cudnn_actor_in_flight_requests"),
        requests=requests,
        finished=sum(each.finished for each in requests),
        failed=sum(each.failed for each in requests),
        withdrawn=count("cudnn_actor_requests_withdrawn_total"),
        expired=count("cudnn_actor_requests_expired_total"),
        replayed=count("cudnn_actor_requests_replayed_total"),
        restarts_by_cause={_show(cause): number for cause, number in causes.items()},
        standby=StandbyState(samples.present("cudnn_actor_standby")),
        plans=PlanCounts(
            size=count("cudnn_actor_plans"),
            hits=count("cudnn_actor_plan_hits_total"),
            misses=count("cudnn_actor_plan_misses_total"),
            evictions=count("cudnn_actor_plan_evictions_total"),
        ),
        live_buffers=samples.only("cudnn_actor_buffers"),
        live_bytes=samples.only("cudnn_actor_buffer_bytes"),
        arena_bytes=samples.only("cudnn_actor_arena_bytes"),
        worker_host_bytes=count("cudnn_actor_worker_host_bytes"),
        standby_host_bytes=count("cudnn_actor_standby_host_bytes"),
        device_memory=_device_memory(samples),
    )


def _device_memory(samples: _Samples) -> DeviceMemory | None:
    used, total = "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"
    if not samples.of(used):
        return None
    uuid = samples.label(used, "gpu_uuid")
    ages = samples.of("cudnn_actor_gpu_memory_age_seconds").values()
    return DeviceMemory(
        uuid=uuid,
        used_bytes=samples.only(used),
        total_bytes=samples.only(total),
        age_s=next(iter(ages), 0.0),
    )


_NOTHING = Histogram(bounds=(), counts=(0,), sum=0.0)


def _requests(samples: _Samples, labels: dict[str, str]) -> RequestCounts:
    def times(kind: str) -> Histogram:
        return samples.histogram(f"cudnn_actor_request{kind}_seconds", **labels) or _NOTHING

    def count(name: str) -> int:
        return samples.count(name, **labels)

    model = labels["model"]
    return RequestCounts(
        operation=_show(labels["operation"]),
        model=_show(model) or None,
        failed=count("cudnn_actor_requests_failed_total"),
        queue=times("_queue"),
        run=times("_run"),
        total=times(""),
        uploaded_bytes=count("cudnn_actor_uploaded_bytes_total"),
        downloaded_bytes=count("cudnn_actor_downloaded_bytes_total"),
        batches=samples.histogram("cudnn_actor_batch_samples", model=model) if model else None,
    )


def _show(text: str) -> str:
    """A stranger's name as it may be put on a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_MOST_LETTERS])
