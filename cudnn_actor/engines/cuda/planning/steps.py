"""Makes steps, and plans from steps: shared by plans in one piece and plans in several steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused, frontend_uids
from cudnn_actor.engines.cuda.kernels.expressions import renumber
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import (
    AnyKernel,
    Buffer,
    GraphStep,
    KernelStep,
    Number,
    OperationStep,
    Part,
    ProductStep,
    Recipe,
    Scratch,
    Source,
    Step,
    align,
)
from cudnn_actor.engines.support import tag_of
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Node, Pointwise
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["bound_sources", "finish", "graph_step", "kernel_plan", "place_part", "place_step"]
__all__ += ["source_behind"]

_AWAITED = frozenset(("a", "b", "w", "x", "y", "dy", "q", "k", "v"))
"""The main operands of a convolution, a product, attention or a norm: cuDNN's kernels wait for the kernels
before them before they read these."""


def bound_sources(graph: OperationGraph) -> dict[int, Source]:
    """The location of each buffer and scalar that a run takes, by uid."""
    bound: dict[int, Source] = {uid: Buffer(number) for number, uid in enumerate(graph.bound)}
    given: dict[int, Source] = {
        uid: Number(number, graph.tensor(uid).dtype is DType.FLOAT64)
        for number, uid in enumerate(graph.scalars)
    }
    return bound | given


def graph_step(graph: OperationGraph, lowered: Any, sources: dict[int, Source]) -> GraphStep:
    """A step from a built frontend graph; `sources` by the operation graph's uids."""
    given = sorted((number, uid) for uid, number in frontend_uids(graph).items() if uid in sources)
    index = getattr(lowered, "_plan_index", 0)
    beside = {uid for operation in graph.operations for uid in _beside(operation)}
    return GraphStep(
        engine=lowered.get_plan_name_at_index(index),
        workspace=int(lowered.get_workspace_size()),
        uids=tuple(number for number, _ in given),
        sources=tuple(sources[uid] for _, uid in given),
        beside=tuple(place for place, (_, uid) in enumerate(given) if uid in beside),
        reads=tuple(place for place, (_, uid) in enumerate(given) if uid not in graph.written),
        digest=graph.digest(),
    )


def _beside(operation: Node) -> Iterator[int]:
    """Yields the operands that cuDNN's kernel may read before the kernels before it have ended.

    See `barriers`.
    """
    for name, uid in operation.named():
        if uid in operation.reads and (isinstance(operation, Pointwise) or name not in _AWAITED):
            yield uid


def finish(
    graph: OperationGraph, steps: Sequence[Step], graphs: Sequence[Any], scratch: int, limit: int | None
) -> CudaPlan:
    """Returns the plan with those steps. Raises `Refused` if it needs more workspace than the limit."""
    names = [_name(step) for step in steps] or ["nothing"]
    recipe = Recipe(
        tag=tag_of("cuda", graph, "+".join(names)),
        steps=tuple(steps),
        scratch=scratch,
        buffers=len(graph.bound),
        scalars=len(graph.scalars),
    )
    part = Part(tuple(range(len(graph.operations))), len(steps), recipe.tag, recipe.workspace)
    recipe = msgspec.structs.replace(recipe, parts=(part,))
    if limit is not None and recipe.workspace > limit:
        raise Refused(f"it needs {recipe.workspace:,} bytes of workspace, over the limit of {limit:,}")
    return CudaPlan(recipe, tuple(graphs))


def kernel_plan(
    graph: OperationGraph, kernel: AnyKernel, uids: Iterable[int], workspace: int, limit: int | None
) -> CudaPlan:
    """Returns the plan of one kernel on these tensors, and on its workspace. Raises as `finish`."""
    sources = bound_sources(graph)
    places = [sources[uid] for uid in uids]
    if workspace:
        places.append(Scratch(0, workspace))
    return finish(graph, [KernelStep(kernel, tuple(places))], [], align(workspace), limit)


def source_behind(source: Source, offset: int) -> Source:
    """The memory that begins `offset` bytes behind a source."""
    if not offset:
        return source
    if isinstance(source, Scratch):
        return Scratch(source.offset + offset, source.nbytes - offset)
    assert isinstance(source, Buffer), "a number has no views"
    return Buffer(source.number, source.offset + offset)


def place_step(step: Step, buffers: Sequence[Source], numbers: Sequence[int], scratch: int) -> Step:
    """A step of a part as a step of the whole plan.

    `buffers`, `numbers`: the sources and the numbers of the part's buffers and scalars in the whole.
    `scratch`: the bytes of scratch memory before the part's.
    """

    def place(source: Source) -> Source:
        match source:
            case Buffer(number=number, offset=offset):
                return source_behind(buffers[number], offset)
            case Number(number=number, double=double):
                return Number(numbers[number], double)
            case _:
                return Scratch(source.offset + scratch, source.nbytes)

    changes: dict[str, Any] = {"sources": tuple(map(place, step.sources))}
    if numbers and isinstance(step, KernelStep):
        changes["kernel"] = renumber(step.kernel, numbers)
    placed: Step = msgspec.structs.replace(step, **changes)
    return placed


def place_part(
    whole: OperationGraph, part: OperationGraph, plan: CudaPlan, sources: Mapping[int, Source], scratch: int
) -> list[Step]:
    """The steps of a part's plan as steps of the whole graph's. Bound tensors and scalars have the same uids.

    `sources`: where the part's bound tensors lie, by uid. `scratch`: see `place_step`.
    """
    buffers = [sources[uid] for uid in part.bound]
    numbers = [whole.scalars.index(uid) for uid in part.scalars]
    return [place_step(step, buffers, numbers, scratch) for step in plan.recipe.steps]


def _name(step: Step) -> str:
    """The name of a step in the plan's tag."""
    match step:
        case GraphStep():
            return step.engine
        case OperationStep():
            return f"{step.operation.kind}-{step.launcher}"
        case ProductStep():
            return step.product.name
        case KernelStep():
            return step.kernel.name
