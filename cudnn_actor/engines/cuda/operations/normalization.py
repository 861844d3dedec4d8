"""Layer norm and RMS norm on CUDA: cuDNN's, on packed tensors, and kernels of our own.

Our kernels take any strides: see `norm_kernels`.
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Normalizations.html
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cudnn_actor.engines.cuda.cudnn.frontend_graph import FrontendGraph, Refused
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.norm_passes import CUDNN_NAMES, Described, backward, forward
from cudnn_actor.protocol.operations import (
    GraphTensor,
    LayerNorm,
    LayerNormBackward,
    RMSNorm,
    RMSNormBackward,
)
from cudnn_actor.protocol.types.tensor import Layout

__all__ = ["describe", "lower_normalization"]

Norm = LayerNorm[int] | RMSNorm[int] | LayerNormBackward[int] | RMSNormBackward[int]


def lower_normalization(graph: FrontendGraph, operation: Norm) -> None:
    """Add a norm to a graph of cuDNN's frontend: rows as samples, their elements as channels.

    Raises `Refused`.
    """
    x = graph.spec(operation.x)
    if operation.scale is None or getattr(operation, "bias", operation.x) is None:
        raise Refused("cuDNN's norms need a scale, and layer norm a bias")
    first = operation.axis % len(x.dims)
    rows, length = math.prod(x.dims[:first]), math.prod(x.dims[first:])
    if length == 1 and isinstance(operation, LayerNorm):
        raise Refused("cuDNN's layer norm of rows of one element does not propagate NaN")
    shapes = {
        "elements": ([rows, length, 1, 1], [length, 1, 1, 1]),
        "weights": ([1, length, 1, 1], [length, 1, 1, 1]),
        "statistics": ([rows, 1, 1, 1], [1, 1, 1, 1]),
    }

    def shape(name: str) -> tuple[list[int], list[int]]:
        return shapes[_PARTS.get(name, "elements")]

    for _, uid in operation.named():
        if graph.spec(uid).spec.layout is not Layout.NCHW:
            raise Refused("cuDNN's norms need packed rows")
    inputs = {
        CUDNN_NAMES[name]: graph.tensor(uid, *shape(name)) for name, uid in operation.named(operation.inputs)
    }
    cudnn, pygraph = libraries().cudnn, graph.pygraph
    if isinstance(operation, LayerNorm | RMSNorm):
        kept = len(operation.writes) - 1
        if isinstance(operation, LayerNorm) and kept == 1:
            raise Refused("cuDNN's layer norm writes both statistics or none")
        phases = cudnn.norm_forward_phase
        call = pygraph.layernorm if isinstance(operation, LayerNorm) else pygraph.rmsnorm
        found = call(
            norm_forward_phase=phases.TRAINING if kept else phases.INFERENCE,
            epsilon=graph.number(operation.epsilon),
            **inputs,
        )
    elif isinstance(operation, LayerNormBackward):
        found = pygraph.layernorm_backward(**inputs)
    else:
        found = pygraph.rmsnorm_backward(has_dbias=False, **inputs)
    graph.write_all(operation, found, shape)


_PARTS = dict.fromkeys(("scale", "bias", "dscale", "dbias"), "weights")
_PARTS |= dict.fromkeys(("mean", "inverse_deviation", "inverse_rms"), "statistics")


def describe(operation: Any, given: Mapping[str, GraphTensor]) -> Described:
    """Describe a norm on these operands, by name."""
    dims = given["x"].dims
    first = operation.axis % len(dims)
    beside = {}
    for name, tensor in given.items():
        if _PARTS.get(name) == "weights":
            beside[name] = (*[0] * first, *tensor.strides)
        elif _PARTS.get(name) == "statistics":
            beside[name] = (*tensor.strides[:first], *[0] * (len(dims) - first))
    along, across = tuple(range(first, len(dims))), tuple(range(first))
    if isinstance(operation, LayerNorm | RMSNorm):
        passes = (forward(given, along, centred=isinstance(operation, LayerNorm)),)
        return Described(dims, tuple, beside, passes, (operation.epsilon, 0.0, 0.0))
    return Described(dims, tuple, beside, backward(given, along, across))
