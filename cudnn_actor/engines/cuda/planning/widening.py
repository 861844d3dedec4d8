"""Runs a convolution of fewer than 8 channels as one of 8 channels, of which the further ones are zeros.

cuDNN's fast engines for half types read vectors of 8 channels, and only these engines
compute pointwise operations behind a convolution with it. So the first layer of a network
for images, which have 3 channels, takes less time on copies of its operands.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels.elementwise import Elementwise, describe_elementwise
from cudnn_actor.engines.cuda.kernels.expressions import Leaf, Result
from cudnn_actor.engines.cuda.planning.candidates import build_candidate, candidates, check_whole
from cudnn_actor.engines.cuda.planning.steps import bound_sources, finish, graph_step
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import KernelStep, OperationStep, Scratch, Source, Step, align
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Convolution, GraphTensor, Pad, Pointwise, TensorRole
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec, settled_strides

__all__ = ["compile_widened", "is_widened"]

_CHANNELS = 8
_LEAST_BYTES = 1 << 20
"""The fewest bytes of the copy of x for a convolution alone: the copies take two launches."""


def is_widened(graph: OperationGraph) -> bool:
    """Whether a graph is a convolution of few channels, perhaps with operations behind it, that gains."""
    return bool(_widened_tensors(graph))


def compile_widened(
    graph: OperationGraph, handle: Any, limit: int | None, candidate: int = 0, *, precompiled: bool = False
) -> CudaPlan:
    """Returns the plan on copies of operands, or of a result, with 8 channels: see `is_widened`.

    Raises `Refused`. `precompiled`: see `build_candidate`.
    """
    forms = _widened_tensors(graph)
    wide = OperationGraph(
        tensors=tuple(forms.get(tensor.uid, tensor) for tensor in graph.tensors),
        operations=graph.operations,
        numerics=graph.numerics,
    )
    check_whole(wide)
    lowered = candidates(wide, handle, limit)
    if candidate >= lowered.get_execution_plan_count():
        raise Refused(f"cuDNN has no candidate {candidate} for it with {_CHANNELS} channels")
    build_candidate(wide, lowered, candidate, precompiled=precompiled)
    sources, scratch = bound_sources(graph), 0
    before: list[Step] = []
    after: list[Step] = []
    for uid, form in forms.items():
        given, place = sources[uid], Scratch(scratch, form.spec.nbytes)
        scratch += align(form.spec.nbytes)
        sources[uid] = place
        if uid in graph.written:
            after.append(_narrowing_step(graph.tensor(uid), given, form, place))
        else:
            before.append(_widening_step(graph.tensor(uid), given, form, place))
    steps = [*before, graph_step(wide, lowered, sources), *after]
    return finish(graph, steps, [lowered], scratch, limit)


def _widened_tensors(graph: OperationGraph) -> dict[int, GraphTensor]:
    """The tensors that have the convolution's channels, with 8 of them, by uid; none for other graphs."""
    match [each for each in graph.operations if not isinstance(each, Pointwise)]:
        case [Convolution() as operation] if operation.conv.groups == 1:
            x, w, y = map(graph.tensor, operation.of_shape)
        case _:
            return {}
    few = x.dims[1] < _CHANNELS and 0 not in x.dims and x.dtype.is_half
    touched = [uid for each in graph.operations for uid in (*each.reads, *each.writes)]
    overwritten = {tensor.overwrites for tensor in graph.tensors}
    alone = all(
        tensor.role is TensorRole.BOUND
        and touched.count(tensor.uid) == 1
        and tensor.overwrites is None
        and tensor.uid not in overwritten
        for tensor in (x, w)
    )
    if not few or not alone or not all(map(_has_channels_last, (x, w, y))):
        return {}
    forms = {}
    for tensor in (x, w):
        dims = (tensor.dims[0], _CHANNELS, *tensor.dims[2:])
        spec = TensorSpec.packed(dims, tensor.dtype, Layout.NHWC)
        forms[tensor.uid] = msgspec.structs.replace(
            tensor, dims=spec.dims, strides=spec.strides, alignment=spec.alignment
        )
    pays = len(graph.operations) > 1 or forms[x.uid].spec.nbytes >= _LEAST_BYTES
    return forms if pays else {}


def _has_channels_last(tensor: GraphTensor) -> bool:
    """Whether a tensor is packed in NHWC."""
    last = TensorSpec.packed(tensor.dims, tensor.dtype, Layout.NHWC).strides
    return settled_strides(tensor.dims, tensor.strides) == settled_strides(tensor.dims, last)


def _widening_step(tensor: GraphTensor, source: Source, form: GraphTensor, place: Scratch) -> OperationStep:
    """The step that copies an operand, and adds channels of zeros."""
    none = (0,) * len(tensor.dims)
    missing = (0, _CHANNELS - tensor.dims[1], *none[2:])
    return OperationStep(
        operation=Pad(x=0, y=1, before=none, after=missing, steps=(1,) * len(none)),
        tensors=(tensor, form),
        sources=(source, place),
        launcher="kernel",
    )


def _narrowing_step(
    tensor: GraphTensor, target: Source, form: GraphTensor, place: Scratch
) -> KernelStep[Elementwise]:
    """The step that copies a result without the further channels."""
    result = Result(Leaf(0, form.dtype), tensor.dtype)
    kernel = describe_elementwise([result], [], tensor.dims, [tensor.strides, form.strides])
    return KernelStep(kernel, (target, place))
