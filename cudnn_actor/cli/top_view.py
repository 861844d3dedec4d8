"""The output of `cudnn-actor top`: rates between two readings, in tables that fit the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from cudnn_actor.broker.request_counts import Histogram, RequestCounts
from cudnn_actor.service.health import HealthState
from cudnn_actor.service.metrics import Metrics

__all__ = ["Reading", "Row", "Since", "View"]


class Reading(NamedTuple):
    """The metrics that a source has given, and when, in `time.monotonic()` seconds."""

    services: tuple[Metrics, ...]
    at_s: float


class Row:
    """The requests of one type or model since the reading before; if there was none, since the service's
    start."""

    def __init__(self, now: RequestCounts, before: RequestCounts | None, seconds: float) -> None:
        self.now = now
        self.seconds = seconds
        """The seconds since the reading before; 0 if there was none."""
        self.queue = _difference(now.queue, None if before is None else before.queue)
        self.run = _difference(now.run, None if before is None else before.run)
        self.total = _difference(now.total, None if before is None else before.total)
        self.batches = now.batches and _difference(now.batches, None if before is None else before.batches)
        self.moved = _increase(_moved_bytes(now), None if before is None else _moved_bytes(before))

    def per_second(self, count: float) -> float | None:
        """A count per second since the reading before; None if there was none."""
        return count / self.seconds if self.seconds > 0 else None

    def rates(self) -> dict[str, float | None]:
        """The rates and latencies that `--json` adds to the counts: counts per second, and latencies in
        seconds; None for unknown ones."""
        found: dict[str, float | None] = {
            "requests_per_second": self.per_second(self.total.count),
            "bytes_per_second": self.per_second(self.moved),
        }
        for name, histogram in (("queue", self.queue), ("run", self.run), ("total", self.total)):
            for percent in (50, 99):
                value = histogram.quantile(percent / 100)
                found[f"{name}_p{percent}"] = value if histogram.count and math.isfinite(value) else None
        return found


class Since(NamedTuple):
    """A reading, and the one before it; None for none."""

    now: Reading
    before: Reading | None = None

    def rows(self, metrics: Metrics) -> list[Row]:
        """The rows of a service, whose metrics are in `now`."""
        earlier: dict[Any, RequestCounts] = {}
        seconds = 0.0
        if self.before is not None:
            seconds = self.now.at_s - self.before.at_s
            for each in self.before.services:
                if each.service == metrics.service:
                    earlier = {(one.operation, one.model): one for one in each.requests}
        return [Row(each, earlier.get((each.operation, each.model)), seconds) for each in metrics.requests]


def _moved_bytes(counts: RequestCounts) -> int:
    return counts.uploaded_bytes + counts.downloaded_bytes


def _increase(now: int, before: int | None) -> int:
    """The increase of a counter. A counter that has fallen began again from 0."""
    return now if before is None or now < before else now - before


def _difference(now: Histogram, before: Histogram | None) -> Histogram:
    if before is None or before.bounds != now.bounds or any(map(int.__lt__, now.counts, before.counts)):
        return now
    counts = tuple(map(int.__sub__, now.counts, before.counts))
    return Histogram(bounds=now.bounds, counts=counts, sum=now.sum - before.sum)


class View:
    """The contents of the screen. They fit any width: columns for which there is no room are left out, the
    last first.

    Parameters
    ----------
    source
        The source, as the user has typed it.
    since
        The last reading; None if there has been none.
    lost
        Why the source gives no metrics now; empty if it does give some.
    """

    def __init__(self, source: str, since: Since | None, lost: str = "") -> None:
        self._source, self._since, self._lost = source, since, lost

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._lost:
            old = "" if self._since is None else "; below is what it said last"
            yield Text(f"{self._source}: lost, and tried again: {self._lost}{old}", style="bold red")
        for metrics in () if self._since is None else self._since.now.services:
            assert self._since is not None
            yield Text.assemble(
                (metrics.service, "bold"),
                f" on {metrics.device}: ",
                (metrics.state.value, "green" if metrics.state is HealthState.READY else "bold yellow"),
            )
            for line in _lines(metrics):
                yield Text(f"  {line}")
            if metrics.requests:
                yield _table(self._since.rows(metrics), options.max_width)


def _lines(metrics: Metrics) -> Iterator[str]:
    causes = ", ".join(f"{count} {cause}" for cause, count in metrics.restarts_by_cause.items() if count)
    plans, looked = metrics.plans, metrics.plans.hits + metrics.plans.misses
    hits = f", {plans.hits / looked:.0%} hits" if looked else ""
    yield (
        f"generation {metrics.generation}, restarts: {causes or 'none'} ({metrics.restarts_left} left), "
        f"standby {metrics.standby.value}"
    )
    yield (
        f"{metrics.in_flight} in flight, {metrics.queued} queued, {metrics.replayed} replayed, "
        f"{metrics.withdrawn} withdrawn, {metrics.expired} expired"
    )
    yield (
        f"{plans.size} plans{hits}; {metrics.live_buffers} buffers: {_bytes(metrics.live_bytes)} of "
        f"{_bytes(metrics.arena_bytes)}; worker: {_bytes(metrics.worker_host_bytes)} of host memory"
    )
    if (memory := metrics.device_memory) is not None:
        age = f", {memory.age_s:.0f} s ago" if memory.age_s >= 1 else ""
        yield f"GPU memory: {_bytes(memory.used_bytes)} of {_bytes(memory.total_bytes)} in use{age}"


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("req/s", lambda row: _number(row.per_second(row.total.count))),
    ("total p99", lambda row: _time(row.total, 0.99)),
    ("total p50", lambda row: _time(row.total, 0.5)),
    ("run p50", lambda row: _time(row.run, 0.5)),
    ("run p99", lambda row: _time(row.run, 0.99)),
    ("queue p50", lambda row: _time(row.queue, 0.5)),
    ("queue p99", lambda row: _time(row.queue, 0.99)),
    ("bytes/s", lambda row: _bytes(row.per_second(row.moved))),
    ("batch", lambda row: f"{row.batches.mean:.1f}" if row.batches and row.batches.count else ""),
    ("finished", lambda row: f"{row.now.finished:,}"),
    ("failed", lambda row: f"{row.now.failed:,}"),
)
"""The columns, the most important first."""
_LEAST_NAME = 8


def _table(rows: list[Row], width: int) -> Table:
    rows = sorted(rows, key=lambda row: (-row.total.count, row.now.operation, row.now.model or ""))
    names = [" ".join(filter(None, (row.now.operation, row.now.model))) for row in rows]
    room = width - 2 - min(max(map(len, names)), max(_LEAST_NAME, width // 3))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 1))
    table.add_column("request", no_wrap=True, overflow="ellipsis", min_width=_LEAST_NAME)
    cells: list[list[str]] = []
    for title, value in _COLUMNS:
        column = [value(row) for row in rows]
        room -= max(len(title), *map(len, column)) + 2
        if room < 0:
            break
        table.add_column(title, justify="right", no_wrap=True)
        cells.append(column)
    for place, name in enumerate(names):
        table.add_row(Text(name), *[column[place] for column in cells])
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _time(histogram: Histogram, fraction: float) -> str:
    """The time that a fraction of the requests did not exceed, as text. It is an upper bound, since a
    histogram is no more precise."""
    if not histogram.count:
        return "-"
    seconds = histogram.quantile(fraction)
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 1000 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def _bytes(count: float | None) -> str:
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.3g} TiB"
