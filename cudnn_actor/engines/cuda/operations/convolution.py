"""Convolutions and their gradients in a graph of cuDNN's frontend.

https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Convolutions.html
"""

from __future__ import annotations

from cudnn_actor.engines.cuda.cudnn.frontend_graph import FrontendGraph
from cudnn_actor.engines.cuda.kernels.axes import prepend_dims
from cudnn_actor.engines.cuda.operations.implementation import implement
from cudnn_actor.protocol.operations import (
    Convolution,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
)

__all__ = ["lower_convolution"]

_CALLS: dict[type[Convolution[int]], tuple[str, tuple[str, str]]] = {
    ConvolutionForward: ("conv_fprop", ("image", "weight")),
    ConvolutionBackwardData: ("conv_dgrad", ("loss", "filter")),
    ConvolutionBackwardFilter: ("conv_wgrad", ("image", "loss")),
}


def lower_convolution(graph: FrontendGraph, operation: Convolution[int]) -> None:
    """Add a convolution. One spatial dim becomes two."""
    conv, rank = operation.conv, max(2, operation.conv.spatial_dims)
    call, names = _CALLS[type(operation)]
    inputs = {name: graph.tensor(uid) for name, uid in zip(names, operation.reads, strict=True)}
    output = getattr(graph.pygraph, call)(
        **inputs,
        pre_padding=prepend_dims(conv.pre_padding, rank, 0),
        post_padding=prepend_dims(conv.post_padding, rank, 0),
        stride=prepend_dims(conv.stride, rank, 1),
        dilation=prepend_dims(conv.dilation, rank, 1),
        compute_data_type=graph.compute(operation),
    )
    graph.write(operation.writes[0], output)


implement(ConvolutionForward, ConvolutionBackwardData, ConvolutionBackwardFilter, lower=lower_convolution)
