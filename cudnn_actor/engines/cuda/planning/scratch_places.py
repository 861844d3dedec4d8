"""The places in the workspace of the tensors between a graph's pieces."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_actor.engines import scratch_places
from cudnn_actor.engines.cuda.planning.partition import Cut
from cudnn_actor.engines.cuda.running.recipe import align
from cudnn_actor.engines.scratch_places import Held

__all__ = ["places", "spans"]


def spans(parts: Cut) -> dict[int, tuple[int, int]]:
    """The first and the last piece that use each tensor, or a view of it."""
    found: dict[int, tuple[int, int]] = {}
    for number, piece in enumerate(parts.pieces):
        for uid in piece.tensors:
            root = parts.stored[uid].root
            found[root] = found.get(root, (number, number))[0], number
    for kept in parts.kept:
        root = parts.stored[kept.y].root
        found[root] = found[root][0], max(found[root][1], kept.gradients)
    return found


def places(parts: Cut, more: Sequence[Held] = ()) -> tuple[dict[int, int], int]:
    """The offset of each tensor between pieces in scratch memory, by uid, and the bytes of all together.

    A tensor keeps its place from the piece that writes it to the last piece that reads it, or a view of it.
    `more`: memory that pieces need besides, of aligned sizes.
    """
    of = spans(parts)
    between = [
        Held(tensor.uid, align(max(tensor.spec.nbytes, 1)), *of[tensor.uid]) for tensor in parts.between
    ]
    return scratch_places.places([*between, *more])
