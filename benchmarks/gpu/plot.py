"""One picture of a run: how many small convolutions a second, and ResNet-50's beside PyTorch's."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Report
from benchmarks.gpu.resnet import Resnet, name_of
from benchmarks.gpu.resnet_sheets import AIMS, gain
from benchmarks.gpu.sheet import median
from benchmarks.gpu.small import IN_FLIGHT, Small

__all__ = ["draw"]

_OURS, _THEIRS, _AIM = "#1f6f8b", "#9aa5b1", "#333333"
_PLANS = {"heuristic": _OURS, "tuned": "#c8553d"}


def draw(report: Report, path: Path) -> None:
    """Write the picture as PNG. Needs matplotlib. A part that was not measured leaves its half empty."""
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(12, 8), layout="constrained")
    left, right = figure.subplots(1, 2)
    if report.small is not None:
        _throughput(left, report.small)
    if report.resnet is not None:
        _ratios(right, report.resnet)
    name = report.platform.name if report.platform is not None else ""
    figure.suptitle(f"{name}, {report.date[:10]}".strip(", "), fontsize=11)
    figure.savefig(path, dpi=110)


def _throughput(axes: Any, small: Small) -> None:
    bars = [
        (f"actor, {row.loop}: {how}, {n} in flight", median(per_s[n]) or 0.0, _OURS)
        for row in small.requests
        if row.isolation == "thread"
        for how, per_s in (("ask", row.ask_per_s), ("submit", row.submit_per_s))
        for n in IN_FLIGHT
    ]
    bars += [
        (f"actor in a process, {row.loop}: ask, {n} in flight", median(row.ask_per_s[n]) or 0.0, _OURS)
        for row in small.requests
        if row.isolation == "process"
        for n in IN_FLIGHT
    ]
    bars += [(f"loop of {row.name}", median(row.per_s) or 0.0, _THEIRS) for row in small.calls]
    names, rates, colours = zip(*bars, strict=True)
    thousands = [rate / 1e3 for rate in rates]
    drawn = axes.barh(range(len(bars)), thousands, color=colours)
    axes.bar_label(drawn, fmt="%.0f", padding=3, fontsize=8)
    axes.set_yticks(range(len(bars)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(thousands))
    axes.set_xlabel("thousand convolutions a second")
    axes.set_title("64 → 64, 3×3 on 8×8, bf16, N=1", fontsize=10)
    _clear(axes)


def _ratios(axes: Any, resnet: Resnet) -> None:
    for place, series in enumerate(resnet.series):
        aim = AIMS[series.direction] if series.batch == 32 and not series.tf32 else 1.0
        gains = {how: gain(series, f"{how}, alone", "torch, alone") for how in _PLANS}
        known = [(how, value) for how, value in gains.items() if value is not None]
        for turn, (how, value) in enumerate(known):
            at = place + 0.4 * (turn - (len(known) - 1) / 2)
            axes.barh(at, value, height=0.38, color=_PLANS[how])
            axes.text(0.02, at, f"{value:.2f}", color="white", fontsize=7, va="center")
        axes.plot([aim, aim], [place - 0.45, place + 0.45], color=_AIM, linewidth=1.5)
    axes.set_yticks(range(len(resnet.series)), [name_of(series) for series in resnet.series], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as PyTorch, in sum")
    axes.set_title("ResNet-50's 23 convolutions, the device's time", fontsize=10)
    _legend(axes)
    _clear(axes)


def _legend(axes: Any) -> None:
    patches, lines = (importlib.import_module(f"matplotlib.{name}") for name in ("patches", "lines"))
    handles: list[Any] = [patches.Patch(color=colour, label=f"{how} plans") for how, colour in _PLANS.items()]
    handles.append(lines.Line2D([], [], color=_AIM, label="aim"))
    axes.legend(
        handles=handles, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=3, frameon=False
    )


def _clear(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
