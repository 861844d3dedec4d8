"""The demo's picture: all results on one dark page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec, GridSpecFromSubplotSpec, SubplotSpec

from cudnn_actor.cli.demo.filters import Filter
from cudnn_actor.cli.demo.findings import Findings, Kill, ServedKill
from cudnn_actor.cli.demo.recorder import Sample
from cudnn_actor.cli.user_error import UserError

__all__ = ["draw"]

_PAGE, _PANEL, _LINE, _DIM, _TEXT = "#0d1117", "#131a23", "#2b3543", "#8b98a9", "#e6edf3"
_BLUE, _ORANGE, _GREEN, _RED, _VIOLET = "#58b6ff", "#ffb454", "#7ee787", "#ff6b6b", "#c297ff"
_SIGNED = LinearSegmentedColormap.from_list("signed", ["#8fd3ff", "#2f81c7", _PAGE, "#d98324", "#ffdca8"])
_KINDS = {"ConvFwd": _BLUE, "ConvBwdFilter": _ORANGE, "ConvBwdData": _VIOLET}
_HEADROOM = 0.36
"""The part of the latencies' axes above all points: for the stages' names and the note on the kill."""
_LEGEND_ROOM = 1e-4
"""How far below the lowest loss the losses' axis begins: for the legend."""
_NOTE_WIDTH = 0.4
"""The part of the axes' width that the note on the kill takes."""

_STYLE: dict[Any, Any] = {
    "figure.facecolor": _PAGE,
    "axes.facecolor": _PANEL,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _DIM,
    "axes.titlecolor": _TEXT,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titlepad": 6.0,
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "text.color": _TEXT,
    "xtick.color": _DIM,
    "ytick.color": _DIM,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "font.size": 10.0,
    "font.family": "DejaVu Sans",  # matplotlib brings it, so the page looks the same everywhere
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "savefig.facecolor": _PAGE,
}


def draw(findings: Findings, out: Path) -> None:
    """Draw and write a PNG of 1920 x 1440 pixels. Raises `UserError` if it cannot be written."""
    with mpl.rc_context():
        mpl.rcdefaults()  # the page does not depend on the user's own matplotlib settings
        mpl.rcParams.update(_STYLE)
        figure = Figure(figsize=(16, 12), dpi=120)
        rows = GridSpec(
            3,
            1,
            figure,
            height_ratios=[5.3, 2.75, 2.6],
            hspace=0.16,
            left=0.04,
            right=0.98,
            top=0.892,
            bottom=0.05,
        )
        _write_headline(figure, findings)
        _draw_bank(figure, rows[0], findings)
        _draw_shake(figure, rows[1], findings)
        _draw_curves(figure, rows[2], findings)
        try:
            figure.savefig(out, format="png")
        except OSError as error:
            raise UserError(f"--out {out} cannot be written: {error.strerror or error}") from None


def _write_headline(figure: Figure, findings: Findings) -> None:
    figure.text(0.04, 0.952, "cudnn-actor", fontsize=24, fontweight="bold")
    kills = sum([0 if findings.kill is None else findings.kill.kills, findings.served is not None])
    figure.text(
        0.04,
        0.927,
        f"ten filters, both gradients of a convolution, a model, and {kills} kills that no caller noticed; "
        f"on {findings.device}",
        fontsize=12.5,
        color=_DIM,
    )
    facts = [
        (f"{len(findings.all_samples):,}", "requests", _BLUE),
        (str(findings.restarts), "restarts", _ORANGE),
        (str(findings.replayed), "run again", _VIOLET),
        (str(findings.errors), "errors seen by callers", _GREEN),
    ]
    for right, (number, words, colour) in zip((0.68, 0.755, 0.835, 0.98), facts, strict=True):
        figure.text(right, 0.952, number, fontsize=22, fontweight="bold", color=colour, ha="right")
        figure.text(right, 0.929, words, fontsize=10, color=_DIM, ha="right")


# The filter bank.


def _draw_bank(figure: Figure, place: SubplotSpec, findings: Findings) -> None:
    _, height, width = findings.photo.shape
    grid = GridSpecFromSubplotSpec(2, 6, place, width_ratios=[2.12, *[1] * 5], hspace=0.13, wspace=0.05)
    original = figure.add_subplot(grid[:, 0])
    original.set_anchor("NW")
    _show(original, findings.photo, f"the photograph, {width} x {height}")
    for number, (each, response) in enumerate(findings.responses):
        axes = figure.add_subplot(grid[number // 5, 1 + number % 5])
        _draw_response(axes, each, response)


def _draw_response(axes: Axes, each: Filter, response: np.ndarray) -> None:
    signed = not each.colour and not each.bias
    _show(axes, response, each.name, limit=_limit(response) if signed else None)
    icon = axes.inset_axes((0.72, 0.0, 0.28, 0.28), aspect="equal", anchor="SE")
    _show_taps(icon, each.taps)


def _limit(response: np.ndarray) -> float:
    """The magnitude that is shown brightest, chosen so that a few extremes do not darken the rest."""
    return max(float(np.percentile(np.abs(response), 97.5)), 1e-6)


# The camera shake.


def _draw_shake(figure: Figure, place: SubplotSpec, findings: Findings) -> None:
    grid = GridSpecFromSubplotSpec(1, 6, place, wspace=0.07)
    axes = [figure.add_subplot(grid[0, number]) for number in range(6)]
    _show_numbers(axes[0], findings.true_taps, "the camera shake, in percent")
    _show_numbers(axes[1], findings.found_taps, f"learned, to within {findings.filter_error:.0e}")
    _show(axes[2], findings.shaken, f"shaken: {findings.quality_db(findings.shaken):.1f} dB")
    _show(axes[3], findings.restored, f"restored: {findings.quality_db(findings.restored):.1f} dB")
    _show(axes[4], findings.sharp, "as it was")
    left = np.abs(findings.restored - findings.sharp).mean(axis=0)
    _show(axes[5], 10 * left, "what is left of the error, x10", limit=1.0)


def _show_numbers(axes: Axes, taps: np.ndarray, title: str) -> None:
    _show_taps(axes, taps)
    axes.set_title(title)
    for (row, column), tap in np.ndenumerate(taps):
        words, colour = f"{100 * tap:.0f}", _TEXT if abs(tap) < 0.7 * np.abs(taps).max() else _PAGE
        if round(100 * abs(tap)):
            axes.text(column, row, words, ha="center", va="center", fontsize=9, color=colour)


def _show_taps(axes: Axes, taps: np.ndarray) -> None:
    most = float(np.abs(taps).max())
    axes.imshow(taps, cmap=_SIGNED, vmin=-most, vmax=most)
    _frame(axes)


def _show(axes: Axes, image: np.ndarray, title: str, limit: float | None = None) -> None:
    """Show an image: (3, height, width) in colour; (height, width) in grey or, with `limit`, as signed."""
    axes.set_title(title)
    if limit is not None:
        axes.imshow(image, cmap=_SIGNED, vmin=-limit, vmax=limit)
    elif image.ndim == 3:
        axes.imshow(np.clip(image.transpose(1, 2, 0), 0, 1))
    else:
        axes.imshow(np.clip(image, 0, 1), cmap="gray", vmin=0, vmax=1)
    _frame(axes)


def _frame(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(True)


# The curves.


def _draw_curves(figure: Figure, place: SubplotSpec, findings: Findings) -> None:
    grid = GridSpecFromSubplotSpec(1, 3, place, width_ratios=[0.8, 1.45, 0.9], wspace=0.13)
    _draw_losses(figure.add_subplot(grid[0, 0]), findings)
    _draw_latencies(figure.add_subplot(grid[0, 1]), findings)
    if findings.served is not None:
        _draw_served(figure.add_subplot(grid[0, 2]), findings.served)


def _draw_losses(axes: Axes, findings: Findings) -> None:
    axes.set_title("loss: mean squared error of what was predicted")
    steps = np.arange(1, 1 + len(findings.filter_losses) + len(findings.photo_losses))
    turn = len(findings.filter_losses)
    axes.semilogy(steps[:turn], findings.filter_losses, color=_ORANGE, lw=2, label="filter: ConvBwdFilter")
    axes.semilogy(steps[turn:], findings.photo_losses, color=_VIOLET, lw=2, label="photograph: ConvBwdData")
    if findings.kill is not None:
        step = findings.kill.step
        axes.axvline(step, color=_RED, lw=1.2, ls=(0, (4, 3)))
        axes.plot(step, findings.filter_losses[step - 1], "o", color=_RED, ms=7, mec=_PAGE)
        axes.annotate(
            f"kill at\nstep {step}:\nit goes on",  # short lines: there is little room beside the axis
            (step, findings.filter_losses[step - 1]),
            xytext=(-8, -12),
            textcoords="offset points",
            ha="right",
            va="top",
            color=_RED,
            fontsize=9,
        )
    axes.set_ylim(bottom=min(*findings.filter_losses, *findings.photo_losses) * _LEGEND_ROOM)
    axes.set_xlabel("step")
    axes.grid(visible=True, axis="y")
    axes.legend(loc="lower right")


def _draw_latencies(axes: Axes, findings: Findings) -> None:
    axes.set_title("latency, as callers saw it")
    kinds = [_name(sample) for sample in findings.samples]
    latencies = np.array([sample.latency_s for sample in findings.samples]) * 1e3
    for kind in dict.fromkeys(kinds):
        chosen = np.flatnonzero(np.array(kinds) == kind)
        dot = {"ms": 4.5, "alpha": 0.85} if kind in _KINDS else {"ms": 2.5, "alpha": 0.5}
        axes.semilogy(chosen, latencies[chosen], ".", color=_KINDS.get(kind, _DIM), mew=0, label=kind, **dot)
    low, high = latencies.min() / 2, latencies.max() * 1.5
    axes.set_ylim(low, high * (high / low) ** (_HEADROOM / (1 - _HEADROOM)))
    axes.margins(x=0.01)
    _name_stages(axes, findings.samples)
    if findings.kill is not None:
        _mark_kill(axes, findings.kill, findings.samples)
    axes.set_xlabel("request")
    axes.set_ylabel("milliseconds")
    axes.grid(visible=True, axis="y")
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.01, 0.98),
        ncols=4,
        markerscale=2.4,
        handletextpad=0.1,
        columnspacing=1.2,
    )


def _name(sample: Sample) -> str:
    return sample.kind if sample.kind in _KINDS else "memory"


def _name_stages(axes: Axes, samples: list[Sample]) -> None:
    """Draw a line where a stage begins, and its name beside it if there is room.

    Stages that run side by side begin together: they share a line.
    """
    stages, room = [sample.stage for sample in samples], 0.15 * len(samples)
    begun: list[tuple[int, list[str]]] = []
    for stage in dict.fromkeys(stages):
        first = stages.index(stage)
        if not begun or first - begun[-1][0] >= room:
            begun.append((first, []))
        if stages.count(stage) >= room:
            begun[-1][1].append(stage)
    for first, names in begun:
        axes.axvline(first - 0.5, color=_LINE, lw=1)
        axes.annotate(
            ", ".join(names),
            (first, 1),
            xycoords=("data", "axes fraction"),
            xytext=(2, -11),
            textcoords="offset points",
            color=_DIM,
            fontsize=9,
        )


def _mark_kill(axes: Axes, kill: Kill, samples: list[Sample]) -> None:
    """Mark the first answer after the kill, among the requests that were sent before it."""
    for number, sample in enumerate(samples):
        if sample.began_s <= kill.killed_s < sample.began_s + sample.latency_s:
            latency, late = sample.latency_s * 1e3, number > (1 - _NOTE_WIDTH) * len(samples)
            axes.axvline(number, ymax=0.9, color=_RED, lw=1.2, ls=(0, (4, 3)), zorder=1)
            axes.plot(number, latency, "o", color=_RED, ms=7, mec=_PAGE)
            axes.annotate(
                f"kill -9 {kill.pid}, with {kill.in_flight} requests in flight: the next\n"
                f"answer, by generation {kill.generation}, comes {kill.answered_s * 1e3:.0f} ms later;\n"
                f"{kill.run_again} had begun and ran again, and no request is lost",
                (number, 1),
                xycoords=("data", "axes fraction"),
                xytext=(-6, -16) if late else (6, -16),  # below the stages' names
                textcoords="offset points",
                ha="right" if late else "left",
                va="top",
                color=_RED,
                fontsize=9,
                bbox={"facecolor": _PANEL, "edgecolor": "none", "pad": 1.0},  # hides the grid behind it
            )
            return


def _draw_served(axes: Axes, served: ServedKill) -> None:
    """The latencies of a model's batched requests, by when they were sent, around the kill."""
    axes.set_title(f"a model, batched, for {served.callers} callers")
    began = np.array([sample.began_s - served.killed_s for sample in served.samples]) * 1e3
    latency = np.array([sample.latency_s for sample in served.samples]) * 1e3
    waited = (began <= 0) & (began + latency > 0)
    for chosen, colour, size in ((~waited, _BLUE, 3), (waited, _RED, 6)):
        axes.semilogy(began[chosen], latency[chosen], ".", color=colour, ms=size, mew=0, alpha=0.85)
    low, high = latency.min() / 2, latency.max() * 1.5
    axes.set_ylim(low, high * (high / low) ** (_HEADROOM / (1 - _HEADROOM)))
    axes.axvline(0, ymax=0.9, color=_RED, lw=1.2, ls=(0, (4, 3)), zorder=1)
    axes.annotate(
        f"kill -9 amid {served.in_flight} requests:\n"
        f"next answer {served.answered_s * 1e3:.0f} ms later,\n"
        f"none lost, {served.wrong or 'none'} wrong",
        (0, 1),
        xycoords=("data", "axes fraction"),
        xytext=(6, -6),
        textcoords="offset points",
        va="top",
        color=_RED,
        fontsize=9,
        bbox={"facecolor": _PANEL, "edgecolor": "none", "pad": 1.0},
    )
    axes.set_xlabel("sent, in milliseconds from the kill")
    axes.set_ylabel("milliseconds")
    axes.grid(visible=True, axis="y")
