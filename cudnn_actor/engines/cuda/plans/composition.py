"""Joins the plans of a graph's pieces into one plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from cudnn_actor.engines.cuda.plans.partition import Cut
from cudnn_actor.engines.cuda.plans.plan import CudaPlan
from cudnn_actor.engines.cuda.plans.recipe import (
    Buffer,
    Number,
    Scratch,
    Source,
    Step,
    Tuning,
    aligned,
)
from cudnn_actor.engines.cuda.plans.steps import finish
from cudnn_actor.protocol.graph import OperationGraph

__all__ = ["compose"]


def compose(graph: OperationGraph, parts: Cut, build: Callable[[OperationGraph], CudaPlan]) -> CudaPlan:
    """A plan that runs a graph's pieces one after the other.

    `build` makes a piece's plan, once for equal pieces. Raises as `build`.
    """
    plans: dict[str, CudaPlan] = {}
    for piece in parts.pieces:
        digest = piece.graph.digest()
        if digest not in plans:
            plans[digest] = build(piece.graph)
    places, between = _places(parts)
    known: dict[int, Source] = {uid: Buffer(number) for number, uid in enumerate(graph.bound)}
    known |= {uid: Scratch(offset) for uid, offset in places.items()}
    scalars = {uid: number for number, uid in enumerate(graph.scalars)}
    steps: list[Step] = []
    graphs: list[Any] = []
    most = 0
    for piece in parts.pieces:
        plan = plans[piece.graph.digest()]
        buffers = [_moved(known[parts.stored[uid].root], parts.stored[uid].offset) for uid in piece.tensors]
        numbers = [scalars[uid] for uid in piece.graph.scalars]
        steps += [_placed(step, buffers, numbers, between) for step in plan.recipe.steps]
        graphs += plan.graphs
        most = max(most, plan.recipe.scratch)
    plan = finish(graph, steps, graphs, between + most, None)
    tried = all(plan.tried for plan in plans.values())
    recipe = msgspec.structs.replace(plan.recipe, tried=tried, tuning=_tuning(plans.values()))
    return CudaPlan(recipe, plan.graphs)


def _places(parts: Cut) -> tuple[dict[int, int], int]:
    """Where in the workspace each tensor between pieces lies, and how many bytes they take together.

    A tensor has its place from the piece that writes it to the last that reads it, or a view of it.
    """
    spans: dict[int, list[int]] = {}
    for number, piece in enumerate(parts.pieces):
        for uid in piece.tensors:
            spans.setdefault(parts.stored[uid].root, [number, number])[1] = number
    offsets: dict[int, int] = {}
    taken: list[tuple[int, int, int, int]] = []
    """(offset, end, first piece, last piece) of each tensor that has a place."""
    total = 0
    for tensor in sorted(parts.between, key=lambda tensor: -tensor.spec.nbytes):
        first, last = spans[tensor.uid]
        size = aligned(max(tensor.spec.nbytes, 1))
        offset = 0
        for begin, end, since, until in sorted(taken):
            if since <= last and first <= until and begin < offset + size and offset < end:
                offset = end
        taken.append((offset, offset + size, first, last))
        offsets[tensor.uid] = offset
        total = max(total, offset + size)
    return offsets, total


def _moved(source: Source, offset: int) -> Source:
    if not offset:
        return source
    assert isinstance(source, Buffer | Scratch), "a number has no views"
    return msgspec.structs.replace(source, offset=source.offset + offset)


def _placed(step: Step, buffers: Sequence[Source], numbers: Sequence[int], scratch: int) -> Step:
    """A piece's step as a step of the whole."""

    def place(source: Source) -> Source:
        match source:
            case Buffer(number=number, offset=offset):
                return _moved(buffers[number], offset)
            case Number(number=number, double=double):
                return Number(numbers[number], double)
            case _:
                return Scratch(source.offset + scratch)

    placed: Step = msgspec.structs.replace(step, sources=tuple(map(place, step.sources)))
    return placed


def _tuning(plans: Iterable[CudaPlan]) -> Tuning | None:
    """The sum of the measurements, of each different piece once; None if none was tuned."""
    tuned = [plan.recipe.tuning for plan in plans if plan.recipe.tuning is not None]
    if not tuned:
        return None
    return Tuning(
        heuristic_us=sum(one.heuristic_us for one in tuned),
        tuned_us=sum(one.tuned_us for one in tuned),
        tried=sum(one.tried for one in tuned),
        discarded=tuple(text for one in tuned for text in one.discarded),
    )
