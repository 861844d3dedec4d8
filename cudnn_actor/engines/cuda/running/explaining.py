"""Explains a plan, by its recipe alone, which may come from a plan store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from cudnn_actor.engines.cuda.operations.recurrent_calls import Layers
from cudnn_actor.engines.cuda.running.recipe import (
    GraphStep,
    KernelStep,
    OperationStep,
    Part,
    ProductStep,
    Recipe,
    Step,
)
from cudnn_actor.protocol.graphs.explanation import Explanation, Measured, PieceOfPlan, ScratchTensor, Tuned
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.step_kinds import StepKind

__all__ = ["LAUNCHERS", "explanation"]

LAUNCHERS = {
    "kernel": StepKind.KERNEL,
    "kernel_by_step": StepKind.KERNEL,
    "library": StepKind.LIBRARY,
    "cublas": StepKind.CUBLAS,
    "cublas_packed": StepKind.CUBLAS_PACKED,
}
"""The kinds of the steps that run operations, by the launchers' names."""


def explanation(recipe: Recipe, graph: OperationGraph) -> Explanation:
    """The explanation of how a recipe runs a graph, whose digest is that of the recipe's own graph."""
    uids = {number: uid for uid, number in graph.canonical_uids.items()}
    writers = {uid: number for number, operation in enumerate(graph.operations) for uid in operation.writes}
    run = {number for part in recipe.parts for number in part.operations}
    return Explanation(
        plan=recipe.tag,
        digest=graph.digest(),
        pieces=tuple(_pieces(recipe, graph)),
        views=tuple(graph.label(number) for number in range(len(graph.operations)) if number not in run),
        scratch=tuple(
            ScratchTensor(
                label=graph.label(writers[uids[one.tensor]]),
                nbytes=one.nbytes,
                offset=one.offset,
                first=one.first,
                last=one.last,
            )
            for one in recipe.between
        ),
        scratch_bytes=max((one.offset + one.nbytes for one in recipe.between), default=0),
        workspace=recipe.workspace,
        tuned=_gain_of(recipe),
    )


def _pieces(recipe: Recipe, graph: OperationGraph) -> Iterator[PieceOfPlan]:
    """Yields the explanation of each piece of a plan."""
    steps = iter(recipe.steps)
    parts = recipe.parts
    if len(parts) == 1:  # the recipe says whether it was checked and tuned
        parts = (msgspec.structs.replace(parts[0], checked=recipe.checked, tuning=recipe.tuning),)
    for part in parts:
        own = [*itertools.islice(steps, part.steps)]
        yield PieceOfPlan(
            operations=part.operations,
            labels=tuple(graph.label(number) for number in part.operations),
            steps=tuple(map(_step_name, own)),
            plan=part.tag,
            why=part.refused,
            workspace=part.workspace,
            checked=part.checked,
            measured=_measurement_of(part),
            reserve=sum(map(_reserve_bytes, own)),
        )


def _reserve_bytes(step: Step) -> int:
    """The bytes of a layer's reserve, if the space of the weights does not lie behind it; else 0."""
    match step:
        case OperationStep(operation=Layers(space=int(), reserve=int(place))):
            return step.tensors[place].spec.nbytes
    return 0


def _step_name(step: Step) -> str:
    """The name of a step in an explanation."""
    match step:
        case GraphStep():
            return StepKind.CUDNN.step_name(step.engine)
        case OperationStep():
            return LAUNCHERS[step.launcher].step_name(step.operation.kind)
        case ProductStep():
            return StepKind.CUBLASLT.step_name()
        case KernelStep():
            return step.kernel.title


def _measurement_of(part: Part) -> Measured | None:
    """The measurements of a piece by tuning; None if it was not tuned."""
    found = part.tuning
    if found is None:
        return None
    return Measured(
        heuristic_us=found.heuristic_us,
        tuned_us=found.tuned_us,
        timed=found.timed,
        instead_of=found.instead_of,
    )


def _gain_of(recipe: Recipe) -> Tuned | None:
    """The gain of tuning on the whole; None if it was not tuned."""
    found = recipe.tuning
    if found is None:
        return None
    return Tuned(heuristic_us=found.heuristic_us, tuned_us=found.tuned_us, took_s=found.took_s)
