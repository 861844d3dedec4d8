"""Joins the plans of a graph's pieces into one plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from cudnn_actor.engines.base import blame, blamed_operations
from cudnn_actor.engines.cuda.planning.kept_reserves import Handing, handings
from cudnn_actor.engines.cuda.planning.partition import Cut, Piece
from cudnn_actor.engines.cuda.planning.scratch_places import places, spans
from cudnn_actor.engines.cuda.planning.steps import finish, place_step, source_behind
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import Between, Buffer, Part, Scratch, Source, Step
from cudnn_actor.protocol.errors import OperationError
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["compose", "largest", "scratch_bytes"]


def compose(
    graph: OperationGraph, parts: Cut, build: Callable[[OperationGraph], CudaPlan], limit: int | None = None
) -> CudaPlan:
    """Make a plan that runs a graph's pieces one after the other.

    `build` makes a piece's plan, once for equal pieces. Recurrent layers hand their reserves to their
    gradients if the plan's workspace is within the limit then. Raises as `build`.
    """
    plans: dict[str, CudaPlan] = {}
    for piece in parts.pieces:
        digest = piece.graph.digest()
        if digest not in plans:
            plans[digest] = _build_piece(piece, build)
    in_order = [(piece, plans[piece.graph.digest()]) for piece in parts.pieces]
    handed = [*handings(parts.kept, [plan.recipe.steps for _, plan in in_order])]
    if handed:
        plan = _compose_pieces(graph, parts, in_order, handed)
        if limit is None or plan.workspace <= limit:
            return plan
    return _compose_pieces(graph, parts._replace(kept=()), in_order, ())


def _compose_pieces(
    graph: OperationGraph, parts: Cut, in_order: Sequence[tuple[Piece, CudaPlan]], handed: Sequence[Handing]
) -> CudaPlan:
    """The plan of a graph, from the plans of its pieces. `handed`: the reserves that are handed on."""
    offsets, nbytes = places(parts, [held for each in handed for held in each.memory.values()])
    scratch = nbytes + max((plan.recipe.scratch for _, plan in in_order), default=0)
    graphs = [each for _, plan in in_order for each in plan.graphs]
    steps = _steps(graph, parts, in_order, (offsets, nbytes))
    for each in handed:
        each.hand_on(steps, offsets)
    whole = finish(graph, [*itertools.chain.from_iterable(steps)], graphs, scratch, None)
    recipe = msgspec.structs.replace(
        whole.recipe,
        checked=all(plan.checked for _, plan in in_order),
        provisional=any(plan.provisional for _, plan in in_order),
        parts=tuple(
            msgspec.structs.replace(part, own=part.own + nbytes)
            for part in itertools.chain.from_iterable(_parts_of(in_order, handed))
        ),
        between=_between(graph, parts, offsets, [len(plan.recipe.parts) for _, plan in in_order]),
    )
    return CudaPlan(recipe, whole.graphs)


def _steps(
    graph: OperationGraph,
    parts: Cut,
    in_order: Sequence[tuple[Piece, CudaPlan]],
    laid: tuple[Mapping[int, int], int],
) -> list[list[Step]]:
    """The steps of each piece, with their memory and numbers in the whole graph. `laid`: see `places`."""
    offsets, nbytes = laid
    roots: dict[int, Source] = {uid: Buffer(number) for number, uid in enumerate(graph.bound)}
    roots |= {tensor.uid: Scratch(offsets[tensor.uid], tensor.spec.nbytes) for tensor in parts.between}
    scalars = {uid: number for number, uid in enumerate(graph.scalars)}
    found = []
    for piece, plan in in_order:
        buffers = [
            source_behind(roots[parts.stored[uid].root], parts.stored[uid].offset) for uid in piece.tensors
        ]
        numbers = [scalars[uid] for uid in piece.graph.scalars]
        found.append([place_step(step, buffers, numbers, nbytes) for step in plan.recipe.steps])
    return found


def _between(
    graph: OperationGraph, parts: Cut, offsets: Mapping[int, int], counts: Sequence[int]
) -> tuple[Between, ...]:
    """The tensors between pieces: canonical number, bytes, place, and the parts that use each.

    `counts`: how many parts each piece has.
    """
    used, sizes = spans(parts), {tensor.uid: tensor.spec.nbytes for tensor in parts.between}
    ends = [*itertools.accumulate(counts)]
    return tuple(
        Between(
            tensor=graph.canonical_uids[uid],
            nbytes=sizes[uid],
            offset=offset,
            first=ends[used[uid][0]] - counts[used[uid][0]],
            last=ends[used[uid][1]] - 1,
        )
        for uid, offset in offsets.items()
        if uid in sizes
    )


def scratch_bytes(parts: Cut) -> int:
    """Bytes of scratch memory for the tensors between a graph's pieces, if pieces hand no reserve on."""
    return places(parts._replace(kept=()))[1]


def largest(graph: OperationGraph, parts: Cut) -> tuple[int, ...]:
    """The numbers of the operations that write the largest tensor between a graph's pieces."""
    size = max(tensor.spec.nbytes for tensor in parts.between)
    uids = {tensor.uid for tensor in parts.between if tensor.spec.nbytes == size}
    return tuple(
        number for number, operation in enumerate(graph.operations) if not uids.isdisjoint(operation.writes)
    )


def _build_piece(piece: Piece, build: Callable[[OperationGraph], CudaPlan]) -> CudaPlan:
    """The plan of a piece. An error names its operations by their numbers in the whole graph."""
    try:
        return build(piece.graph)
    except OperationError as error:
        raise error.at(_of_whole(piece, error.operations)) from error
    except Exception as error:
        blame(error, _of_whole(piece, blamed_operations(error)))
        raise


def _of_whole(piece: Piece, operations: Sequence[int]) -> tuple[int, ...]:
    """The numbers in the whole graph of operations of a piece, each once; of all, if none are given."""
    return tuple(dict.fromkeys(piece.numbers[number] for number in operations or range(len(piece.numbers))))


def _parts_of(in_order: Sequence[tuple[Piece, CudaPlan]], handed: Sequence[Handing]) -> Iterator[list[Part]]:
    """Yields the parts of each piece's plan. Gradients that get a reserve handed on do not run the layers."""
    not_run = {each.kept.gradients: in_order[each.kept.layers][0].numbers for each in handed}
    for place, (piece, plan) in enumerate(in_order):
        without = set(not_run.get(place, ()))
        yield [
            msgspec.structs.replace(part, operations=tuple(n for n in part.operations if n not in without))
            for part in _parts(piece, plan)
        ]


def _parts(piece: Piece, plan: CudaPlan) -> Iterator[Part]:
    """The parts of a piece's plan as parts of the whole."""
    for part in plan.recipe.parts:
        yield msgspec.structs.replace(
            part,
            operations=_of_whole(piece, part.operations),
            checked=plan.recipe.checked,
            tuning=plan.recipe.tuning or part.tuning,
        )
