"""Convolutions of buffers, with scalars, a bias and an activation.

`y = alpha * conv(x, w) + beta * y`, where conv is cross-correlation (cuDNN's convention), N is the batch, C
the input channels, K the filters and G the groups:

=============  =====================  ==========================  =====================
message        reads                  writes                      dims of the result
=============  =====================  ==========================  =====================
ConvFwd        x, w, bias, (y)        y                           (N, K, out spatial)
ConvBwdData    dy, w, (dx)            dx                          (N, C, in spatial)
ConvBwdFilter  x, dy, (dw)            dw                          (K, C / G, filter)
=============  =====================  ==========================  =====================

Buffers in brackets are read only if beta is not 0. Such a request is not pure:
it cannot be run again after a crash.
"""

from __future__ import annotations

from cudnn_actor.protocol.messages.any_message import AnyMessage
from cudnn_actor.protocol.messages.receipts import Receipt
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.conv import ConvSpec
from cudnn_actor.protocol.types.epilogue import Epilogue
from cudnn_actor.protocol.types.numerics import Numerics

__all__ = ["ConvBwdData", "ConvBwdFilter", "ConvFwd"]

_NO_EPILOGUE = Epilogue()
_DEFAULT_NUMERICS = Numerics()


class ConvFwd(AnyMessage[Receipt], tag=True):
    """Convolution forward: y = epilogue(alpha * conv(x, w) + beta * y + bias). Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, dims (N, C, spatial).
    w
        Filter, dims (K, C / groups, filter spatial), of x's dtype.
    y
        Output, dims `conv.output_dims(x, w)`. Must not be x, w or bias.
    conv
        Padding, stride, dilation, groups.
    bias
        One value per filter: dims (K,) or (1, K, 1, ...).
    epilogue
        The activation, applied last.
    alpha, beta
        Finite scalars. If beta is 0, y's old values are never read, so they may be NaN.
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


class ConvBwdData(AnyMessage[Receipt], tag=True):
    """Gradient of a convolution with respect to its input: dx = alpha * conv_transposed(dy, w) + beta * dx.

    Answered by a `Receipt`. `conv.output_dims(dx, w)` must be dy's dims.
    """

    dy: BufferRef
    w: BufferRef
    dx: BufferRef
    conv: ConvSpec
    alpha: float = 1.0
    beta: float = 0.0
    numerics: Numerics = _DEFAULT_NUMERICS


class ConvBwdFilter(AnyMessage[Receipt], tag=True):
    """Gradient of a convolution with respect to its filter: dw = alpha * (x correlated with dy) + beta * dw.

    Answered by a `Receipt`. `conv.output_dims(x, dw)` must be dy's dims.
    """

    x: BufferRef
    dy: BufferRef
    dw: BufferRef
    conv: ConvSpec
    alpha: float = 1.0
    beta: float = 0.0
    numerics: Numerics = _DEFAULT_NUMERICS
