"""Graphs that become one kernel of our own."""

from __future__ import annotations

from cudnn_actor.protocol import DType, Graph, GraphBuilder, LayerNorm, Layout, ReductionMode, Tensor

__all__ = ["ELEMENTWISE", "IN_LINES"]

FLOAT32, BFLOAT16 = DType.FLOAT32, DType.BFLOAT16


def several(dtype: DType, layout: Layout, columns: int) -> Graph:
    """Three results, one of which is read inside as well; operands are broadcast in different ways."""
    g = GraphBuilder()
    dims = (2, columns, 3, 8)
    x, y = g.input("x", dims, dtype, layout=layout), g.input("y", dims, dtype, layout=layout)
    scale, row = g.input("scale", (1, columns, 1, 1), dtype), g.input("row", (1, 1, 1, 8), dtype)
    a = x * scale + row
    b = g.relu(a - y)
    return g.build(a=a, b=b, positive=b > 1.0)


def mixed() -> Graph:
    """Types of different sizes, integers and numbers."""
    g = GraphBuilder()
    x, n, t = g.input("x", (4, 16), "bfloat16"), g.input("n", (4, 16), "int32"), g.input("t", (1, 16), "bool")
    d = g.input("d", (4, 16), "float64")
    chosen = g.where(t, x * 2.0, 3.0)
    return g.build(chosen=chosen, whole=n * 3 + 1, wide=d + chosen, bytes=chosen.astype("uint8"))


def single() -> Graph:
    g = GraphBuilder()
    x = g.input("x", (), "float32")
    return g.build(y=x + 1.0)


def chain(length: int) -> Graph:
    g = GraphBuilder()
    y: Tensor = g.input("x", (6, 4))
    for number in range(length):
        y = y + 1.0 if number % 2 else -y
    return g.build(y=y)


ELEMENTWISE = {
    "nchw": several(FLOAT32, Layout.NCHW, 4),
    "nhwc": several(BFLOAT16, Layout.NHWC, 8),
    "odd": several(FLOAT32, Layout.NHWC, 5),
    "mixed": mixed(),
    "single": single(),
    "chain": chain(60),
}


def add_and_norm(dims: tuple[int, ...], dtype: DType = FLOAT32) -> Graph:
    """What a transformer does: a residual that is also a result, its norm, statistics, and what follows."""
    g = GraphBuilder()
    x, residual = g.input("x", dims, dtype), g.input("residual", dims, dtype)
    scale, gate = g.input("scale", dims[-1:], dtype), g.input("gate", (*dims[:-1], 1), dtype)
    moved = x + residual
    return g.build(moved=moved, y=g.relu(g.rms_norm(moved, scale, epsilon=1.0)) * gate)


def layer_norm(dims: tuple[int, ...]) -> Graph:
    g = GraphBuilder()
    x, scale, bias = g.input("x", dims), g.input("scale", dims[1:]), g.input("bias", dims[1:])
    y, mean, inverse = g.apply(
        LayerNorm(x=-x, scale=scale, bias=bias, axis=1, epsilon=0.5), also=("mean", "inverse_deviation")
    )
    return g.build(y=y + 1.0, mean=mean, inverse=inverse, both=mean * inverse)


def by_hand(dims: tuple[int, ...], layout: Layout, axes: tuple[int, ...]) -> Graph:
    """A norm in single steps, and reductions of all kinds."""
    g = GraphBuilder()
    x = g.input("x", dims, layout=layout)
    mean = g.mean(x, axis=axes, keepdims=True)
    centred = x - mean
    variance = g.mean(g.square(centred), axis=axes, keepdims=True)
    normal = centred * g.rsqrt(variance + 1.0)
    outputs: dict[str, Tensor] = {"normal": normal, "most": g.max(normal, axis=axes)}
    for mode in (ReductionMode.L1, ReductionMode.LOG_SUM_EXP, ReductionMode.MIN, ReductionMode.ABSOLUTE_MAX):
        outputs[mode.value] = g.reduce(mode, normal, axis=axes, keepdims=True)
    return g.build(outputs)


def masked(dims: tuple[int, ...], axis: int, *, log: bool = False) -> Graph:
    g = GraphBuilder()
    x, mask = g.input("x", dims), g.input("mask", dims[-1:], "bool")
    hidden = g.where(mask.reshape((1,) * (len(dims) - 1) + dims[-1:]), x * 0.5, -1e30)
    soft = g.log_softmax(hidden, axis) if log else g.softmax(hidden, axis)
    return g.build(y=soft * x)


IN_LINES = {
    "short": add_and_norm((5, 40)),
    "bfloat16": add_and_norm((3, 2, 64), BFLOAT16),
    "long": add_and_norm((2, 6000)),
    "longer": add_and_norm((2, 21000)),
    "float64": add_and_norm((3, 24), DType.FLOAT64),
    "layer_norm": layer_norm((7, 3, 4)),
    "odd": layer_norm((4, 5, 3)),
    "columns": by_hand((3, 4, 5, 6), Layout.NHWC, (2, 3)),
    "channels": by_hand((2, 8, 3, 4), Layout.NHWC, (1,)),
    "planes": by_hand((3, 4, 5, 6), Layout.NCHW, (2, 3)),
    "single": by_hand((3, 4, 1, 1), Layout.NCHW, (2, 3)),
    "masked": masked((6, 33), 1),
    "masked columns": masked((4, 6, 33), 1, log=True),
}
