"""The places in one memory of tensors that are needed for a part of a run each.

The largest are placed first, each as low as it fits: that takes little more memory than
the most that is held at once. Each is compared with all that are held at the same time,
so the work grows with the number of these. Where that is large, as where a gradient
keeps the values of thousands of layers, places are given in the order of the pieces
instead. With that many tensors, this order takes no more memory.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from cudnn_actor.memory.free_list import GRANULARITY, FreeList, round_up

__all__ = ["Held", "places"]

_MOST_COMPARED = 128
"""The most tensors that may be held at the same time as a tensor, on average, where the largest are placed
first."""


class Held(NamedTuple):
    """A tensor: its bytes, and the first and the last piece of a run that use it."""

    uid: int
    size: int
    first: int
    last: int


def places(tensors: Sequence[Held]) -> tuple[dict[int, int], int]:
    """The offset of each tensor, by uid, and the bytes of all together.

    A tensor keeps its place from the first piece that uses it to the last. Sizes are multiples of the
    alignment that is wanted.
    """
    held = sorted(tensors, key=lambda one: -one.size)
    together = _held_together(held, _MOST_COMPARED * len(held))
    offsets = _in_order(held) if together is None else _largest_first(held, together)
    return offsets, max((offsets[one.uid] + one.size for one in held), default=0)


def _held_together(held: Sequence[Held], most: int) -> dict[int, list[Held]] | None:
    """The tensors held at the same time as each tensor, by its uid; None if there are over `most` pairs."""
    found: dict[int, list[Held]] = {one.uid: [] for one in held}
    earlier: list[tuple[int, int, Held]] = []
    for one in sorted(held, key=lambda one: one.first):
        while earlier and earlier[0][0] < one.first:
            heapq.heappop(earlier)
        most -= len(earlier)
        if most < 0:
            return None
        for _, _, other in earlier:
            found[one.uid].append(other)
            found[other.uid].append(one)
        heapq.heappush(earlier, (one.last, one.uid, one))
    return found


def _largest_first(held: Sequence[Held], together: dict[int, list[Held]]) -> dict[int, int]:
    """The offset of each tensor, by uid, if the largest are placed first."""
    offsets: dict[int, int] = {}
    for one in held:
        taken = [(offsets[other.uid], other.size) for other in together[one.uid] if other.uid in offsets]
        offset = 0
        for begin, size in sorted(taken):
            if begin < offset + one.size and offset < begin + size:
                offset = begin + size
        offsets[one.uid] = offset
    return offsets


def _in_order(held: Sequence[Held]) -> dict[int, int]:
    """The offset of each tensor, by uid: in the smallest gap that there is when its first piece runs."""
    offsets: dict[int, int] = {}
    gaps = FreeList(sum(round_up(one.size, GRANULARITY) for one in held))
    ending: defaultdict[int, list[int]] = defaultdict(list)
    running = 0
    for one in sorted(held, key=lambda one: (one.first, -one.size)):
        for piece in range(running, one.first):
            for uid in ending.pop(piece, ()):
                gaps.release(offsets[uid])
        running = one.first
        offset = gaps.allocate(one.size)
        assert offset is not None, "there is room for all at once"
        offsets[one.uid] = offset
        ending[one.last].append(one.uid)
    return offsets
