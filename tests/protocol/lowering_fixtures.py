"""Messages about buffers that nothing backs: lowering looks at shapes alone."""

from __future__ import annotations

from cudnn_actor.protocol import BufferRef, ConvBwdData, ConvBwdFilter, ConvFwd, ConvSpec, TensorSpec
from cudnn_actor.protocol.types.dtypes import DTypeName
from cudnn_actor.protocol.types.tensor import LayoutName

CONV = ConvSpec.symmetric(2, pad=1)


def ref(
    dims: tuple[int, ...], dtype: DTypeName = "float32", layout: LayoutName = "NCHW", slot: int = 0
) -> BufferRef:
    spec = TensorSpec.packed(dims, dtype, layout)
    return BufferRef(slot=slot, generation=1 << 32 | 1, spec=spec, device="cpu")


def forward(**changes: object) -> ConvFwd:
    """A valid forward convolution, but for `changes`."""
    fields = {"x": ref((2, 4, 8, 8)), "w": ref((6, 4, 3, 3)), "y": ref((2, 6, 8, 8)), "conv": CONV}
    return ConvFwd(**{**fields, **changes})  # type: ignore[arg-type]


def backward_data(**changes: object) -> ConvBwdData:
    fields = {"dy": ref((2, 6, 8, 8)), "w": ref((6, 4, 3, 3)), "dx": ref((2, 4, 8, 8)), "conv": CONV}
    return ConvBwdData(**{**fields, **changes})  # type: ignore[arg-type]


def backward_filter(**changes: object) -> ConvBwdFilter:
    fields = {"x": ref((2, 4, 8, 8)), "dy": ref((2, 6, 8, 8)), "dw": ref((6, 4, 3, 3)), "conv": CONV}
    return ConvBwdFilter(**{**fields, **changes})  # type: ignore[arg-type]
