"""Writes an operation graph as an ONNX model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cudnn_actor.engines.cpu.sessions.contractions import (
    emit_attention,
    emit_backward_data,
    emit_backward_filter,
    emit_forward,
    emit_matmul,
)
from cudnn_actor.engines.cpu.sessions.draft import Draft, Unsupported
from cudnn_actor.engines.cpu.sessions.movement import (
    emit_border_pad,
    emit_concat,
    emit_gather,
    emit_gather_elements,
    emit_gather_nd,
    emit_pad,
    emit_reshape,
    emit_slice,
    emit_transpose,
)
from cudnn_actor.engines.cpu.sessions.norms_and_reductions import (
    emit_arg_reduction,
    emit_batch_norm,
    emit_cumulative,
    emit_layer_norm,
    emit_norm_of_groups,
    emit_reduction,
    emit_rms_norm,
    emit_softmax,
    emit_top_k,
)
from cudnn_actor.engines.cpu.sessions.pointwise import emit_pointwise
from cudnn_actor.engines.cpu.sessions.recurrent import emit_recurrent
from cudnn_actor.engines.cpu.sessions.windows import emit_avg_pool, emit_max_pool, emit_resample
from cudnn_actor.protocol import operations as ops
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["export"]

_EMITTERS: Mapping[type, Callable[[Draft, Any], None]] = {
    ops.ArgReduction: emit_arg_reduction,
    ops.Attention: emit_attention,
    ops.AvgPool: emit_avg_pool,
    ops.BatchNorm: emit_batch_norm,
    ops.BorderPad: emit_border_pad,
    ops.Concat: emit_concat,
    ops.ConvolutionBackwardData: emit_backward_data,
    ops.ConvolutionBackwardFilter: emit_backward_filter,
    ops.ConvolutionForward: emit_forward,
    ops.Cumulative: emit_cumulative,
    ops.Gather: emit_gather,
    ops.GatherElements: emit_gather_elements,
    ops.GatherND: emit_gather_nd,
    ops.GroupNorm: emit_norm_of_groups,
    ops.InstanceNorm: emit_norm_of_groups,
    ops.LayerNorm: emit_layer_norm,
    ops.MatMul: emit_matmul,
    ops.MaxPool: emit_max_pool,
    ops.Pad: emit_pad,
    ops.Pointwise: emit_pointwise,
    ops.Recurrent: emit_recurrent,
    ops.Reduction: emit_reduction,
    ops.Resample: emit_resample,
    ops.Reshape: emit_reshape,
    ops.RMSNorm: emit_rms_norm,
    ops.Slice: emit_slice,
    ops.Softmax: emit_softmax,
    ops.TopK: emit_top_k,
    ops.Transpose: emit_transpose,
}
"""How each operation is written. One that is not here, or that its function refuses, needs another engine."""


def export(graph: OperationGraph) -> Draft:
    """A model that computes what a graph does.

    Raises `Unsupported`, whose text names the first operation that has no counterpart.
    """
    if any(0 in tensor.dims for tensor in graph.tensors):
        raise Unsupported("tensors without elements")
    draft = Draft(graph)
    for number, operation in enumerate(graph.operations):
        emit = _EMITTERS.get(type(operation))
        if emit is None:
            raise Unsupported(graph.label(number))
        try:
            emit(draft, operation)
        except Unsupported as refusal:
            raise Unsupported(f"{graph.label(number)}: {refusal}") from None
    return draft
