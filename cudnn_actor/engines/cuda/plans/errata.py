"""Candidates that are not even tried: cuDNN offers them, and running them kills the context.

A plan that computes wrongly is found out by its self-check (`self_check`); one that reads
or writes an illegal address takes the context with it. Each entry was seen, and
holds for every version of cuDNN and every device: there are other candidates,
and where there are none, a graph still runs in steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.operations import (
    ConvolutionBackwardFilter,
    GraphTensor,
    Operation,
    Pointwise,
    TensorRole,
)
from cudnn_actor.protocol.tensor import Layout

__all__ = ["erratum"]


class _Erratum(NamedTuple):
    engine: str | None
    """cuDNN's name for it, without knobs; None for all of them."""
    applies: Callable[[OperationGraph], bool]
    what: str
    seen: str


_ERRATA = (
    _Erratum(
        engine="eng0",
        applies=lambda graph: len(graph.operations) > 1,
        what="reads an illegal address where more than a convolution is asked of it",
        seen="cuDNN 9.19 on sm_90: grouped float32 NCHW, alpha, beta, bias and relu",
    ),
    _Erratum(
        engine=None,
        applies=lambda graph: (
            len(graph.operations) > 1 and any(_is_uneven(graph, op) for op in graph.operations)
        ),
        what="reads a misaligned address where more than a convolution of half types is asked of it, and a "
        "group's channels or filters are not multiples of eight",
        seen="cuDNN 9.19 on sm_90: bfloat16 in 5 groups of 4 channels; the gradient of a float16 filter of 4",
    ),
    _Erratum(
        engine=None,
        applies=lambda graph: len(graph.operations) > 1 and not all(map(_is_packed, graph.tensors)),
        what="reads a misaligned address where more than a convolution is asked of tensors with gaps",
        seen="cuDNN 9.19 on sm_90: bfloat16 and float16, filters or results with odd strides",
    ),
    _Erratum(
        engine=None,
        applies=lambda graph: any(_is_off_vectors(graph, op) for op in graph.operations),
        what="reads a misaligned address where channels of half types lie side by side, and pixels or rows "
        "are not whole vectors apart",
        seen="cuDNN 9.19 on sm_90: eng71, bfloat16 with 2 channels and strides (10, 1, 251, 10)",
    ),
)
_HALF_TYPES = (DType.FLOAT16, DType.BFLOAT16)
_LONGEST_VECTOR = 8
"""Elements of a half type that one instruction reads: 16 bytes."""


def _is_packed(tensor: GraphTensor) -> bool:
    return (
        tensor.role is not TensorRole.BOUND
        or max(tensor.dims) == 1
        or tensor.spec.layout is not Layout.STRIDED
    )


def _is_uneven(graph: OperationGraph, operation: Operation) -> bool:
    if isinstance(operation, Pointwise):
        return False
    if graph.tensor(operation.inputs[0]).dtype not in _HALF_TYPES:
        return False
    filters = operation.dw if isinstance(operation, ConvolutionBackwardFilter) else operation.w
    per_group = graph.tensor(filters).dims
    return bool(per_group[1] % 8 or per_group[0] // operation.conv.groups % 8)


def _is_off_vectors(graph: OperationGraph, operation: Operation) -> bool:
    """Whether a kernel that reads as many channels at once as divide their number meets odd addresses."""
    if isinstance(operation, Pointwise):
        return False
    for tensor in map(graph.tensor, (*operation.inputs, operation.output)):
        if tensor.dtype in _HALF_TYPES and tensor.strides[1] == 1:
            vector = math.gcd(tensor.dims[1], _LONGEST_VECTOR)
            others = [stride for axis, stride in enumerate(tensor.strides) if axis != 1 < tensor.dims[axis]]
            if any(stride % vector for stride in others):
                return True
    return False


def erratum(graph: OperationGraph, plan: str) -> str | None:
    """Why the plan of that name must not run a graph; None for one that may be tried."""
    engine = plan.split("_", 1)[0]
    for known in _ERRATA:
        if known.engine in (None, engine) and known.applies(graph):
            return f"{engine} {known.what} (seen with {known.seen})"
    return None
