"""The tables of a run, for a terminal of 80 columns (those of both isolations: of 100 columns)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table

from cudnn_actor.trials.bench.isolation_sheets import sheets
from cudnn_actor.trials.bench.record import IN_FLIGHT, Hop, Report, Starving
from cudnn_actor.trials.bench.sheet import as_text
from cudnn_actor.trials.measure import median_ratio

__all__ = ["tables"]


def tables(report: Report) -> Iterator[RenderableType]:
    """The tables of everything that was measured."""
    for _, hops in itertools.groupby(report.hops, key=lambda hop: (hop.loop, hop.placement)):
        yield _hop_table(list(hops))
    for sheet in sheets(report):
        yield as_text(sheet)
    if report.convolutions_ms or report.crash_to_next_reply_ms:
        yield _work_table(report)
    for _, rows in itertools.groupby(report.starvation, key=lambda row: (row.loop, row.placement)):
        yield _starvation_table(list(rows))
    yield _others_table(report.others_cpu)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    table.pad_edge, table.collapse_padding = False, True
    for column, name in enumerate(columns):
        table.add_column(name, justify="right" if column else "left", vertical="bottom", no_wrap=not column)
    return table


def _hop_table(hops: list[Hop]) -> Table:
    bare, theirs = hops[0], hops[-1]
    title = f"Round trips: {bare.loop}, threads on {bare.placement}"
    rates = [f"{n}: k/s" for n in IN_FLIGHT]
    table = _table(title, "request", "p50 us", "p99 us", "x hop", *rates, "x pykka", "shared core")
    for hop in hops:
        p50 = [timing.p50_us for timing in hop.one]
        table.add_row(
            hop.subject,
            f"{statistics.median(p50):.1f}",
            f"{statistics.median(timing.p99_us for timing in hop.one):.0f}",
            f"{median_ratio(p50, [timing.p50_us for timing in bare.one]):.2f}",
            *(f"{statistics.median(hop.per_s[n]) / 1e3:.1f}" for n in IN_FLIGHT),
            f"{median_ratio(hop.per_s[64], theirs.per_s[64]):.2f}",
            f"{statistics.fmean(hop.shared_core):.0%}" if hop.shared_core else "?",
        )
    table.caption = "one at a time; k/s: thousands a second by requests in flight; x pykka: at 64"
    return table


def _work_table(report: Report) -> Table:
    table = _table("Work", "ms", "median", "least", "most")
    rows = {f"3x3, 64 filters, 1x64x56x56: {name}": ms for name, ms in report.convolutions_ms.items()}
    rows["sticky error, request to reply"] = report.crash_to_next_reply_ms
    for name, ms in rows.items():
        table.add_row(name, f"{statistics.median(ms):.2f}", f"{min(ms):.2f}", f"{max(ms):.2f}")
    return table


def _starvation_table(rows: list[Starving]) -> Table:
    title = f"Pings from a busy loop: {rows[0].loop}, threads on {rows[0].placement}"
    table = _table(
        title, "the loop's load", "in flight", "lets go", "p50 ms", "p99 ms", "max ms", "k/s", "loads k/s"
    )
    for row in rows:
        times = (row.timing.p50_us, row.timing.p99_us, row.timing.max_us)
        table.add_row(
            row.load,
            str(row.in_flight),
            f"{row.let_go:,}x" if row.lets_go else "never",
            *(_milliseconds(us) for us in times),
            f"{row.per_s / 1e3:.2f}",
            f"{row.callbacks_per_s / 1e3:.1f}",
        )
    return table


def _milliseconds(us: float) -> str:
    return f"{us / 1e3:.2f}" if us < 1e5 else f"{us / 1e3:.0f}"


def _others_table(shares: dict[str, float]) -> Table:
    table = _table("CPU that other processes used meanwhile", "section", "% of the cores")
    for section, share in shares.items():
        table.add_row(section, f"{100 * share:.1f}")
    return table
