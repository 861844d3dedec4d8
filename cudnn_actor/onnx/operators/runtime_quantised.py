"""ONNX Runtime's own operators of quantised numbers: each as the operator of floats between two conversions.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operators.pooling import average_pool, max_pool
from cudnn_actor.onnx.operators.quantised import (
    EXACT,
    dequantize_linear,
    qlinear_conv,
    quantise,
    quantize_linear,
)
from cudnn_actor.onnx.operators.rows import of_rows
from cudnn_actor.onnx.operators.runtime import attend_with_packed_past, microsoft
from cudnn_actor.onnx.operators.unrolled_lstm import unrolled_lstm
from cudnn_actor.onnx.values import Declined, Value
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.types.dtypes import DType

__all__: list[str] = []

microsoft("QuantizeLinear")(quantize_linear)
microsoft("DequantizeLinear")(dequantize_linear)
_TINY = float(np.finfo(np.float32).tiny)


def _one(g: GraphBuilder, x: Tensor) -> Tensor:
    """A scale or a zero point without dims, if it has one element."""
    return g.reshape(x, ()) if x.rank == 1 and x.dims[0] == 1 else x


def _floats(node: Node, g: GraphBuilder, number: int) -> Tensor:
    """An input as the floats that it stands for: its scale and its zero point follow it."""
    x = _minus_zero_point(node, g, number, number + 2)
    return g.multiply(x, _one(g, node.tensor(number + 1)))


def _minus_zero_point(node: Node, g: GraphBuilder, number: int, zero: int) -> Tensor:
    """An input minus its zero point."""
    x = g.astype(node.tensor(number), DType.FLOAT32)
    return g.subtract(x, g.astype(_one(g, node.tensor(zero)), DType.FLOAT32)) if node.has(zero) else x


def _codes(node: Node, g: GraphBuilder, x: Tensor, scale: int, dtype: DType) -> Tensor:
    """Floats as quantised numbers: their scale is an input, and the zero point the one behind it."""
    zero = None
    if node.has(scale + 1):
        zero = g.astype(_one(g, node.tensor(scale + 1)), DType.FLOAT32)
    return quantise(g, g.divide(x, _one(g, node.tensor(scale))), zero, dtype)


@microsoft("QLinearAdd", "QLinearMul")
def arithmetic(node: Node, g: GraphBuilder) -> Result:
    of = g.add if node.op == "QLinearAdd" else g.multiply
    return _codes(node, g, of(_floats(node, g, 0), _floats(node, g, 3)), 6, node.dtype(0))


@microsoft("QLinearSigmoid")
def sigmoid(node: Node, g: GraphBuilder) -> Result:
    return _codes(node, g, g.sigmoid(_floats(node, g, 0)), 3, node.dtype(0))


@microsoft("QLinearLeakyRelu")
def leaky_relu(node: Node, g: GraphBuilder) -> Result:
    return _codes(node, g, g.leaky_relu(_floats(node, g, 0), node.attribute("alpha")), 3, node.dtype(0))


@microsoft("QLinearSoftmax")
def softmax(node: Node, g: GraphBuilder) -> Result:
    x, axis = _floats(node, g, 0), node.axis()
    y = g.softmax(x, axis) if node.attribute("opset") >= 13 else of_rows(g, g.softmax, x, axis)
    return _codes(node, g, y, 3, node.dtype(0))


@microsoft("QLinearConcat")
def concat(node: Node, g: GraphBuilder) -> Result:
    parts = [_floats(node, g, number) for number in range(2, len(node.inputs), 3)]
    return _codes(node, g, g.concatenate(parts, node.axis()), 0, node.dtype(1))


@microsoft("QLinearGlobalAveragePool")
def global_average_pool(node: Node, g: GraphBuilder) -> Result:
    return _pool(node, g, g.global_avg_pool)


@microsoft("QLinearAveragePool")
def quantised_average_pool(node: Node, g: GraphBuilder) -> Result:
    return _pool(node, g, lambda x: average_pool(node.of([_value(x)]), g))


def _pool(node: Node, g: GraphBuilder, pool: Callable[[Tensor], Tensor]) -> Tensor:
    x = _floats(node, g, 0)
    last = bool(node.attribute("channels_last", 0))
    y = pool(_channels_first(g, x) if last else x)
    return _codes(node, g, _channels_last(g, y) if last else y, 3, node.dtype(0))


def _channels_first(g: GraphBuilder, x: Tensor) -> Tensor:
    return g.transpose(x, (0, x.rank - 1, *range(1, x.rank - 1)))


def _channels_last(g: GraphBuilder, x: Tensor) -> Tensor:
    return g.transpose(x, (0, *range(2, x.rank), 1))


def _value(x: Tensor) -> Value:
    """A tensor of the graph, as a node's input."""

    def unknown() -> Any:
        raise Declined("has values that are computed between quantised numbers, and decide over shapes")

    return Value(x.dims, x.dtype.numpy, x, unknown)


@microsoft("NhwcMaxPool")
def nhwc_max_pool(node: Node, g: GraphBuilder) -> Result:
    return _channels_last(g, max_pool(node.of([_value(_channels_first(g, node.tensor(0)))]), g))


@microsoft("QLinearConv")
def channels_last_conv(node: Node, g: GraphBuilder) -> Result:
    if not node.attribute("channels_last"):
        return qlinear_conv(node, g)
    first = _value(_channels_first(g, node.tensor(0)))
    return _channels_last(g, qlinear_conv(node.of([first, *node.inputs[1:]]), g))


# Products.


def _product(g: GraphBuilder, a: Tensor, b: Tensor) -> Tensor:
    """The exact product of whole numbers from -255 to 255, which are float32."""
    if a.dims[-1] * 255 * 255 > EXACT:
        a, b = g.astype(a, DType.FLOAT64), g.astype(b, DType.FLOAT64)
    return g.astype(g.matmul(a, b), DType.FLOAT32)


def _times_scales(node: Node, g: GraphBuilder, product: Tensor, a: int, b: int) -> Tensor:
    """A product of whole numbers times the scales of both, which are inputs."""
    return g.multiply(product, g.multiply(_one(g, node.tensor(a)), _one(g, node.tensor(b))))


def _dynamic(g: GraphBuilder, x: Tensor) -> tuple[Tensor, Tensor]:
    """Floats as bytes minus their zero point, and the scale that both have: see `DynamicQuantizeLinear`."""
    high, low = g.maximum(g.max(x), 0.0), g.minimum(g.min(x), 0.0)
    scale = g.maximum(g.subtract(high, low) / 255.0, _TINY)  # of zeros alone, which are 0 with any scale
    most = g.add(g.round(g.divide(low, scale)), 255.0)  # the zero point is the rounded lowest number
    return g.minimum(g.round(g.divide(x, scale)), most), scale


@microsoft("DynamicQuantizeMatMul")
def dynamic_mat_mul(node: Node, g: GraphBuilder) -> Result:
    codes, scale = _dynamic(g, node.tensor(0))
    y = _product(g, codes, _minus_zero_point(node, g, 1, 3))
    y = g.multiply(y, g.multiply(_one(g, node.tensor(2)), scale))
    return g.add(y, node.tensor(4)) if node.has(4) else y


@microsoft("MatMulIntegerToFloat")
def mat_mul_to_floats(node: Node, g: GraphBuilder) -> Result:
    y = _times_scales(
        node, g, _product(g, _minus_zero_point(node, g, 0, 4), _minus_zero_point(node, g, 1, 5)), 2, 3
    )
    return g.add(y, node.tensor(6)) if node.has(6) else y


@microsoft("QGemm")
def gemm(node: Node, g: GraphBuilder) -> Result:
    a, b = _minus_zero_point(node, g, 0, 2), _minus_zero_point(node, g, 3, 5)
    a = g.transpose(a, (1, 0)) if node.attribute("transA") else a
    b = g.transpose(b, (1, 0)) if node.attribute("transB") else b
    y = _product(g, a, b)
    if node.has(6):
        y = g.add(y, g.astype(node.tensor(6), DType.FLOAT32))
    scale = g.multiply(_one(g, node.tensor(1)), _one(g, node.tensor(4))) * node.attribute("alpha")
    y = g.multiply(y, scale)
    return _codes(node, g, y, 7, node.dtype(0)) if node.has(7) else y


@microsoft("QAttention")
def attention(node: Node, g: GraphBuilder) -> Result:
    if node.attribute("do_rotary") or node.attribute("past_present_share_buffer"):
        raise Declined("has a cache that it changes, or rotates positions")
    y = _times_scales(
        node, g, _product(g, _minus_zero_point(node, g, 0, 6), _minus_zero_point(node, g, 1, 7)), 3, 4
    )
    y = g.add(y, node.tensor(2))
    width = y.dims[2] // 3
    q, k, v = (y[..., n * width : (n + 1) * width] for n in range(3))
    return attend_with_packed_past(node, g, (q, k, v), mask=5, past=8, added=9)


@microsoft("DynamicQuantizeLSTM")
def dynamic_lstm(node: Node, g: GraphBuilder) -> Result:
    """An LSTM whose input is quantised as a whole, and whose states are quantised at each step."""
    scales = {1: node.tensor(8), 2: node.tensor(10)}

    @functools.cache
    def scale_of(number: int, direction: int) -> Tensor:
        """The scale of all weights, or of the weights of each element of each gate."""
        return g.slice(scales[number], direction)

    def product(x: Tensor, weights: Tensor, number: int, direction: int) -> Tensor:
        codes, scale = _dynamic(g, x)
        return g.multiply(_product(g, codes, weights), g.multiply(scale_of(number, direction), scale))

    filters = [_value(_turned_codes(node, g, number, zero)) for number, zero in ((1, 9), (2, 11))]
    return unrolled_lstm(node.of([node.inputs[0], *filters, *node.inputs[3:8]], "LSTM"), g, product)


def _turned_codes(node: Node, g: GraphBuilder, number: int, zero: int) -> Tensor:
    """Weights of dims (directions, inputs, gates) minus their zero points, of (directions, gates, inputs)."""
    x = g.astype(node.tensor(number), DType.FLOAT32)
    points = g.reshape(g.astype(node.tensor(zero), DType.FLOAT32), (x.dims[0], 1, -1))
    return g.transpose(g.subtract(x, points), (0, 2, 1))
