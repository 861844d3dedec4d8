"""A picture of a measured run: its pieces along the time, as SVG."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from cudnn_actor.protocol.graphs.timing import share_of_device

if TYPE_CHECKING:
    from cudnn_actor.protocol.graphs.explanation import Explanation, PieceOfPlan

__all__ = ["timeline"]

_WIDTH, _BAR, _ROW, _MARGIN, _LETTER = 1200, 30, 58, 24, 6.0
_MOST_ROWS, _A_ROW = 16, 16
"""The most rows, and about how many pieces stand in one."""
_LEAST_US = 1e-3
"""A piece that takes less is drawn as long."""
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac")
"""The colours of the kinds of steps, first of those that take longest; the last is for all other kinds."""


class _Bar(NamedTuple):
    """A part of a piece in one row: from where to where, in microseconds since the row's start."""

    row: int
    start: float
    end: float


def timeline(explanation: Explanation) -> str:
    """The pieces of a measured run from left to right, in rows of equal time.

    A bar is a piece, as long as it takes; its colour is that of what runs it. A browser shows its operations,
    its time, and how near it comes to what the device can do, where the pointer is. An explanation without
    times has no bars.
    """
    timed = [(piece, max(piece.time.us, _LEAST_US)) for piece in explanation.pieces if piece.time is not None]
    total = sum(us for _, us in timed)
    rows = max(1, min(_MOST_ROWS, math.ceil(len(timed) / _A_ROW)))
    scale = (_WIDTH - 2 * _MARGIN) * rows / (total or 1.0)
    kinds: defaultdict[str, float] = defaultdict(float)
    for piece, us in timed:
        kinds[_kind(piece)] += us
    order = sorted(kinds, key=lambda kind: -kinds[kind])
    colours = {kind: _COLOURS[min(place, len(_COLOURS) - 1)] for place, kind in enumerate(order)}
    top = _MARGIN + 22 + 18 * len(order)
    height = top + rows * _ROW + _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="monospace" font-size="10">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(
            _MARGIN,
            _MARGIN,
            f"{'/'.join(explanation.plan.split('/')[:3])}: {total:,.1f} us in "
            f"{len(timed):,} pieces, {total / rows:,.1f} us a row",
        ),
    ]
    for place, kind in enumerate(order):
        y = _MARGIN + 12 + 18 * place
        lines.append(f'<rect x="{_MARGIN}" y="{y}" width="12" height="12" fill="{colours[kind]}"/>')
        lines.append(
            _text(_MARGIN + 18, y + 10, f"{kind}: {kinds[kind]:,.1f} us, {kinds[kind] / (total or 1.0):.1%}")
        )
    begin = 0.0
    for number, (piece, us) in enumerate(timed):
        for bar in _bars(begin, us, (total or 1.0) / rows, rows):
            x, y = _MARGIN + bar.start * scale, top + bar.row * _ROW
            width = max((bar.end - bar.start) * scale, 0.5)
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" stroke="white" '
                f'stroke-width="0.5" fill="{colours[_kind(piece)]}">'
                f"<title>{_tell(number, piece)}</title></rect>"
            )
            lines += _label(piece, x, y, width)
        begin += us
    return "\n".join([*lines, "</svg>", ""])


def _bars(begin: float, us: float, row_us: float, rows: int) -> Iterator[_Bar]:
    """The parts of a piece, which may end in a later row than it begins in."""
    end = begin + us
    for row in range(min(int(begin / row_us), rows - 1), rows):
        last = end if row == rows - 1 else min(end, (row + 1) * row_us)
        yield _Bar(row, begin - row * row_us, last - row * row_us)
        if last >= end:
            return
        begin = last


def _kind(piece: PieceOfPlan) -> str:
    """The engines that run a piece, without the numbers of libraries' plans: "cuDNN", "cuBLASLt + generated
    kernel"."""
    names = (step.partition(" eng")[0] for step in piece.steps)
    return " + ".join(dict.fromkeys(names)) or "nothing"


def _label(piece: PieceOfPlan, x: float, y: float, width: float) -> list[str]:
    """The name of the first operation, below a bar that is wide enough."""
    name = piece.labels[0].partition(" at ")[0] if piece.labels else ""
    room = int(width / _LETTER)
    return [_text(x, y + _BAR + 11, name[:room])] if room >= min(len(name), 4) else []


def _tell(number: int, piece: PieceOfPlan) -> str:
    time = piece.time
    assert time is not None
    share = share_of_device(time)
    of_device = f", {share} of the device" if share else ""
    told = [f"{number}: {time.us:,.1f} us{of_device}", " + ".join(piece.steps), *piece.labels[:12]]
    return escape("\n".join(told))


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
