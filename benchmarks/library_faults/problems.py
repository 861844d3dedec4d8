"""Problems for which errata exclude engines of cuDNN."""

from __future__ import annotations

from typing import Any

from cudnn_actor.protocol import (
    Activation,
    BufferRef,
    ConvSpec,
    DType,
    Epilogue,
    LayerNormBackward,
    Layout,
    MatMul,
    OperationGraph,
    TensorSpec,
)
from cudnn_actor.protocol.messages.lowering import lower
from tests.gpu.cases import Case, Kind

from ..problem import graph_of

__all__ = ["CASES", "PROBLEMS"]

_HALF = (DType.BFLOAT16, DType.FLOAT16)


def _product(m: int, k: int, n: int, dtype: DType, gap: int = 0) -> OperationGraph:
    """The product of two matrices whose rows are `gap` elements further apart than they are long."""

    def matrix(rows: int, columns: int) -> BufferRef:
        spec = TensorSpec.strided((rows, columns), (columns + gap, 1), dtype)
        return BufferRef(slot=0, generation=0, spec=spec, device="none")

    return lower(MatMul(a=matrix(m, k), b=matrix(k, n), y=matrix(m, n))).graph


def _convolution(
    kind: Kind,
    dtype: DType,
    x: tuple[int, ...],
    w: tuple[int, ...],
    *,
    layout: Layout = Layout.NHWC,
    groups: int = 1,
    pad: int = 1,
    odd: str = "",
    **extras: Any,
) -> Case:
    """A convolution in two dims. In the tensors that `odd` names, rows are an element further apart."""
    conv = ConvSpec.symmetric(2, pad=pad, groups=groups)
    dims = {"x": x, "w": w, "y": conv.output_dims(x, w)}
    specs: dict[str, Any] = {name: TensorSpec.packed(of, dtype, layout) for name, of in dims.items()}
    for name in odd:
        _, c, h, width = dims[name]
        row = width * c + 1
        specs[name] = TensorSpec.strided(dims[name], (h * row, 1, row, c), dtype)
    return Case(kind=kind, conv=conv, **specs, **extras)


def _everything(dtype: DType, channels: int) -> dict[str, Any]:
    bias = TensorSpec.packed((channels,), dtype)
    return {"alpha": 1.5, "beta": 0.5, "bias": bias, "epilogue": Epilogue(activation=Activation.RELU)}


def _two_channels() -> Case:
    """A convolution of two channels, whose pixels lie ten elements apart, and whose rows 251."""
    x, w = (2, 2, 25, 25), (8, 2, 3, 3)
    spec = TensorSpec.strided(x, (251 * 25, 1, 251, 10), DType.BFLOAT16)
    conv = ConvSpec.symmetric(2, pad=1)
    others: dict[str, Any] = {
        name: TensorSpec.packed(dims, DType.BFLOAT16, Layout.NHWC)
        for name, dims in (("w", w), ("y", conv.output_dims(x, w)))
    }
    return Case(kind=Kind.FORWARD, conv=conv, x=spec, **others)


def _layer_norm_backward() -> OperationGraph:
    x, weights, kept = (
        TensorSpec.packed(dims, dtype)
        for dims, dtype in (
            ((100_352, 96), DType.BFLOAT16),
            ((96,), DType.BFLOAT16),
            ((100_352, 1), DType.FLOAT32),
        )
    )
    names = {"dy": x, "x": x, "mean": kept, "inverse_deviation": kept, "scale": weights}
    return graph_of(LayerNormBackward, names | {"dx": x, "dscale": weights, "dbias": weights})


def _float32_and_relu() -> Case:
    return _convolution(
        Kind.FORWARD,
        DType.FLOAT32,
        (32, 64, 56, 56),
        (64, 64, 3, 3),
        alpha=2.0,
        epilogue=Epilogue(activation=Activation.RELU),
    )


CASES: dict[str, Case | OperationGraph] = {
    **{
        f"gradient of {name}": _convolution(
            Kind.BACKWARD_FILTER, dtype, x, w, layout=layout, groups=w[0], pad=0
        )
        for name, dtype, x, w, layout in (
            ("2x1 depthwise filters, float16", DType.FLOAT16, (6, 16, 16, 18), (16, 1, 2, 1), Layout.NHWC),
            ("1x1 depthwise filters, float16", DType.FLOAT16, (8, 32, 15, 11), (32, 1, 1, 1), Layout.NCHW),
            ("4x2 depthwise filters, bfloat16", DType.BFLOAT16, (8, 2, 14, 6), (2, 1, 4, 2), Layout.NHWC),
            ("5x5 depthwise filters, float16", DType.FLOAT16, (3, 18, 17, 24), (18, 1, 5, 5), Layout.NHWC),
        )
    },
    "5x5 filters in 3 groups, float16": _convolution(
        Kind.FORWARD, DType.FLOAT16, (4, 24, 18, 22), (24, 8, 5, 5), layout=Layout.NCHW, groups=3, pad=2
    ),
    **{f"product with gaps, {dtype.value}": _product(256, 512, 128, dtype, gap=8) for dtype in _HALF},
    "long product, bfloat16": _product(31, 1418, 24, DType.BFLOAT16),
    "long product, float16": _product(15, 1113, 29, DType.FLOAT16),
    "grouped, alpha, beta, bias and relu, float32": _convolution(
        Kind.FORWARD,
        DType.FLOAT32,
        (4, 8, 14, 14),
        (8, 4, 3, 3),
        layout=Layout.NCHW,
        groups=2,
        **_everything(DType.FLOAT32, 8),
    ),
    "5 groups of 4 channels, bias and relu, bfloat16": _convolution(
        Kind.FORWARD,
        DType.BFLOAT16,
        (4, 20, 14, 14),
        (20, 4, 3, 3),
        groups=5,
        **_everything(DType.BFLOAT16, 20),
    ),
    "gradient of a filter of 4, alpha and beta, float16": _convolution(
        Kind.BACKWARD_FILTER, DType.FLOAT16, (4, 4, 14, 14), (4, 4, 3, 3), alpha=1.5, beta=0.5
    ),
    **{
        f"odd strides of {odd}, bias and relu, {dtype.value}": _convolution(
            Kind.FORWARD, dtype, (4, 16, 14, 14), (16, 16, 3, 3), odd=odd, **_everything(dtype, 16)
        )
        for dtype in _HALF
        for odd in "wy"
    },
    "two channels, pixels ten elements apart, bfloat16": _two_channels(),
    "layer norm backward, 100,352 rows of 96, bfloat16": _layer_norm_backward(),
    "3x3, 64 channels, a number and relu, float32": _float32_and_relu(),
}
"""A convolution is a `Case`: the GPU tests can draw its values, and compute them in float64."""

PROBLEMS = {name: of.graph() if isinstance(of, Case) else of for name, of in CASES.items()}
