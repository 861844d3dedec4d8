"""The convolutions that are measured: ResNet-50's, the small one, and what each costs at least."""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from cudnn_actor import BufferRef, ConvBwdData, ConvBwdFilter, ConvFwd, ConvSpec, Numerics, TensorSpec
from cudnn_actor.protocol.messages.messages import Compute
from cudnn_actor.protocol.types.dtypes import DTypeName
from cudnn_actor.protocol.types.tensor import LayoutName

__all__ = ["RESNET50", "Conv", "Direction", "Problem", "small"]


class Direction(enum.StrEnum):
    """The result of a convolution that is computed."""

    FWD = "fwd"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Conv(NamedTuple):
    """A layer: C×H×H in, K filters of R×R."""

    channels: int
    size: int
    filters: int
    taps: int
    stride: int = 1
    pad: int = 0

    def __str__(self) -> str:
        stride = f"/{self.stride}" if self.stride > 1 else ""
        return f"{self.channels}x{self.size}² → {self.filters}, {self.taps}x{self.taps}{stride}"

    @property
    def spec(self) -> ConvSpec:
        """The convolution as a message names it."""
        return ConvSpec.symmetric(2, pad=self.pad, stride=self.stride)

    @property
    def out_size(self) -> int:
        """Height and width of the output."""
        return 1 + (self.size + 2 * self.pad - self.taps) // self.stride


RESNET50 = (
    Conv(3, 224, 64, 7, stride=2, pad=3),
    Conv(64, 56, 64, 1),
    Conv(64, 56, 64, 3, pad=1),
    Conv(64, 56, 256, 1),
    Conv(256, 56, 64, 1),
    Conv(256, 56, 128, 1),
    Conv(128, 56, 128, 3, stride=2, pad=1),
    Conv(128, 28, 512, 1),
    Conv(256, 56, 512, 1, stride=2),
    Conv(512, 28, 128, 1),
    Conv(128, 28, 128, 3, pad=1),
    Conv(512, 28, 256, 1),
    Conv(256, 28, 256, 3, stride=2, pad=1),
    Conv(256, 14, 1024, 1),
    Conv(512, 28, 1024, 1, stride=2),
    Conv(1024, 14, 256, 1),
    Conv(256, 14, 256, 3, pad=1),
    Conv(1024, 14, 512, 1),
    Conv(512, 14, 512, 3, stride=2, pad=1),
    Conv(512, 7, 2048, 1),
    Conv(1024, 14, 2048, 1, stride=2),
    Conv(2048, 7, 512, 1),
    Conv(512, 7, 512, 3, pad=1),
)
"""The distinct ones, the stride of a block in its 3×3 layer, as torchvision builds it.

The first has 3 channels, in any layout: both libraries are given it as it is, and pad or don't as they like.
"""


class Problem(NamedTuple):
    """A layer on a batch, in one direction.

    Parameters
    ----------
    conv, batch, direction
        What to compute.
    dtype, layout
        Of all three tensors.
    tf32
        Whether float32 products may be rounded to TF32.
    """

    conv: Conv
    batch: int
    direction: Direction
    dtype: DTypeName
    layout: LayoutName
    tf32: bool = False

    @property
    def x(self) -> TensorSpec:
        """The input, or its gradient."""
        return self._spec(self.conv.channels, self.conv.size)

    @property
    def w(self) -> TensorSpec:
        """The filter, or its gradient."""
        dims = (self.conv.filters, self.conv.channels, self.conv.taps, self.conv.taps)
        return TensorSpec.packed(dims, self.dtype, self.layout)

    @property
    def y(self) -> TensorSpec:
        """The output, or its gradient."""
        return self._spec(self.conv.filters, self.conv.out_size)

    def _spec(self, channels: int, size: int) -> TensorSpec:
        return TensorSpec.packed((self.batch, channels, size, size), self.dtype, self.layout)

    @property
    def written(self) -> str:
        """Which of "x", "w", "y" is computed; the other two are given."""
        return {Direction.FWD: "y", Direction.DGRAD: "x", Direction.WGRAD: "w"}[self.direction]

    @property
    def flops(self) -> int:
        """Two for each product and sum; the same in every direction."""
        return 2 * math.prod(self.w.dims) * self.batch * self.conv.out_size**2

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors: what must go through memory at least, were there no cache."""
        return self.x.nbytes + self.w.nbytes + self.y.nbytes

    def message(self, x: BufferRef, w: BufferRef, y: BufferRef) -> Compute:
        """The request."""
        conv, numerics = self.conv.spec, Numerics(tf32=self.tf32)
        match self.direction:
            case Direction.FWD:
                return ConvFwd(x=x, w=w, y=y, conv=conv, numerics=numerics)
            case Direction.DGRAD:
                return ConvBwdData(dy=y, w=w, dx=x, conv=conv, numerics=numerics)
            case Direction.WGRAD:
                return ConvBwdFilter(x=x, dy=y, dw=w, conv=conv, numerics=numerics)


def small(*, on_gpu: bool) -> Problem:
    """A problem that takes a GPU a few microseconds, so that everything else is measured."""
    conv = Conv(64, 8, 64, 3, pad=1) if on_gpu else Conv(4, 8, 4, 3, pad=1)
    return Problem(conv, 1, Direction.FWD, "bfloat16", "NHWC")
