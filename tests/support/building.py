"""Makes what a request for a graph needs, up to what only a device can do. Used in a child."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels.line_kernels import Lined
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.fused_norms import Normed
from cudnn_actor.engines.cuda.planning.candidates import COMPILES, candidates, names_of
from cudnn_actor.engines.cuda.planning.compiler import WORKSPACE_BYTES, possible_plans
from cudnn_actor.engines.cuda.planning.composition import compose
from cudnn_actor.engines.cuda.planning.listing import with_candidates
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.running.barriers import waits
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import GraphStep, KernelStep, Timed, Tuning
from cudnn_actor.protocol import Explanation
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

from .device import h200
from .nvrtc import compile_cuda

__all__ = [
    "Hasty",
    "explanation",
    "first_plan",
    "first_plans",
    "hasty_plan",
    "listed",
    "listed_pieces",
    "ranked",
    "tried",
]
__all__ += ["waited_for"]


def first_plan(graph: OperationGraph) -> str:
    """The first plan that the engine would check on a device, as its tag's last part.

    cuDNN has finalised every graph in it, and its generated kernels are compiled, but for those over lines
    and of norms.
    Raises `Refused` if no plan is cuDNN's, and `DoesNotCompile`.
    """
    try:
        plan = next(possible_plans(graph, h200(), WORKSPACE_BYTES))
    except ImportError as error:  # a launcher of kernels of our own needs CuPy
        raise Refused("cuDNN has no plan for it, only a kernel of our own could run it") from error
    for step in plan.recipe.steps:
        if isinstance(step, KernelStep) and not isinstance(step.kernel, Lined | Normed):
            for launch in step.kernel.launches():
                compile_cuda(launch.source)
    return plan.tag.split("/", 3)[3]


class Hasty(NamedTuple):
    """The first plan that compiles nothing, and the first of all, as their tags' last parts.

    `compiled`: for each graph of cuDNN's in it, whether its kernel was compiled. `left_out`: whether a plan
    before it was left out because it would have been.
    """

    tag: str
    first: str
    compiled: list[bool]
    left_out: bool


def hasty_plan(graph: OperationGraph) -> Hasty:
    """What the engine would build where there is no time. Raises as `first_plan`."""
    heard: list[str] = []
    given = graph, h200(), WORKSPACE_BYTES
    plan = next(possible_plans(*given, on_refusal=heard.append, precompiled=True))
    note = libraries().cudnn.behavior_note.RUNTIME_COMPILATION
    return Hasty(
        plan.tag.split("/", 3)[3],
        first_plan(graph),
        [note in of.get_behavior_notes() for of in plan.graphs],
        COMPILES in heard,
    )


def waited_for(graph: OperationGraph) -> list[bool]:
    """Before which steps of the first plans of a graph's pieces there is a barrier.

    Raises as `first_plan`.
    """
    parts = cut(graph)
    assert parts is not None, "it is a single piece"
    plan = compose(graph, parts, lambda piece: next(possible_plans(piece, h200(), WORKSPACE_BYTES)))
    return waits(plan.recipe.steps)


def first_plans(graph: OperationGraph) -> list[str]:
    """The first two plans for a graph that is a single piece, as their tags' last parts. Raises `Refused`."""
    (piece,) = [graph] if (parts := cut(graph)) is None else [one.graph for one in parts.pieces]
    found = itertools.islice(possible_plans(piece, h200(), WORKSPACE_BYTES), 2)
    return [plan.tag.split("/", 3)[3] for plan in found]


def explanation(graph: OperationGraph) -> Explanation:
    """What the first plan of each of a graph's pieces says: what cuDNN refuses, and why, is its own word.

    Raises as `first_plan`.
    """
    return _composed(graph).explain(graph)


def listed(graph: OperationGraph, timed: Sequence[Timed] = ()) -> Explanation:
    """The same, with the plans that may run each piece. `timed`: what tuning found out about those of one."""
    plan = _composed(graph)
    recipe = plan.recipe
    if timed:
        tuning = Tuning(
            heuristic_us=2.0, tuned_us=1.0, timed=len(timed), discarded=(), candidates=tuple(timed)
        )
        recipe = msgspec.structs.replace(recipe, tuning=tuning)
    return with_candidates(recipe, plan.explain(graph), graph, h200(), None)


def listed_pieces(graph: OperationGraph) -> int:
    """How often progress is noted while the plans are listed that may run each piece."""
    plan, noted = _composed(graph), list[None]()
    with_candidates(
        plan.recipe, plan.explain(graph), graph, h200(), None, on_progress=lambda: noted.append(None)
    )
    return len(noted)


def _composed(graph: OperationGraph) -> CudaPlan:
    def build(piece: OperationGraph) -> CudaPlan:
        reasons: list[str] = []
        return next(possible_plans(piece, h200(), WORKSPACE_BYTES, reasons)).instead_of(reasons)

    parts = cut(graph)
    return build(graph) if parts is None else compose(graph, parts, build)


def ranked(graph: OperationGraph) -> tuple[list[str], list[str]]:
    """The names of cuDNN's candidates, without its fallbacks and with them."""
    without, both = (
        names_of(candidates(graph, h200(), WORKSPACE_BYTES, fallbacks=fallbacks))
        for fallbacks in (False, True)
    )
    return without, both


def tried(graph: OperationGraph) -> list[str]:
    """The names of the candidates of the plans for a graph that are cuDNN's alone, in order."""
    steps = (plan.recipe.steps for plan in possible_plans(graph, h200(), WORKSPACE_BYTES))
    whole = itertools.takewhile(lambda steps: len(steps) == 1, steps)
    return [step.engine for (step,) in whole if isinstance(step, GraphStep)]
