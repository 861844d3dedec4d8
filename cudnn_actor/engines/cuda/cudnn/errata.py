"""Candidates that are never run, because a self-check cannot find what is wrong with them.

A plan that computes wrong results fails its self-check (`self_check`). A
self-check does not protect against a plan that

- reads or writes an illegal address: it destroys the device context;
- rounds where it should not: the self-check's values are whole numbers;
- takes many times as long as the plan or the kernels that would run instead.

Each entry was observed, or is in cuDNN's release notes. It applies to every
device, and to every version of cuDNN before the one that fixed it. That costs
little: there are other candidates, and if there are none, a graph runs in steps.
`python -m benchmarks.library_faults` shows which faults the installed cuDNN has.
Engines that are wrong only after another plan has run would pass a self-check,
too: tests/gpu/test_depthwise_sequences.py looks for those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    Convolution,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    GraphTensor,
    LayerNorm,
    LayerNormBackward,
    MatMul,
    Node,
    RMSNorm,
    RMSNormBackward,
    TensorRole,
)
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout, packed_nbytes

__all__ = ["Erratum", "erratum"]


class Erratum(NamedTuple):
    """Engines that are wrong or harmful for some graphs."""

    engines: tuple[str, ...]
    """cuDNN's names of the engines, without knobs; empty for all engines.

    cuDNN numbers the engines of each kind of graph separately: a convolution's `eng5` is another one than
    its gradient's."""
    applies: Callable[[OperationGraph], bool]
    """Whether a graph is one for which the engines are wrong or harmful."""
    what: str
    """What the engines do, as a clause whose subject is an engine."""
    seen: str
    """The versions of cuDNN and the graphs with which it was observed."""
    fixed: int | None = None
    """cuDNN's first version without the fault, like 92400; None if there is none yet."""


_LARGE = 1 << 21
"""The number of elements above which the choice of a norm's kernel matters."""
_ROW_NORMS = (LayerNorm, LayerNormBackward, RMSNorm, RMSNormBackward)
_ERRATA = (
    Erratum(
        engines=("eng11",),
        applies=lambda graph: (
            not any(isinstance(op, Convolution) for op in graph.operations) and _has_gaps(graph)
        ),
        what="computes matrix products of tensors with gaps wrongly",
        seen="cuDNN's notes on 9.24, which has it fixed",
        fixed=92400,
    ),
    Erratum(
        engines=("eng0",),
        applies=lambda graph: any(
            isinstance(op, MatMul) and graph.tensor(op.a).dtype.is_half for op in graph.operations
        ),
        what="rounds parts of a long sum of products to the operands' half type",
        seen="cuDNN 9.19 and 9.28 on sm_90: "
        "bfloat16 (31, 1418) @ (1418, 24), float16 (15, 1113) @ (1113, 29)",
    ),
    Erratum(
        engines=("eng61",),
        applies=lambda graph: _is_grouped(graph, ConvolutionBackwardFilter, DType.FLOAT16),
        what="rounds parts of sums to float16 in the gradient of a filter in groups",
        seen="cuDNN 9.19 and 9.28 on sm_90: one channel in a group, in 24 of 24 problems",
    ),
    Erratum(
        engines=("eng24", "eng47"),
        applies=lambda graph: _is_grouped(graph, ConvolutionBackwardFilter, DType.BFLOAT16),
        what="rounds parts of sums to bfloat16 in the gradient of a filter in groups",
        seen="cuDNN 9.19 (eng47) and 9.28 (both) on sm_90: one channel in a group, in 1 of 27 problems",
    ),
    Erratum(
        engines=("eng17",),
        applies=lambda graph: _is_grouped(graph, ConvolutionBackwardFilter, DType.FLOAT16),
        what="computes the gradient of a filter in groups by a transform that rounds more than a sum does",
        seen="cuDNN 9.19 and 9.28 on sm_90: filters of 5x5; in float32 the self-check finds it",
    ),
    Erratum(
        engines=("eng6",),
        applies=lambda graph: _is_grouped(graph, ConvolutionForward, DType.FLOAT16),
        what="computes a convolution in groups by a transform that rounds more than a sum does",
        seen="cuDNN 9.19 and 9.28 on sm_90: filters of 5x5",
    ),
    Erratum(
        engines=("eng0",),
        applies=lambda graph: (
            len(graph.operations) > 1 and any(isinstance(op, Convolution | MatMul) for op in graph.operations)
        ),
        what="reads an illegal address if the graph has more than a convolution",
        seen="cuDNN 9.19 and 9.28 on sm_90: grouped float32 NCHW, alpha, beta, bias and relu",
    ),
    Erratum(
        engines=(),
        applies=lambda graph: (
            len(graph.operations) > 1 and any(_is_uneven(graph, op) for op in graph.operations)
        ),
        what="reads a misaligned address if the graph has more than a convolution, the convolution's "
        "operands are of a half type, and a group's channels or filters are not multiples of eight",
        seen="cuDNN 9.19 on sm_90: bfloat16 in 5 groups of 4 channels; the gradient of a float16 filter of 4",
    ),
    Erratum(
        engines=(),
        applies=lambda graph: len(graph.operations) > 1 and _has_gaps(graph),
        what="reads a misaligned address if the graph has more than a convolution and tensors with gaps",
        seen="cuDNN 9.19 on sm_90: bfloat16 and float16, filters or results with odd strides",
    ),
    Erratum(
        engines=(),
        applies=lambda graph: any(_is_off_vectors(graph, op) for op in graph.operations),
        what="reads a misaligned address if the channels of a half type are contiguous, and the strides of "
        "pixels or rows are not multiples of the vector length",
        seen="cuDNN 9.19 and 9.28 on sm_90: eng71, bfloat16 with 2 channels and strides (10, 1, 251, 10)",
    ),
    Erratum(
        engines=("eng1",),
        applies=lambda graph: any(
            isinstance(op, _ROW_NORMS) and graph.tensor(op.x).spec.size > _LARGE for op in graph.operations
        ),
        what="takes up to 40 times as long as a kernel of our own",
        seen="cuDNN 9.19 and 9.28, H100 and H200: layer norm backward, bfloat16, 100,352 rows of 96",
    ),
    Erratum(
        engines=("eng8",),
        applies=lambda graph: (
            len(graph.operations) > 1
            and any(isinstance(op, Convolution) for op in graph.operations)
            and any(graph.tensor(uid).dtype is DType.FLOAT32 for uid in graph.operations[0].reads)
        ),
        what="takes 8 to 30 times as long as a convolution alone and a kernel for what follows",
        seen="cuDNN 9.19 and 9.28, H100 and H200: "
        "float32 without TF32, 3x3, 64 channels, NHWC, a number and relu",
    ),
)

_LONGEST_VECTOR = 8
"""The most elements of a half type that one instruction reads: 16 bytes."""


def _has_gaps(graph: OperationGraph) -> bool:
    """Whether some tensors are not packed. Those of matrix products may be transposed: no fault was seen."""
    multiplies = any(isinstance(operation, MatMul) for operation in graph.operations)
    bound = [tensor for tensor in graph.tensors if tensor.role is TensorRole.BOUND]
    return not all(_is_dense(tensor) if multiplies else _is_packed(tensor) for tensor in bound)


def _is_packed(tensor: GraphTensor) -> bool:
    """Whether a tensor is packed, in any layout."""
    return max(tensor.dims, default=1) == 1 or tensor.spec.layout is not Layout.STRIDED


def _is_dense(tensor: GraphTensor) -> bool:
    """Whether a tensor has no gaps."""
    return tensor.spec.nbytes == packed_nbytes(tensor.spec)


def _is_grouped(graph: OperationGraph, kind: type[Convolution[Any]], dtype: DType) -> bool:
    """Whether a graph has a convolution in groups of this kind and dtype."""
    return any(
        isinstance(op, kind) and op.conv.groups > 1 and graph.tensor(op.reads[0]).dtype is dtype
        for op in graph.operations
    )


def _is_uneven(graph: OperationGraph, operation: Node) -> bool:
    """Whether an operation is a convolution of half types whose groups have a number of channels or filters
    that is not a multiple of 8."""
    if not isinstance(operation, Convolution):
        return False
    if not graph.tensor(operation.reads[0]).dtype.is_half:
        return False
    _, filters, _ = operation.of_shape
    per_group = graph.tensor(filters).dims
    return bool(per_group[1] % 8 or per_group[0] // operation.conv.groups % 8)


def _is_off_vectors(graph: OperationGraph, operation: Node) -> bool:
    """Whether an operation is a convolution of half types some of whose vectors would be misaligned.

    A vector is the longest one that divides the channels.
    """
    if not isinstance(operation, Convolution):
        return False
    for tensor in map(graph.tensor, (*operation.reads, *operation.writes)):
        if tensor.dtype.is_half and tensor.strides[1] == 1:
            vector = math.gcd(tensor.dims[1], _LONGEST_VECTOR)
            others = [stride for axis, stride in enumerate(tensor.strides) if axis != 1 < tensor.dims[axis]]
            if any(stride % vector for stride in others):
                return True
    return False


def erratum(graph: OperationGraph, plan: str, version: int) -> str | None:
    """Why the plan with that name must not run a graph on that version of cuDNN; None if it may."""
    engine = plan.split("_", 1)[0]
    for known in _ERRATA:
        if known.fixed is not None and version >= known.fixed:
            continue
        if (not known.engines or engine in known.engines) and known.applies(graph):
            return f"{engine} {known.what} (seen with {known.seen})"
    return None
