"""Places the boxes of a picture in layers, so that all lines lead downwards.

Sugiyama's method: each box gets a layer below those of its predecessors, a line
that passes layers gets a place in each of them, boxes are sorted within their
layers by the mean place of their neighbours, and are moved towards it as far as
there is room.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Line", "Placed", "Point", "Size", "place"]

_SWEEPS, _STRAIGHT = 8, 16.0
_MOST_PASSED, _MORE_PASSED = 10_000, 4
"""The most places that all lines together have in the layers that they pass: the first number, and the second
for each line.

Without a bound, a graph of thousands of operations, where many results are read far below, has millions.
"""
Point = tuple[float, float]
Line = tuple[Hashable, Hashable]
"""The box that a line leads from, and the one below that it leads to."""


class Size(NamedTuple):
    """Width and height, in pixels."""

    width: float
    height: float


@dataclass(frozen=True)
class Placed:
    """The middles of the boxes, for each line the points that it passes, and the size of the whole.

    Lines from one box share their first part: only the shortest begins at the box, and each of the others
    begins where it leaves the one before it. In a large picture, some lines lead straight from box to box,
    and may pass behind other boxes.
    """

    boxes: Mapping[Hashable, Point]
    lines: Sequence[Sequence[Point]]
    width: float
    height: float


def place(boxes: Mapping[Hashable, Size], lines: Sequence[Line], *, gap: Size) -> Placed:
    """Place boxes, with these gaps between them. The lines, from box to box, must make no cycle."""
    return _Layout(boxes, lines, gap).placement()


class _Layout:
    def __init__(self, boxes: Mapping[Hashable, Size], lines: Sequence[Line], gap: Size) -> None:
        self._boxes = dict(boxes)
        self._gap = gap
        self._ranks = _ranks(boxes, lines)
        self._places_left = _MOST_PASSED + _MORE_PASSED * len(lines)
        self._above: dict[Hashable, list[Hashable]] = {}
        self._below: dict[Hashable, list[Hashable]] = {}
        self._reach: dict[Hashable, int] = {}
        """The layer down to which the lines from a box have places."""
        near = sorted(range(len(lines)), key=lambda number: self._ranks[lines[number][1]])
        chains = {number: self._chain(*lines[number]) for number in near}
        self._chains = [chains[number] for number in range(len(lines))]
        self._layers: list[list[Hashable]] = [[] for _ in range(max(self._ranks.values(), default=-1) + 1)]
        for key, rank in self._ranks.items():
            self._layers[rank].append(key)

    def _chain(self, source: Hashable, target: Hashable) -> list[Hashable]:
        """The boxes of a line: its ends, and one without width for each layer that it passes.

        Lines from one box share these in the layers that they both pass.
        """
        ranks = range(self._reach.get(source, self._ranks[source]) + 1, self._ranks[target])
        if len(ranks) > self._places_left:
            return self._link([source, target])
        self._places_left -= len(ranks)
        passed: dict[Hashable, int] = {("line", source, rank): rank for rank in ranks}
        self._boxes |= dict.fromkeys(passed, Size(0, 0))
        self._ranks |= passed
        start = self._trunk(source, ranks.start - 1)
        self._reach[source] = max(self._ranks[target] - 1, ranks.start - 1)
        return self._link([start, *passed, target])

    def _link(self, chain: list[Hashable]) -> list[Hashable]:
        """Note that successive boxes of a line are neighbours, and return the line."""
        for one, other in pairwise(chain):
            self._below.setdefault(one, []).append(other)
            self._above.setdefault(other, []).append(one)
        return chain

    def _trunk(self, source: Hashable, rank: int) -> Hashable:
        """The box in a layer that all lines from a box pass: the box itself in its own layer, else one
        without width."""
        return source if rank == self._ranks[source] else ("line", source, rank)

    def placement(self) -> Placed:
        x = self._columns()
        left = min((x[key] - box.width / 2 for key, box in self._boxes.items()), default=0)
        right = max((x[key] + box.width / 2 for key, box in self._boxes.items()), default=0)
        rows = self._rows()
        places: dict[Hashable, Point] = {}
        for layer, (top, bottom) in zip(self._layers, rows, strict=True):
            places |= {key: (x[key] - left, (top + bottom) / 2) for key in layer}
        lines = []
        for source, *passed, target in self._chains:
            from_trunk = self._boxes[source].width == 0
            y = (
                rows[self._ranks[source]][1]
                if from_trunk
                else places[source][1] + self._boxes[source].height / 2
            )
            points = [(places[source][0], y)]
            for key in passed:
                points += [(places[key][0], y) for y in rows[self._ranks[key]]]
            lines.append([*points, (places[target][0], places[target][1] - self._boxes[target].height / 2)])
        return Placed(places, lines, right - left, rows[-1][1] if rows else 0)

    def _columns(self) -> dict[Hashable, float]:
        """The horizontal position of each box's middle. Sorts the layers."""
        x = dict.fromkeys(self._boxes, 0.0)
        for sweep in range(2 * _SWEEPS):
            down = sweep % 2 == 0
            near = self._above if down else self._below
            for layer in self._layers if down else reversed(self._layers):
                wanted = {key: _mean([x[other] for other in near[key]]) for key in layer if key in near}
                wanted = {key: wanted.get(key, x[key]) for key in layer}
                if sweep < _SWEEPS:
                    layer.sort(key=wanted.__getitem__)
                self._settle(layer, x, wanted)
        return x

    def _settle(self, layer: list[Hashable], x: dict[Hashable, float], wanted: dict[Hashable, float]) -> None:
        """Move the boxes of a layer as near to where they should be as their order and widths allow.

        Least squares: boxes that would overlap form a block, which is placed at the weighted mean. Lines
        weigh more than boxes, so that they stay straight.
        """
        blocks: list[tuple[float, float, int]] = []
        offset, before, offsets = 0.0, 0.0, list[float]()
        for key in layer:
            half = self._boxes[key].width / 2
            offset += before + half + (self._gap.width if offsets else 0)
            offsets.append(offset)
            before = half
            weight, count = 1.0 if half else _STRAIGHT, 1
            mean = wanted[key] - offset
            while blocks and blocks[-1][0] > mean:
                other, other_weight, more = blocks.pop()
                mean = (other * other_weight + mean * weight) / (other_weight + weight)
                weight, count = weight + other_weight, count + more
            blocks.append((mean, weight, count))
        starts = [mean for mean, _, count in blocks for _ in range(count)]
        x.update((key, start + more) for key, start, more in zip(layer, starts, offsets, strict=True))

    def _rows(self) -> list[Point]:
        """The top and the bottom of each layer."""
        rows, y = [], 0.0
        for layer in self._layers:
            height = max(self._boxes[key].height for key in layer)
            rows.append((y, y + height))
            y += height + self._gap.height
        return rows


def _ranks(boxes: Mapping[Hashable, Size], lines: Sequence[Line]) -> dict[Hashable, int]:
    """Each box's layer: below all that lead to it; if none does, just above the first that it leads to."""
    below: dict[Hashable, list[Hashable]] = {}
    missing = dict.fromkeys(boxes, 0)
    for source, target in lines:
        below.setdefault(source, []).append(target)
        missing[target] += 1
    ready = [key for key, count in missing.items() if not count]
    first = list(ready)
    ranks = dict.fromkeys(boxes, 0)
    for key in ready:  # the list grows meanwhile
        for other in below.get(key, ()):
            ranks[other] = max(ranks[other], ranks[key] + 1)
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    return ranks | {key: min(ranks[one] for one in below[key]) - 1 for key in first if key in below}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
