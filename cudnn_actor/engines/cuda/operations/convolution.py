"""Convolutions and their gradients in a graph of cuDNN's frontend.

https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Convolutions.html
"""

from __future__ import annotations

from cudnn_actor.engines.cuda.cudnn.frontend_graph import FrontendGraph
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

    def both(values: tuple[int, ...], other: int) -> list[int]:
        return [other, *values] if len(values) == 1 else list(values)

    conv = operation.conv
    call, names = _CALLS[type(operation)]
    inputs = {name: graph.tensor(uid) for name, uid in zip(names, operation.reads, strict=True)}
    output = getattr(graph.pygraph, call)(
        **inputs,
        pre_padding=both(conv.pre_padding, 0),
        post_padding=both(conv.post_padding, 0),
        stride=both(conv.stride, 1),
        dilation=both(conv.dilation, 1),
        compute_data_type=graph.compute(operation),
    )
    graph.write(operation.writes[0], output)


implement(ConvolutionForward, ConvolutionBackwardData, ConvolutionBackwardFilter, lower=lower_convolution)
