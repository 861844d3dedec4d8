"""Functions of each element."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.operators.casts import convert, wrap
from cudnn_actor.onnx.operators.gelu import gelu_of, spelled_out_gelu
from cudnn_actor.onnx.values import broadcast_dims
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.graphs.integer_division import divide_towards_zero
from cudnn_actor.protocol.operations import PointwiseMode
from cudnn_actor.protocol.types.dtypes import DType

__all__: list[str] = []

_M = PointwiseMode
_WIDE = (DType.INT64, DType.UINT64)
"""Integers that functions are computed in: they wrap around by themselves."""

_FUNCTIONS: dict[str, tuple[PointwiseMode, int]] = {
    "Acos": (_M.ACOS, 7),
    "Acosh": (_M.ACOSH, 9),
    "And": (_M.LOGICAL_AND, 7),
    "Asin": (_M.ASIN, 7),
    "Asinh": (_M.ASINH, 9),
    "Atan": (_M.ATAN, 7),
    "Atanh": (_M.ATANH, 9),
    "BitwiseAnd": (_M.BITWISE_AND, 18),
    "BitwiseNot": (_M.BITWISE_NOT, 18),
    "BitwiseOr": (_M.BITWISE_OR, 18),
    "BitwiseXor": (_M.BITWISE_XOR, 18),
    "Ceil": (_M.CEIL, 6),
    "Cos": (_M.COS, 7),
    "Cosh": (_M.COSH, 9),
    "Equal": (_M.EQ, 7),
    "Exp": (_M.EXP, 6),
    "Floor": (_M.FLOOR, 6),
    "Greater": (_M.GT, 7),
    "GreaterOrEqual": (_M.GE, 12),
    "HardSwish": (_M.HARD_SWISH, 14),
    "IsNaN": (_M.IS_NAN, 9),
    "Less": (_M.LT, 7),
    "LessOrEqual": (_M.LE, 12),
    "Log": (_M.LOG, 6),
    "Mish": (_M.MISH, 18),
    "Not": (_M.LOGICAL_NOT, 1),
    "Or": (_M.LOGICAL_OR, 7),
    "Reciprocal": (_M.RECIPROCAL, 6),
    "Relu": (_M.RELU, 6),
    "Round": (_M.ROUND, 11),
    "Sigmoid": (_M.SIGMOID, 6),
    "Sign": (_M.SIGN, 9),
    "Sin": (_M.SIN, 7),
    "Sinh": (_M.SINH, 9),
    "Softplus": (_M.SOFTPLUS, 1),
    "Softsign": (_M.SOFTSIGN, 1),
    "Sqrt": (_M.SQRT, 6),
    "Tan": (_M.TAN, 7),
    "Tanh": (_M.TANH, 6),
    "Xor": (_M.LOGICAL_XOR, 7),
}
"""Operators that are a function without parameters, and since which version they are as here."""


def _function(mode: PointwiseMode) -> Callable[[Node, GraphBuilder], Result]:
    def handler(node: Node, g: GraphBuilder) -> Result:
        return g.pointwise(mode, *node.operands())

    return handler


for _name, (_mode, _since) in _FUNCTIONS.items():
    operator(_name, since=_since)(_function(_mode))


def _arithmetic(mode: PointwiseMode) -> Callable[[Node, GraphBuilder], Result]:
    def handler(node: Node, g: GraphBuilder) -> Result:
        dtype = node.dtype(0)
        if node.op == "Mul" and (whole := spelled_out_gelu(node, g)) is not None:
            return whole
        if dtype.is_floating or dtype in _WIDE:
            return g.pointwise(mode, *node.operands())
        wide = (g.astype(x, DType.INT64) if isinstance(x, Tensor) else x for x in node.operands())
        return wrap(g, g.pointwise(mode, *wide), dtype)

    return handler


for _name, _mode in {"Add": _M.ADD, "Sub": _M.SUB, "Mul": _M.MUL}.items():
    operator(_name, since=7)(_arithmetic(_mode))


@operator("Abs", "Neg", since=6)
def magnitude(node: Node, g: GraphBuilder) -> Result:
    x, mode = node.tensor(0), _M.ABS if node.op == "Abs" else _M.NEG
    if x.dtype.numpy.kind != "i" or x.dtype is DType.INT64:
        return g.pointwise(mode, x)
    return wrap(g, g.pointwise(mode, g.astype(x, DType.INT64)), x.dtype)


@operator("PRelu", since=7)
def prelu(node: Node, g: GraphBuilder) -> Result:
    if node.value(0).dtype.kind == "u" and node.dtype(0) not in _WIDE:
        return node.value(0)
    return _arithmetic(_M.PRELU)(node, g)


@operator("Div", since=7)
def div(node: Node, g: GraphBuilder) -> Result:
    a, b = node.operands()
    dtype = node.dtype(0)
    return g.divide(a, b) if dtype.is_floating else divide_towards_zero(g, a, b, dtype)


@operator("Pow", since=7)
def power(node: Node, g: GraphBuilder) -> Result:
    a, b = node.operands()
    dtype = node.dtype(0)
    if not dtype.is_floating:  # of integers to the power of floats, float32 would lose digits
        wide, number = (DType.FLOAT64, float) if node.dtype(1).is_floating else (DType.INT64, int)
        a, b = (g.astype(x, wide) if isinstance(x, Tensor) else number(x) for x in (a, b))
    elif isinstance(b, Tensor) and b.dtype is DType.UINT64:
        b = g.astype(b, DType.FLOAT64)
    return convert(g, g.power(a, b), dtype)


@operator("Mod", since=10)
def mod(node: Node, g: GraphBuilder) -> Result:
    return (g.fmod if node.attribute("fmod") else g.mod)(*node.operands())


@operator("BitShift", since=11)
def bit_shift(node: Node, g: GraphBuilder) -> Result:
    left = node.attribute("direction") == "LEFT"
    return (g.left_shift if left else g.right_shift)(*node.operands())


@operator("Max", "Min", "Sum", "Mean", since=6)
def variadic(node: Node, g: GraphBuilder) -> Result:
    of = {"Max": g.maximum, "Min": g.minimum}.get(node.op, g.add)
    total = functools.reduce(of, node.tensors())
    return total / float(len(node.inputs)) if node.op == "Mean" else total


@operator("Where", since=9)
def where(node: Node, g: GraphBuilder) -> Result:
    condition = node.value(0)
    if condition.fixed and condition.array.all() == condition.array.any():  # the same everywhere
        chosen = node.value(1 if condition.array.all() else 2)
        if chosen.dims == broadcast_dims(*(node.dims(number) for number in range(3))):
            return chosen
    a, b = node.operand(1), node.operand(2)
    if node.value(1).dtype == np.bool_:  # no number is a truth value
        a, b = node.tensor(1), node.tensor(2)
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):  # one of them says the dtype
        a = node.tensor(1)
    return g.where(node.tensor(0), a, b)


@operator("Identity", since=1)
def identity(node: Node, _: GraphBuilder) -> Result:
    return node.value(0)


# Activations with parameters.


@operator("Clip", since=6)
def clip(node: Node, g: GraphBuilder) -> Result:
    x = node.tensor(0)
    if node.version < 11:
        low, high = node.attribute("min"), node.attribute("max")
        return g.clip(x, low, high) if low <= high else g.minimum(g.maximum(x, low), high)
    for number, of in ((1, g.maximum), (2, g.minimum)):
        if node.has(number):
            x = of(x, node.operand(number))
    return node.value(0) if x is node.tensor(0) else x


@operator("Erf", since=9)
def erf(node: Node, g: GraphBuilder) -> Result:
    x = node.tensor(0)
    if x.dtype.is_floating:
        return g.erf(x)
    below = x * 0 if x.dtype.numpy.kind == "u" else g.where(g.less(x, -3), -1, x * 0)
    return g.where(g.greater(x, 3), 1, below)  # float32's result, truncated


@operator("Elu", since=6)
@operator("LeakyRelu", since=6)
@operator("Swish", since=24)
def with_alpha(node: Node, g: GraphBuilder) -> Result:
    of = {"Elu": g.elu, "LeakyRelu": g.leaky_relu, "Swish": g.swish}[node.op]
    return of(node.tensor(0), node.attribute("alpha"))


@operator("Celu", since=12)
def celu(node: Node, g: GraphBuilder) -> Result:
    x, alpha = node.tensor(0), node.attribute("alpha")
    if alpha > 0:
        return g.celu(x, alpha)
    return g.maximum(x, 0.0) + g.minimum((g.exp(x / alpha) - 1.0) * alpha, 0.0)


@operator("Selu", since=6)
def selu(node: Node, g: GraphBuilder) -> Result:
    return g.elu(node.tensor(0), node.attribute("alpha")) * node.attribute("gamma")


@operator("ThresholdedRelu", since=10)
def thresholded_relu(node: Node, g: GraphBuilder) -> Result:
    x = node.tensor(0)
    return g.where(g.greater(x, node.attribute("alpha")), x, 0.0)


@operator("HardSigmoid", since=6)
def hard_sigmoid(node: Node, g: GraphBuilder) -> Result:
    return g.clip(node.tensor(0) * node.attribute("alpha") + node.attribute("beta"), 0.0, 1.0)


@operator("Gelu", since=20)
def gelu(node: Node, g: GraphBuilder) -> Result:
    return gelu_of(g, node.value(0), approximate=node.attribute("approximate") == "tanh")


@operator("Shrink", since=9)
def shrink(node: Node, g: GraphBuilder) -> Result:
    x, bias, bound = node.tensor(0), node.attribute("bias"), node.attribute("lambd")
    above = g.where(g.greater(x, bound), x - bias, 0.0)
    y = g.where(g.less(x, -bound), x + bias, above)
    return convert(g, y if x.dtype.is_floating else convert(g, y, DType.INT64), x.dtype)


@operator("IsInf", since=10)
def is_inf(node: Node, g: GraphBuilder) -> Result:
    x = node.tensor(0)
    positive, negative = node.attribute("detect_positive"), node.attribute("detect_negative")
    found = g.isinf(x)
    if positive and negative:
        return found
    if not positive and not negative:
        return g.logical_and(found, g.isnan(x))
    return g.logical_and(found, g.greater(x, 0.0) if positive else g.less(x, 0.0))


@operator("Binarizer", domain="ai.onnx.ml")
def binarizer(node: Node, g: GraphBuilder) -> Result:
    x = node.tensor(0)
    return convert(g, g.greater(x, node.attribute("threshold")), x.dtype)
