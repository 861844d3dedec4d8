"""Joins the plans of a graph's pieces into one plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from cudnn_actor.engines.base import blame, blamed
from cudnn_actor.engines.cuda.planning.partition import Cut, Piece
from cudnn_actor.engines.cuda.planning.scratch_places import places, spans
from cudnn_actor.engines.cuda.planning.steps import finish
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import (
    Between,
    Buffer,
    KernelStep,
    Number,
    Part,
    Scratch,
    Source,
    Step,
    Tuning,
)
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.types.errors import OperationError

__all__ = ["compose", "largest", "scratch_bytes"]


def compose(graph: OperationGraph, parts: Cut, build: Callable[[OperationGraph], CudaPlan]) -> CudaPlan:
    """A plan that runs a graph's pieces one after the other.

    `build` makes a piece's plan, once for equal pieces. Raises as `build`.
    """
    plans: dict[str, CudaPlan] = {}
    for piece in parts.pieces:
        digest = piece.graph.digest()
        if digest not in plans:
            plans[digest] = _built(piece, build)
    used = spans(parts)
    offsets, between = places(parts)
    known: dict[int, Source] = {uid: Buffer(number) for number, uid in enumerate(graph.bound)}
    known |= {uid: Scratch(offset) for uid, offset in offsets.items()}
    scalars = {uid: number for number, uid in enumerate(graph.scalars)}
    steps: list[Step] = []
    graphs: list[Any] = []
    told: list[Part] = []
    most = 0
    for piece in parts.pieces:
        plan = plans[piece.graph.digest()]
        buffers = [_moved(known[parts.stored[uid].root], parts.stored[uid].offset) for uid in piece.tensors]
        numbers = [scalars[uid] for uid in piece.graph.scalars]
        steps += [_placed(step, buffers, numbers, between) for step in plan.recipe.steps]
        graphs += plan.graphs
        most = max(most, plan.recipe.scratch)
        told += _parts(piece, plan)
    plan = finish(graph, steps, graphs, between + most, None)
    sizes = {tensor.uid: tensor.spec.nbytes for tensor in parts.between}
    checked = all(plan.checked for plan in plans.values())
    recipe = msgspec.structs.replace(
        plan.recipe,
        checked=checked,
        tuning=_tuning(plans.values()),
        parts=tuple(told),
        between=tuple(
            Between(graph.canonical_uids[uid], sizes[uid], offset, *used[uid])
            for uid, offset in offsets.items()
        ),
    )
    return CudaPlan(recipe, plan.graphs)


def scratch_bytes(parts: Cut) -> int:
    """Bytes of scratch memory for what lies between a graph's pieces."""
    return places(parts)[1]


def largest(graph: OperationGraph, parts: Cut) -> tuple[int, ...]:
    """The numbers of the operations that write the largest of what lies between a graph's pieces."""
    size = max(tensor.spec.nbytes for tensor in parts.between)
    uids = {tensor.uid for tensor in parts.between if tensor.spec.nbytes == size}
    return tuple(
        number for number, operation in enumerate(graph.operations) if not uids.isdisjoint(operation.writes)
    )


def _built(piece: Piece, build: Callable[[OperationGraph], CudaPlan]) -> CudaPlan:
    """A piece's plan. What is raised is about the operations of the whole graph."""
    try:
        return build(piece.graph)
    except OperationError as error:
        raise error.at(_of_whole(piece, error.operations)) from error
    except Exception as error:
        blame(error, _of_whole(piece, blamed(error)))
        raise


def _of_whole(piece: Piece, operations: Sequence[int]) -> tuple[int, ...]:
    """Operations of a piece, by default all, as operations of the whole graph."""
    return tuple(piece.numbers[number] for number in operations) or piece.numbers


def _parts(piece: Piece, plan: CudaPlan) -> Iterator[Part]:
    """The parts of a piece's plan as parts of the whole."""
    for part in plan.recipe.parts:
        yield msgspec.structs.replace(
            part,
            operations=_of_whole(piece, part.operations),
            checked=plan.recipe.checked,
            tuning=plan.recipe.tuning,
        )


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

    changes: dict[str, Any] = {"sources": tuple(map(place, step.sources))}
    if numbers and isinstance(step, KernelStep):
        changes["kernel"] = step.kernel.renumbered(numbers)
    placed: Step = msgspec.structs.replace(step, **changes)
    return placed


def _tuning(plans: Iterable[CudaPlan]) -> Tuning | None:
    """The sum of the measurements, of each different piece once; None if none was tuned."""
    tuned = [plan.recipe.tuning for plan in plans if plan.recipe.tuning is not None]
    if not tuned:
        return None
    return Tuning(
        heuristic_us=sum(one.heuristic_us for one in tuned),
        tuned_us=sum(one.tuned_us for one in tuned),
        timed=sum(one.timed for one in tuned),
        discarded=tuple(text for one in tuned for text in one.discarded),
    )
