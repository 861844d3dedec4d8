"""The typed messages: one class per operation, never one per dtype.

All are frozen and keyword-only. `y = alpha * conv(x, w) + beta * y`, where
conv is cross-correlation (cuDNN's convention), N is the batch, C the input
channels, K the filters and G the groups:

=============  =====================  ==========================  =====================
message        reads                  writes                      dims of the result
=============  =====================  ==========================  =====================
ConvFwd        x, w, bias, (y)        y                           (N, K, out spatial)
ConvBwdData    dy, w, (dx)            dx                          (N, C, in spatial)
ConvBwdFilter  x, dy, (dw)            dw                          (K, C / G, filter)
=============  =====================  ==========================  =====================

What stands in brackets is read only where beta is not 0; such a request is
not pure: it cannot be run again after a crash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.conv import ConvSpec
from cudnn_actor.protocol.device_array import DeviceArray
from cudnn_actor.protocol.epilogue import Epilogue
from cudnn_actor.protocol.numerics import Numerics
from cudnn_actor.protocol.tensor import TensorSpec

__all__ = [
    "COMPUTE",
    "Allocate",
    "Compute",
    "ConvBwdData",
    "ConvBwdFilter",
    "ConvFwd",
    "Copy",
    "Download",
    "Drain",
    "Fill",
    "Free",
    "GetStatistics",
    "Message",
    "Ping",
    "Travelling",
    "Upload",
    "Values",
    "View",
    "Warm",
]

if TYPE_CHECKING:
    Values = np.ndarray | DeviceArray
    """Values on the host, or on the device that they go to."""
else:
    Values = np.ndarray  # to the codec: a device array means nothing in another process

_NO_EPILOGUE = Epilogue()
_DEFAULT_NUMERICS = Numerics()


class _Base(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    # A field that is missing, or given by place, is msgspec's own TypeError, which does not name the class.
    # Only a metaclass could: then a message takes 0.58 us to make, or 1.2 where it catches, in place of 0.12.

    control: ClassVar[bool] = False
    """Whether the message overtakes a full mailbox."""


class ConvFwd(_Base, frozen=True, kw_only=True, tag=True):
    """Convolution forward: y = epilogue(alpha * conv(x, w) + beta * y + bias). Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, dims (N, C, spatial).
    w
        Filter, dims (K, C / groups, filter spatial), of x's dtype.
    y
        Output, dims `conv.output_dims(x, w)`. May not be x, w or bias.
    conv
        Padding, stride, dilation, groups.
    bias
        One value per filter: dims (K,) or (1, K, 1, ...).
    epilogue
        The activation, applied last.
    alpha, beta
        Finite scalars. With beta = 0 what y held is never read, be it NaN.
    numerics
        TF32 and determinism.
    """

    x: BufferRef
    w: BufferRef
    y: BufferRef
    conv: ConvSpec
    bias: BufferRef | None = None
    epilogue: Epilogue = _NO_EPILOGUE
    alpha: float = 1.0
    beta: float = 0.0
    numerics: Numerics = _DEFAULT_NUMERICS


class ConvBwdData(_Base, frozen=True, kw_only=True, tag=True):
    """Gradient of a convolution by its input: dx = alpha * conv_transposed(dy, w) + beta * dx.

    Answered by a `Receipt`. `conv.output_dims(dx, w)` must be dy's dims.
    """

    dy: BufferRef
    w: BufferRef
    dx: BufferRef
    conv: ConvSpec
    alpha: float = 1.0
    beta: float = 0.0
    numerics: Numerics = _DEFAULT_NUMERICS


class ConvBwdFilter(_Base, frozen=True, kw_only=True, tag=True):
    """Gradient of a convolution by its filter: dw = alpha * (x correlated with dy) + beta * dw.

    Answered by a `Receipt`. `conv.output_dims(x, dw)` must be dy's dims.
    """

    x: BufferRef
    dy: BufferRef
    dw: BufferRef
    conv: ConvSpec
    alpha: float = 1.0
    beta: float = 0.0
    numerics: Numerics = _DEFAULT_NUMERICS


class Allocate(_Base, frozen=True, kw_only=True, tag=True, eq=False):
    """Take a buffer; answered by its `BufferRef`. Contents are undefined unless `data` gives them.

    Parameters
    ----------
    spec
        The buffer's shape in memory.
    data
        Values of dims `spec.dims`, in any strides. Those on the host are cast to the spec's dtype within the
        same kind; those on the device have it already.
    """

    spec: TensorSpec
    data: Values | None = None


class Upload(_Base, frozen=True, kw_only=True, tag=True, eq=False):
    """Overwrite `dst` with values of the same dims, as in `Allocate`. Answered by a `Receipt`.

    The array must not change until the reply: it is read by the actor, not copied by the sender.
    """

    dst: BufferRef
    data: Values


class Download(_Base, frozen=True, kw_only=True, tag=True):
    """Fetch a buffer: answered by a new C-contiguous array of dims `src.spec.dims`."""

    src: BufferRef


class View(_Base, frozen=True, kw_only=True, tag=True):
    """Ask for a buffer itself, as an array of the device's own array library; thread isolation only.

    Answered, once the work sent before that uses the buffer is done, by an array of its dims and strides on
    its bytes: NumPy's on the CPU, CuPy's on CUDA. The bytes are given to no other buffer while the array, or
    anything made from it that shares its memory, lives; not after a `Free` either.
    """

    buffer: BufferRef


class Copy(_Base, frozen=True, kw_only=True, tag=True):
    """Copy `src` to `dst`: same dims and dtype, any layouts, different buffers. Answered by a `Receipt`."""

    src: BufferRef
    dst: BufferRef


class Fill(_Base, frozen=True, kw_only=True, tag=True):
    """Set every element of `dst` to `value`. Answered by a `Receipt`."""

    dst: BufferRef
    value: float


class Free(_Base, frozen=True, kw_only=True, tag=True):
    """Give a buffer back, once work sent before it is done. Answered by None; every later use is stale."""

    buffer: BufferRef


class Ping(_Base, frozen=True, kw_only=True, tag=True):
    """Ask for a sign of life; answered by the service's generation."""

    control = True


class GetStatistics(_Base, frozen=True, kw_only=True, tag=True):
    """Ask for counters; answered by `Statistics`."""

    control = True


class Warm(_Base, frozen=True, kw_only=True, tag=True):
    """Build the plans of `messages` without running them; answered by the number that were built.

    What cannot be built is remembered, and not reported here.
    """

    messages: tuple[ConvFwd | ConvBwdData | ConvBwdFilter, ...]


class Drain(_Base, frozen=True, kw_only=True, tag=True):
    """Answered by None once everything sent before it has been answered."""


Compute = ConvFwd | ConvBwdData | ConvBwdFilter
"""Messages that run a plan."""

COMPUTE = frozenset({ConvFwd, ConvBwdData, ConvBwdFilter})
"""Their classes, for a look-up."""

Travelling = (
    ConvFwd
    | ConvBwdData
    | ConvBwdFilter
    | Allocate
    | Upload
    | Download
    | Copy
    | Fill
    | Free
    | Ping
    | GetStatistics
    | Warm
    | Drain
)
"""Messages that have a byte form, so that they could be answered in another process."""

Message = Travelling | View
"""Everything that a service answers."""
