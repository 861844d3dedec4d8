"""Joins the plans of a graph's pieces into one plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from cudnn_actor.engines.base import blame, blamed
from cudnn_actor.engines.cuda.planning.partition import Cut, Piece
from cudnn_actor.engines.cuda.planning.scratch_places import places, spans
from cudnn_actor.engines.cuda.planning.steps import finish, moved, placed
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import Between, Buffer, Part, Scratch, Source, Step
from cudnn_actor.protocol.errors import OperationError
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["compose", "largest", "scratch_bytes"]


def compose(graph: OperationGraph, parts: Cut, build: Callable[[OperationGraph], CudaPlan]) -> CudaPlan:
    """Make a plan that runs a graph's pieces one after the other.

    `build` makes a piece's plan, once for equal pieces. Raises as `build`.
    """
    plans: dict[str, CudaPlan] = {}
    for piece in parts.pieces:
        digest = piece.graph.digest()
        if digest not in plans:
            plans[digest] = _built(piece, build)
    offsets, nbytes = laid = places(parts)
    in_order = [(piece, plans[piece.graph.digest()]) for piece in parts.pieces]
    scratch = nbytes + max((plan.recipe.scratch for plan in plans.values()), default=0)
    graphs = [each for _, plan in in_order for each in plan.graphs]
    whole = finish(graph, [*_steps(graph, parts, in_order, laid)], graphs, scratch, None)
    recipe = msgspec.structs.replace(
        whole.recipe,
        checked=all(plan.checked for plan in plans.values()),
        provisional=any(plan.provisional for plan in plans.values()),
        parts=tuple(itertools.chain.from_iterable(_parts(*each) for each in in_order)),
        between=_between(graph, parts, offsets),
    )
    return CudaPlan(recipe, whole.graphs)


def _steps(
    graph: OperationGraph,
    parts: Cut,
    in_order: Sequence[tuple[Piece, CudaPlan]],
    laid: tuple[Mapping[int, int], int],
) -> Iterator[Step]:
    """The steps of all pieces, each with its memory and its numbers in the whole graph. `laid`: `places`."""
    offsets, nbytes = laid
    roots: dict[int, Source] = {uid: Buffer(number) for number, uid in enumerate(graph.bound)}
    roots |= {uid: Scratch(offset) for uid, offset in offsets.items()}
    scalars = {uid: number for number, uid in enumerate(graph.scalars)}
    for piece, plan in in_order:
        buffers = [moved(roots[parts.stored[uid].root], parts.stored[uid].offset) for uid in piece.tensors]
        numbers = [scalars[uid] for uid in piece.graph.scalars]
        for step in plan.recipe.steps:
            yield placed(step, buffers, numbers, nbytes)


def _between(graph: OperationGraph, parts: Cut, offsets: Mapping[int, int]) -> tuple[Between, ...]:
    """What lies between pieces: its canonical number, bytes, place, and when it is used."""
    used, sizes = spans(parts), {tensor.uid: tensor.spec.nbytes for tensor in parts.between}
    return tuple(
        Between(graph.canonical_uids[uid], sizes[uid], offset, *used[uid]) for uid, offset in offsets.items()
    )


def scratch_bytes(parts: Cut) -> int:
    """Bytes of scratch memory that what lies between a graph's pieces takes."""
    return places(parts)[1]


def largest(graph: OperationGraph, parts: Cut) -> tuple[int, ...]:
    """The numbers of the operations that write the largest of what lies between a graph's pieces."""
    size = max(tensor.spec.nbytes for tensor in parts.between)
    uids = {tensor.uid for tensor in parts.between if tensor.spec.nbytes == size}
    return tuple(
        number for number, operation in enumerate(graph.operations) if not uids.isdisjoint(operation.writes)
    )


def _built(piece: Piece, build: Callable[[OperationGraph], CudaPlan]) -> CudaPlan:
    """The plan of a piece. An error names its operations by their numbers in the whole graph."""
    try:
        return build(piece.graph)
    except OperationError as error:
        raise error.at(_of_whole(piece, error.operations)) from error
    except Exception as error:
        blame(error, _of_whole(piece, blamed(error)))
        raise


def _of_whole(piece: Piece, operations: Sequence[int]) -> tuple[int, ...]:
    """The numbers in the whole graph of operations of a piece; of all, if none are given."""
    return tuple(piece.numbers[number] for number in operations) or piece.numbers


def _parts(piece: Piece, plan: CudaPlan) -> Iterator[Part]:
    """The parts of a piece's plan as parts of the whole."""
    for part in plan.recipe.parts:
        yield msgspec.structs.replace(
            part,
            operations=_of_whole(piece, part.operations),
            checked=plan.recipe.checked,
            tuning=plan.recipe.tuning or part.tuning,
        )
