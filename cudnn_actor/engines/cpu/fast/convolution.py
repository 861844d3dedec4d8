"""Convolutions and their gradients as matrix products, block by block, in the operands' own float type.

A product takes filters, images and results as they lie in memory, packed or channels-last, in any mixture.
What must be in another order is copied: only images, of which a block has fewer elements than its columns.
Fastest is a filter in channels-last order (K, taps, C), with images in channels-last order.

The method is from Chellapilla, Puri, Simard, "High performance convolutional neural networks for document
processing" (2006).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cudnn_actor.engines.cpu.fast.convolution_data import backward_data
from cudnn_actor.engines.cpu.fast.convolution_filter import BackwardFilter
from cudnn_actor.engines.cpu.fast.convolution_forward import Forward
from cudnn_actor.engines.cpu.fast.depthwise import DepthwiseForward
from cudnn_actor.engines.cpu.fast.depthwise_gradients import DepthwiseData, DepthwiseFilter
from cudnn_actor.engines.cpu.fast.kernels import BRIEF_NS, Kernel, Operands, Step
from cudnn_actor.engines.cpu.geometry import ConvGeometry
from cudnn_actor.engines.cpu.scratch import Scratch
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

_MOST_DEPTHWISE_BYTES = 64 << 20
"""Bytes of scratch for each lane of a depthwise kernel. It pads all that dilated filters reach over."""


_Make = Callable[[ConvGeometry, type], Kernel]

_DENSE: Mapping[type, _Make] = {
    ConvolutionForward: Forward,
    ConvolutionBackwardData: backward_data,
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
    depthwise = w.dims[1] == 1 and w.dims[0] == x.dims[1] > 1
    kernels, products_per_ns = (_DEPTHWISE, 3) if depthwise else (_DENSE, 30)
    floats = np.float64 if dtype is DType.FLOAT64 else np.float32
    kernel = kernels[type(node)](geometry, floats)
    if depthwise and kernel.footprint(1) > _MOST_DEPTHWISE_BYTES:
        kernel = min(kernel, _DENSE[type(node)](geometry, floats), key=lambda each: each.footprint(1))
    products = math.prod(y.dims) * geometry.depth
    return _OneLane(kernel) if products <= BRIEF_NS * products_per_ns else kernel


class _OneLane:
    """A kernel that uses the first lane alone."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def footprint(self, lanes: int) -> int:
        """See `Kernel`."""
        del lanes
        return self._kernel.footprint(1)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """See `Kernel`."""
        return self._kernel.bind(operands, results, lanes[:1])
