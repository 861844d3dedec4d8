"""Convolutions and their gradients as matrix products, block by block, in the operands' own float type.

A product takes filters, images and results as they lie in memory, packed or channels-last, in any mixture.
What must be in another order is copied: only images, of which a block has fewer elements than its columns.
Fastest is a filter in channels-last order (K, taps, C), with images in channels-last order.

The method is from Chellapilla, Puri, Simard, "High performance convolutional neural networks for document
processing" (2006).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from cudnn_actor.engines.cpu.exact.geometry import ConvGeometry
from cudnn_actor.engines.cpu.fast.convolution_data import BackwardData
from cudnn_actor.engines.cpu.fast.convolution_filter import BackwardFilter
from cudnn_actor.engines.cpu.fast.convolution_forward import Forward
from cudnn_actor.engines.cpu.fast.depthwise import DepthwiseForward
from cudnn_actor.engines.cpu.fast.depthwise_gradients import DepthwiseData, DepthwiseFilter
from cudnn_actor.engines.cpu.fast.kernels import Kernel
from cudnn_actor.protocol.operations import (
    Convolution,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    Node,
    Specs,
)
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["make"]

_Make = Callable[[ConvGeometry, type], Kernel]

_DENSE: Mapping[type, _Make] = {
    ConvolutionForward: Forward,
    ConvolutionBackwardData: BackwardData,
    ConvolutionBackwardFilter: BackwardFilter,
}
_DEPTHWISE: Mapping[type, _Make] = {
    ConvolutionForward: DepthwiseForward,
    ConvolutionBackwardData: DepthwiseData,
    ConvolutionBackwardFilter: DepthwiseFilter,
}


def make(node: Node, specs: Specs) -> Kernel | None:
    """A kernel for a convolution or one of its gradients; None if it is not of floating-point tensors."""
    if not isinstance(node, Convolution):
        return None
    x, w, y = (specs[name] for name in node.shape)
    dtype = specs[node.inputs[0]].dtype
    if not dtype.is_floating or any(0 in spec.dims for spec in (x, w, y)):
        return None
    geometry = ConvGeometry(x.dims, w.dims, y.dims, node.conv)
    kernels = _DEPTHWISE if w.dims[1] == 1 and w.dims[0] == x.dims[1] > 1 else _DENSE
    return kernels[type(node)](geometry, np.float64 if dtype is DType.FLOAT64 else np.float32)
