"""Plots a run: the throughput, and how soon the service answered again after each fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import FuncFormatter

from cudnn_actor.cli.chaos.report import Report
from cudnn_actor.cli.chaos.settings import FaultKind
from cudnn_actor.cli.user_error import UserError

__all__ = ["draw"]

_PAGE, _PANEL, _LINE, _DIM, _TEXT = "#0d1117", "#131a23", "#2b3543", "#8b98a9", "#e6edf3"
_BLUE, _GREEN, _RED = "#58b6ff", "#7ee787", "#ff6b6b"
_COLOURS = {
    FaultKind.KILL: _RED,
    FaultKind.HANG: "#ffb454",
    FaultKind.KILL_STANDBY: "#ff9ebb",
    FaultKind.HANG_STANDBY: "#e0a96d",
    FaultKind.KILL_FORKSERVER: "#ff5fd2",
    FaultKind.HANG_FORKSERVER: "#b8894a",
    FaultKind.KILL_BUILDER: "#9aa7ff",
    FaultKind.HANG_BUILDER: "#6f86c9",
    FaultKind.POISON: "#c297ff",
    FaultKind.START: "#f2e66b",
    FaultKind.FAIL: _GREEN,
    FaultKind.MEMORY: "#6be0d4",
}
_MOST_BINS = 600
_STYLE: dict[Any, Any] = {
    "figure.facecolor": _PAGE,
    "savefig.facecolor": _PAGE,
    "axes.facecolor": _PANEL,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _DIM,
    "axes.titlecolor": _TEXT,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.0,
    "axes.titlepad": 8.0,
    "axes.labelsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "text.color": _TEXT,
    "xtick.color": _DIM,
    "ytick.color": _DIM,
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
    "font.family": "DejaVu Sans",  # it comes with matplotlib, so the page looks the same everywhere
}


def draw(report: Report, out: Path) -> None:
    """Draw and write a PNG of 1680 x 1080 pixels. Raises `UserError` if it cannot be written."""
    with mpl.rc_context():
        mpl.rcdefaults()  # the page does not depend on the user's own matplotlib settings
        mpl.rcParams.update(_STYLE)
        figure = Figure(figsize=(14, 9), dpi=120)
        kinds = [kind for kind in report.recovery if report.recovery[kind].faults]
        lanes = 0.3 * max(len(kinds), 1)
        sides = {"left": 0.075, "right": 0.975, "bottom": 0.065, "top": 0.84}
        rows = GridSpec(4, 1, figure, height_ratios=[3.7, lanes, 1.15, 3.3], hspace=0.0, **sides)
        lower = rows[3].subgridspec(1, 2, width_ratios=[3.0, 1.0], wspace=0.0)
        _write_headline(figure, report)
        throughput = figure.add_subplot(rows[0])
        _draw_throughput(throughput, report)
        _draw_strikes(figure.add_subplot(rows[1], sharex=throughput), report, kinds)
        _draw_recoveries(figure.add_subplot(lower[0]), report, kinds)
        try:
            figure.savefig(out, format="png")
        except OSError as error:
            raise UserError(f"--plot {out} cannot be written: {error.strerror or error}") from None


def _write_headline(figure: Figure, report: Report) -> None:
    settings, counts = report.settings, report.counts
    figure.text(0.075, 0.935, "cudnn-actor chaos", fontsize=22, fontweight="bold")
    standby = "with a standby" if settings.standby else "without a standby"
    words = f"{settings.tasks} tasks for {report.seconds:.0f} s on {report.device}"
    apart = f"in {settings.isolation} isolation, {standby}; seed {settings.seed}"
    figure.text(0.075, 0.903, f"{words}, {apart}", fontsize=11.5, color=_DIM)
    facts = [
        (counts["answered"], "requests", _BLUE),
        (counts["faults"], "faults", "#ffb454"),
        (counts["restarts"], "restarts", "#c297ff"),
        (counts["lost"], "lost", _RED if counts["lost"] else _GREEN),
        (counts["wrong"], "wrong", _RED if counts["wrong"] else _GREEN),
    ]
    for right, (number, words, colour) in zip((0.69, 0.775, 0.855, 0.915, 0.975), facts, strict=True):
        figure.text(right, 0.935, f"{number:,}", fontsize=20, fontweight="bold", color=colour, ha="right")
        figure.text(right, 0.905, words, fontsize=10, color=_DIM, ha="right")


def _draw_throughput(axes: Axes, report: Report) -> None:
    """Requests finished per second, over time; with many bins, a few are combined."""
    finished = np.array(report.finished, dtype=float)
    together = -(-len(finished) // _MOST_BINS)
    padded = np.pad(finished, (0, -len(finished) % together)).reshape(-1, together)
    edges = np.arange(len(padded) + 1) * report.bin_s * together
    rate = padded.sum(axis=1) / (report.bin_s * together)
    axes.stairs(rate, edges, fill=True, color=_BLUE, alpha=0.28)
    axes.stairs(rate, edges, color=_BLUE, linewidth=1.0)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(bottom=0)
    axes.set_title("Requests finished per second, every answer checked; below, when each fault came")
    axes.grid(axis="y")
    axes.tick_params(labelbottom=False, bottom=False)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _draw_strikes(axes: Axes, report: Report, kinds: list[FaultKind]) -> None:
    """One lane for each kind of fault, on the time axis of the throughput."""
    for lane, kind in enumerate(kinds):
        at = [fault.at_s for fault in report.faults if fault.kind is kind]
        axes.eventplot(at, lineoffsets=lane, linelengths=0.7, linewidths=1.3, colors=_COLOURS[kind])
    axes.set_yticks(range(len(kinds)), [kind.value for kind in kinds])
    for label, kind in zip(axes.get_yticklabels(), kinds, strict=True):
        label.set_color(_COLOURS[kind])
    axes.set_ylim(max(len(kinds), 1) - 0.4, -0.6)
    axes.set_xlabel("seconds")
    axes.tick_params(axis="y", length=0)


def _draw_recoveries(axes: Axes, report: Report, kinds: list[FaultKind]) -> None:
    """The share of the faults of each kind that were over after a given time."""
    axes.set_title("From a fault to the next finished request: share of the faults that were over by then")
    for kind in kinds:
        took = np.sort([1e3 * each.took_s for each in report.recoveries if each.kind is kind])
        if not len(took):
            continue
        share = np.arange(1, len(took) + 1) / len(took)
        times = report.recovery[kind]
        p50, p90, longest = (_time(each) for each in (times.p50_ms, times.p90_ms, times.max_ms))
        label = f"{len(took):,} x {kind.value}\np50 {p50}   p90 {p90}   max {longest}"
        axes.step(took, share, where="post", color=_COLOURS[kind], linewidth=1.6, label=label)
        axes.plot(took, share, "o", color=_COLOURS[kind], markersize=3.2, markeredgewidth=0)
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    axes.grid()
    if axes.get_legend_handles_labels()[0]:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _time(value)))
        axes.legend(
            loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9.0, labelspacing=1.0
        )


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    if milliseconds < 1:
        return f"{1e3 * milliseconds:.3g} µs"
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds / 1e3:.3g} s"
