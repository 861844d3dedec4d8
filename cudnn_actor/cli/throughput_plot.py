"""A picture, as SVG, of the measurements by `--concurrency`: runs a second, and how long they take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from cudnn_actor.cli.throughput import Throughput

__all__ = ["plot"]

_WIDTH, _HEIGHT = 1200, 420
_TOP, _BOTTOM, _LEFT, _GAP, _RIGHT = 70, 50, 80, 110, 30
_BLUE, _ORANGE = "#4c78a8", "#f58518"
_AXIS, _GRID = "#444444", "#dddddd"
_DASHES = {"p50": "", "p90": "6 4", "p99": "2 3"}


class _Axes(NamedTuple):
    """One of the two diagrams: its place, and the ranges of its axes, which are logarithmic."""

    left: float
    right: float
    xs: tuple[int, ...]
    low: float
    high: float

    def x(self, tasks: int) -> float:
        span = math.log2(self.xs[-1] / self.xs[0]) or 1.0
        middle = 0.5 if len(self.xs) == 1 else math.log2(tasks / self.xs[0]) / span
        return self.left + (self.right - self.left) * middle

    def y(self, value: float) -> float:
        place = math.log(value / self.low) / math.log(self.high / self.low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * place


def plot(title: str, found: Sequence[Throughput]) -> str:
    """Two diagrams over the runs in flight: runs a second, and the percentiles of milliseconds.

    Single runs and batched ones have a colour each. A browser shows the numbers where the pointer is.
    """
    single = [each for each in found if each.mean_batch is None]
    batched = [each for each in found if each.mean_batch is not None]
    kinds = [
        (name, colour, rows)
        for name, colour, rows in (("single runs", _BLUE, single), ("gpu.batched", _ORANGE, batched))
        if rows
    ]
    xs = tuple(sorted({each.in_flight for each in found}))
    middle = (_WIDTH - _LEFT - _GAP - _RIGHT) / 2
    rates = _axes(_LEFT, _LEFT + middle, xs, [each.per_s for each in found])
    times = _axes(
        _WIDTH - _RIGHT - middle,
        _WIDTH - _RIGHT,
        xs,
        [ms for each in found for ms in (each.p50_ms, each.p99_ms)],
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="monospace" font-size="10">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 24, title),
    ]
    for place, (name, colour, _) in enumerate(kinds):
        x = _LEFT + 140 * place
        lines.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{colour}"/>')
        lines.append(_text(x + 18, 44, name))
    for place, (name, dashes) in enumerate(_DASHES.items()):
        begin = times.left + 90 * place
        lines.append(f'<path d="M{begin:.1f} 40 h26" {_stroke(_AXIS, dashes)}/>')
        lines.append(_text(begin + 32, 44, name))
    lines += _frame(rates, "runs a second")
    lines += _frame(times, "milliseconds")
    for _, colour, rows in kinds:
        lines += _curve(rates, rows, lambda each: each.per_s, colour, "")
        for name, dashes in _DASHES.items():
            lines += _curve(times, rows, _percentile(name), colour, dashes)
    return "\n".join([*lines, "</svg>", ""])


def _percentile(name: str) -> Callable[[Throughput], float]:
    return lambda each: float(getattr(each, f"{name}_ms"))


def _axes(left: float, right: float, xs: tuple[int, ...], values: Sequence[float]) -> _Axes:
    """Axes from the last round number below all values to the first one above them."""
    low, high = min(values), max(values)
    ticks = _round_numbers(low, high)
    return _Axes(left, right, xs, ticks[0], ticks[-1])


def _round_numbers(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... from the last that is not above `low` to the first that is above `high`."""
    numbers = [
        digit * 10.0**power
        for power in range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 2)
        for digit in (1, 2, 5)
    ]
    first = max((number for number in numbers if number <= low), default=numbers[0])
    last = next(number for number in numbers if number > high)
    return [number for number in numbers if first <= number <= last]


def _frame(axes: _Axes, name: str) -> list[str]:
    """The axes with their ticks, and grid lines."""
    lines = [_text(axes.left, _TOP - 8, name)]
    for number in _round_numbers(axes.low, axes.high * 0.999):
        y = axes.y(number)
        lines.append(f'<path d="M{axes.left:.1f} {y:.1f} H{axes.right:.1f}" {_stroke(_GRID, "", 1)}/>')
        lines.append(_text(axes.left - 6, y + 3, f"{number:,g}", anchor="end"))
    foot = _HEIGHT - _BOTTOM
    lines.append(f'<path d="M{axes.left:.1f} {_TOP} V{foot} H{axes.right:.1f}" {_stroke(_AXIS, "", 1)}/>')
    lines += [_text(axes.x(tasks), foot + 16, f"{tasks}", anchor="middle") for tasks in axes.xs]
    lines.append(_text((axes.left + axes.right) / 2, foot + 34, "runs in flight", anchor="middle"))
    return lines


def _curve(
    axes: _Axes, rows: Sequence[Throughput], value: Callable[[Throughput], float], colour: str, dashes: str
) -> list[str]:
    places = [(axes.x(each.in_flight), axes.y(value(each))) for each in rows]
    path = " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    lines = [f'<path d="M{path}" {_stroke(colour, dashes)}/>']
    for each, (x, y) in zip(rows, places, strict=True):
        told = f"<title>{_tell(each)}</title>"
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">{told}</circle>')
    return lines


def _tell(each: Throughput) -> str:
    batch = "" if each.mean_batch is None else f"\n{each.mean_batch:.1f} samples a batch"
    times = f"p50 {each.p50_ms:,.2f} ms, p90 {each.p90_ms:,.2f} ms, p99 {each.p99_ms:,.2f} ms"
    return escape(f"{each.in_flight} in flight: {each.per_s:,.1f} a second\n{times}{batch}")


def _stroke(colour: str, dashes: str, width: float = 1.8) -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'fill="none" stroke="{colour}" stroke-width="{width}"{dashed}'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
