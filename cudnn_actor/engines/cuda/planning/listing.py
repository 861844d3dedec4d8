"""Lists the plans that may run each piece of a graph, for its explanation. No plan is built for the list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from cudnn_actor.engines.base import no_progress
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.planning.candidates import (
    DYNAMIC,
    candidates,
    check_whole,
    names_of,
    why_never_built,
)
from cudnn_actor.engines.cuda.planning.compiler import WORKSPACE_BYTES
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.rivals import OF_CUDNN, other_candidates
from cudnn_actor.engines.cuda.running.recipe import Recipe, Timed, Tuning
from cudnn_actor.protocol.graphs.explanation import Explanation, PieceOfPlan, PlanCandidate
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["singles", "with_candidates"]

_Candidates = tuple[PlanCandidate, ...]


def with_candidates(
    recipe: Recipe,
    explanation: Explanation,
    graph: OperationGraph,
    handle: Any,
    limit: int | None,
    *,
    on_progress: Callable[[], None] = no_progress,
) -> Explanation:
    """The explanation of a recipe, with the plans that may run each piece. Blocks for up to 0.1 s a piece.

    cuDNN's fallbacks are listed only if it has no other candidates. A candidate that tuning has tried has the
    measurements of tuning. `handle` may be an `AbsentDevice`. `on_progress` is called after each piece.
    """
    known: dict[str, _Candidates] = {}
    limit = WORKSPACE_BYTES if limit is None else limit
    tunings = _tunings(recipe)
    pieces = list(explanation.pieces)
    for single, places in singles(graph, explanation.pieces):
        if not places:  # the piece launches nothing
            continue
        digest = single.digest()
        if digest not in known:
            known[digest] = tuple(_candidates_of(single, handle, limit))
            on_progress()
        first = places.start
        found = _with_measured(known[digest], tunings[first])
        pieces[first] = msgspec.structs.replace(
            pieces[first], candidates=_with_chosen(found, pieces[first], alone=len(places) == 1)
        )
    return msgspec.structs.replace(explanation, pieces=tuple(pieces))


def _tunings(recipe: Recipe) -> list[Tuning | None]:
    """The measurements of each part by tuning."""
    return [recipe.tuning] if len(recipe.parts) == 1 else [part.tuning for part in recipe.parts]


def singles(graph: OperationGraph, pieces: Sequence[PieceOfPlan]) -> Iterator[tuple[OperationGraph, range]]:
    """Yields the pieces of a graph that are cut no further, each with the places of the explanation's pieces
    that run it.

    Both are in the order in which they run. One piece of the explanation, whose plan has the digest in its
    tag, runs a piece of the graph, or several do if the plan was composed of others', or none does.
    """
    start = 0
    for single, numbers in _uncut(graph, range(len(graph.operations))):
        own, end, digest = set(numbers), start, single.digest()[:8]
        while end < len(pieces) and own.issuperset(pieces[end].operations):
            end += 1
            if pieces[end - 1].plan.split("/")[2] == digest:
                break
        yield single, range(start, end)
        start = end


def _uncut(graph: OperationGraph, numbers: Sequence[int]) -> Iterator[tuple[OperationGraph, Sequence[int]]]:
    """Yields the pieces of a graph that are cut no further, with the numbers of their operations."""
    parts = cut(graph)
    if parts is None:
        yield graph, numbers
        return
    for piece in parts.pieces:
        yield from _uncut(piece.graph, [numbers[number] for number in piece.numbers])


def _candidates_of(graph: OperationGraph, handle: Any, limit: int) -> Iterator[PlanCandidate]:
    """Yields the candidates for a piece: cuDNN's, then the others."""
    yield from _of_cudnn(graph, handle, limit)
    for candidate in other_candidates(graph, handle, limit):
        yield PlanCandidate(name=candidate.what, kind=candidate.kind)


def _of_cudnn(graph: OperationGraph, handle: Any, limit: int) -> Iterator[PlanCandidate]:
    for mode, fallbacks in (("A", False), ("fallback", True)):
        try:
            check_whole(graph)
            lowered = candidates(graph, handle, limit, fallbacks=fallbacks)
        except Refused:
            continue
        for index, name in enumerate(names_of(lowered)):
            engine, knobs = _parts_of(name)
            yield PlanCandidate(
                name=name,
                kind=OF_CUDNN,
                engine=engine,
                knobs=knobs,
                heuristic=mode,
                notes=tuple(note.name for note in lowered.get_behavior_notes_for_plan_at_index(index)),
                deterministic=True if graph.numerics.deterministic else None,  # the others are left out
                refused=why_never_built(graph, lowered, index, name) or "",
            )
        return


def _parts_of(name: str) -> tuple[int | None, dict[str, int]]:
    """The engine's number and the knobs, from cuDNN's name: "eng45_k2=5_k3=1"."""
    engine, *knobs = name.split("_")
    pairs = (knob.partition("=") for knob in knobs)
    number = engine.removeprefix("eng")
    return int(number) if number.isdigit() else None, {
        knob: int(value) for knob, _, value in pairs if value.lstrip("-").isdigit()
    }


def _with_measured(found: _Candidates, tuning: Tuning | None) -> _Candidates:
    """The candidates with what tuning measured of them."""
    timed = () if tuning is None else tuning.candidates
    measured = {each.name.removesuffix(DYNAMIC): each for each in timed}

    def with_own(candidate: PlanCandidate) -> PlanCandidate:
        own = measured.get(candidate.name)
        return candidate if own is None else _with_measurement(candidate, own)

    return tuple(map(with_own, found))


def _with_measurement(candidate: PlanCandidate, own: Timed) -> PlanCandidate:
    return msgspec.structs.replace(
        candidate, us=own.us, workspace=own.workspace, refused=own.fault or candidate.refused
    )


def _with_chosen(found: _Candidates, piece: PieceOfPlan, *, alone: bool) -> _Candidates:
    """The candidates with a mark at the one that runs, which is added if it is not among them.

    `alone`: whether the explanation's piece runs all that the candidates would run.
    """
    name = piece.plan.split("/", 3)[-1].removesuffix(DYNAMIC) if alone else "in pieces"
    is_chosen: Callable[[PlanCandidate], bool] = lambda each: each.name == name  # noqa: E731
    if not any(map(is_chosen, found)):
        kind = " + ".join(piece.steps) if alone else "in steps"
        return (*found, PlanCandidate(name=name, kind=kind, chosen=True, workspace=piece.workspace))
    facts: dict[str, Any] = {"chosen": True, "workspace": piece.workspace}
    return tuple(msgspec.structs.replace(each, **facts) if is_chosen(each) else each for each in found)
