"""Quantised tensors: to and from floats, and products of matrices and convolutions of integers.

https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.operators.casts import dtype_of
from cudnn_actor.onnx.operators.convolution import conv_spec, with_bias
from cudnn_actor.onnx.values import Declined, Unfit, broadcast_dims
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.operations import ConvolutionForward
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["EXACT", "quantise"]

_BYTES = (DType.INT8, DType.UINT8)
_Operands = tuple[int, int, int, int]
"""The inputs that are multiplied, each followed by its zero point."""
EXACT = 1 << 24
"""Whole numbers up to this one are float32."""


def _along(node: Node, g: GraphBuilder, number: int, x: tuple[int, ...]) -> Any:
    """A scale or a zero point that broadcasts to x: one for all, or one for each channel or block."""
    value = node.value(number)
    if value.size == 1 and value.rank <= 1:
        return g.reshape(value.tensor, ()) if value.rank else value.tensor
    axis = node.axis()
    block = node.attribute("block_size", 0)
    if value.rank == 1 and not block:
        return g.reshape(value.tensor, [-1 if n == axis else 1 for n in range(len(x))])
    if value.rank != len(x) or not block:
        raise Declined(f"a scale of dims {value.dims} for dims {x}")
    before, after = value.dims[: axis + 1], value.dims[axis + 1 :]
    wide = g.broadcast_to(g.reshape(value.tensor, (*before, 1, *after)), (*before, block, *after))
    flat = g.reshape(wide, (*before[:-1], before[-1] * block, *after))
    return g.slice(flat, (*[slice(None)] * axis, slice(0, x[axis])))


def quantise(g: GraphBuilder, x: Tensor, zero: Any, dtype: DType) -> Tensor:
    """Rounded, moved by the zero point, and saturated."""
    whole = g.round(x)
    return g.astype(whole if zero is None else g.add(whole, zero), dtype)


@operator("QuantizeLinear", since=10)
def quantize_linear(node: Node, g: GraphBuilder) -> Result:
    x, dims = node.tensor(0), node.dims(0)
    code = node.attribute("output_dtype", 0)
    dtype = node.dtype(2) if node.has(2) else dtype_of(code) if code else DType.UINT8
    x = x if x.dtype.is_floating else g.astype(x, DType.FLOAT32)
    zero = _along(node, g, 2, dims) if node.has(2) else None
    scaled = g.divide(x, _along(node, g, 1, dims))
    precision = node.attribute("precision", 0)
    of = dtype_of(precision) if precision else node.dtype(1)
    if of.is_half:  # the quotient is rounded to that, and then to a whole number
        scaled = g.astype(scaled, of)
    return quantise(g, scaled, None if zero is None else g.astype(zero, DType.FLOAT32), dtype)


@operator("DequantizeLinear", since=10)
def dequantize_linear(node: Node, g: GraphBuilder) -> Result:
    x, dims = node.tensor(0), node.dims(0)
    node.dtype(0)
    code = node.attribute("output_dtype", 0)
    dtype = dtype_of(code) if code else node.dtype(1)
    if node.has(2):
        wide = g.astype(x, DType.INT64)
        x = g.subtract(wide, g.astype(_along(node, g, 2, dims), DType.INT64))
    return node.cast(g.multiply(g.astype(x, DType.FLOAT32), _along(node, g, 1, dims)), dtype)


# Products of bytes.


def _zero_point(node: Node, number: int) -> bool:
    """Whether there is a zero point that may be another number than 0."""
    if not node.has(number):
        return False
    value = node.value(number)
    return not value.fixed or bool(np.any(value.array))


def _minus_zero_point(node: Node, g: GraphBuilder, number: int, zero: Tensor | None, terms: int) -> Tensor:
    """Bytes minus their zero point, as floats in which sums of that many products are exact."""
    if node.dtype(number) not in _BYTES:
        raise Declined(f"a product of integers of {node.dtype(number)}")
    dtype = DType.FLOAT32 if terms * 255 * 255 <= EXACT else DType.FLOAT64
    x = g.astype(node.tensor(number), dtype)
    return x if zero is None else g.subtract(x, g.astype(zero, dtype))


def _spread(g: GraphBuilder, x: Tensor, *behind: int) -> Tensor:
    """A scale or a zero point, without dims if it is one; one for each row or filter with these behind it."""
    return x if x.rank != 1 else g.reshape(x, () if x.dims[0] == 1 else (*x.dims, *behind))


def _dims_of_product(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """The dims of a product of matrices of these dims. Raises `Unfit`."""
    try:
        batch = broadcast_dims(a[:-2], b[:-2])
    except ValueError:
        batch = None
    if batch is None or a[-1:] != b[-2:][:1]:
        raise Unfit(f"has a product of dims {tuple(a)} and {tuple(b)}")
    return (*batch, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


def _product(node: Node, g: GraphBuilder, operands: _Operands) -> Tensor:
    """The product of matrices of bytes, int32 or floats that are whole."""
    a, a_zero, b, b_zero = operands
    if not node.dims(a)[-1]:  # sums of nothing
        return g.full(_dims_of_product(node.dims(a), node.dims(b)), 0, DType.INT32)
    of_a, of_b = _zero_point(node, a_zero), _zero_point(node, b_zero)
    if not of_a and not of_b and node.dtype(a) is node.dtype(b) and node.rank(a) > 1 < node.rank(b):
        return g.matmul(node.tensor(a), node.tensor(b))
    rows = _spread(g, node.tensor(a_zero), 1) if of_a else None
    columns = node.tensor(b_zero) if of_b else None
    terms = node.dims(a)[-1]
    return g.matmul(_minus_zero_point(node, g, a, rows, terms), _minus_zero_point(node, g, b, columns, terms))


def _convolution(node: Node, g: GraphBuilder, operands: _Operands) -> Tensor:
    """The convolution of bytes, int32 or floats that are whole."""
    x, x_zero, w, w_zero = operands
    spec = conv_spec(node, node.dims(x), node.dims(w))
    of_x, of_w = _zero_point(node, x_zero), _zero_point(node, w_zero)
    if not of_x and not of_w and node.dtype(x) is node.dtype(w) and node.dtype(x) in _BYTES:
        return g._result(ConvolutionForward(x=node.tensor(x), w=node.tensor(w), conv=spec))
    terms = math.prod(node.dims(w)[1:])
    zero = _spread(g, node.tensor(w_zero), *[1] * (node.rank(w) - 1)) if of_w else None
    moved = _minus_zero_point(node, g, x, g.reshape(node.tensor(x_zero), ()) if of_x else None, terms)
    return g._result(ConvolutionForward(x=moved, w=_minus_zero_point(node, g, w, zero, terms), conv=spec))


@operator("MatMulInteger", since=10)
def mat_mul_integer(node: Node, g: GraphBuilder) -> Result:
    return node.cast(_product(node, g, (0, 2, 1, 3)), DType.INT32)


@operator("ConvInteger", since=10)
def conv_integer(node: Node, g: GraphBuilder) -> Result:
    return node.cast(_convolution(node, g, (0, 2, 1, 3)), DType.INT32)


def _requantise(node: Node, g: GraphBuilder, total: Tensor, channels: int | None) -> Tensor:
    """Sums of products as quantised numbers. `channels`: the axis to which a scale with several numbers
    belongs."""
    behind = [1] * (0 if channels is None else total.rank - channels - 1)
    b = _spread(g, node.tensor(4), *behind)
    a, out, zero = (_spread(g, node.tensor(number), 1) for number in (1, 6, 7))
    a, b, out, zero = (g.astype(each, DType.FLOAT32) for each in (a, b, out, zero))
    floats = total if total.dtype.is_floating else g.astype(total, DType.FLOAT64)
    scale = g.divide(g.multiply(a, b), out)
    return quantise(g, g.multiply(floats, scale), zero, node.dtype(7))


@operator("QLinearMatMul", since=10)
def qlinear_mat_mul(node: Node, g: GraphBuilder) -> Result:
    return _requantise(node, g, _product(node, g, (0, 2, 3, 5)), None)


@operator("QLinearConv", since=10)
def qlinear_conv(node: Node, g: GraphBuilder) -> Result:
    total = _convolution(node, g, (0, 2, 3, 5))
    return _requantise(node, g, with_bias(g, total, node.tensor_or_none(8)), 1)
