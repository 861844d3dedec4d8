"""Graphs that become one kernel of our own."""

from __future__ import annotations

from typing import Any

from cudnn_actor.protocol import (
    BatchNormBackward,
    DType,
    Graph,
    GraphBuilder,
    GroupNormBackward,
    InstanceNormBackward,
    LayerNorm,
    Layout,
    Pad,
    PadMode,
    ReductionMode,
    Tensor,
)

__all__ = ["ELEMENTWISE", "IN_LINES", "NORMS"]

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


def unsigned() -> Graph:
    """uint64 with numbers and other integers."""
    g = GraphBuilder()
    x, n = g.input("x", (3, 4), "uint64"), g.input("n", (1, 4), "uint8")
    y = x - n - (2**63 + 5)  # below 0, but modulo 2**64
    of = {"y": y, "larger": y > 2**63, "low": g.wrap(y, "int16"), "bits": g.right_shift(y, n)}
    return g.build(of, rest=y % 1000, floats=y.astype("float32"), most=y.astype("int64"))


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


def looked_up(dtype: DType, columns: int, of_indices: DType = DType.INT64) -> Graph:
    """Rows of a table, scaled and added to others; some of them are also a result as they are."""
    g = GraphBuilder()
    table, tokens = g.input("table", (9, columns), dtype), g.input("tokens", (2, 5), of_indices)
    places, gain = g.input("places", (1, 5, columns), dtype), g.input("gain", (1, 1, columns), dtype)
    rows = g.take(table, tokens, 0)
    return g.build(rows=rows, y=rows * gain + places)


def selected_in_lines(axis: int) -> Graph:
    """Elements that indices of their own select, and the indices, which the kernel reads as well."""
    g = GraphBuilder()
    x, n = g.input("x", (3, 4, 6)), g.input("n", (3, 4, 6), "int32")
    return g.build(y=g.take_along_axis(x, n, axis) * 2.0 + x, next=n + 1)


def selected_by_lists(dtype: DType) -> Graph:
    """Parts that lists of indices name, of tensors with different layouts."""
    g = GraphBuilder()
    x, lists = g.input("x", (8, 3, 4, 2), dtype, layout=Layout.NHWC), g.input("lists", (6, 2), "int64")
    z = g.input("z", (8, 3, 4, 2), dtype)
    return g.build(y=g.gather_nd(x, lists) - g.gather_nd(z, lists))


def selected_twice() -> Graph:
    """A row that is selected is broadcast over others."""
    g = GraphBuilder()
    x, n, one = g.input("x", (5, 8), "int32"), g.input("n", (7,), "int32"), g.input("one", (1,), "int32")
    return g.build(y=g.take(x, n, 0) + g.take(x, one, 0) * 2)


def around(mode: PadMode, layout: Layout) -> Graph:
    g = GraphBuilder()
    x, y = g.input("x", (2, 8, 3, 4), layout=layout), g.input("y", (2, 8, 6, 8), layout=layout)
    wide = g.pad(x, [(0, 0), (0, 0), (2, 1), (3, 1)], mode=mode)
    return g.build(z=g.relu(wide * 2.0 - y))


def parts_added(dtype: DType, layout: Layout) -> Graph:
    """What the gradient of slices is: a sum of parts with a number around them, one of them in reverse."""
    g = GraphBuilder()
    x, a = g.input("x", (2, 8, 3, 5), dtype, layout=layout), g.input("a", (2, 8, 3, 4), dtype, layout=layout)
    b = g.input("b", (2, 4, 3, 3), dtype, layout=layout)
    one = g.apply(Pad(x=a, before=(0, 0, 0, 1), after=(0, 0, 0, 0), steps=(1, 1, 1, 1)))
    other = g.apply(Pad(x=b, before=(0, 1, 0, 0), after=(0, 0, 0, 2), steps=(1, -2, 1, 1), value=-2))
    return g.build(one=one, y=one + other * 3 + x)


def enlarged(layout: Layout) -> Graph:
    """What a feature pyramid does: a coarser picture is added to a finer one."""
    g = GraphBuilder()
    coarse = g.input("coarse", (2, 8, 3, 4), layout=layout)
    return g.build(y=g.resize(coarse, sizes=(2, 8, 6, 8)) + g.input("fine", (2, 8, 6, 8), layout=layout))


def reduced_to_a_row() -> Graph:
    """A row that is selected beforehand is broadcast over others."""
    g = GraphBuilder()
    row = g.resize(g.input("x", (8, 4)), sizes=(1, 4))
    return g.build(y=row * 2.0 + g.input("others", (7, 4)))


ELEMENTWISE = {
    "nchw": several(FLOAT32, Layout.NCHW, 4),
    "nhwc": several(BFLOAT16, Layout.NHWC, 8),
    "odd": several(FLOAT32, Layout.NHWC, 5),
    "mixed": mixed(),
    "unsigned": unsigned(),
    "single": single(),
    "chain": chain(60),
    "looked up": looked_up(FLOAT32, 8),
    "looked up in bfloat16": looked_up(BFLOAT16, 24, DType.INT32),
    "looked up in odd rows": looked_up(FLOAT32, 5),
    "selected in rows": selected_in_lines(2),
    "selected in columns": selected_in_lines(0),
    "selected by lists": selected_by_lists(FLOAT32),
    "selected twice": selected_twice(),
    "mirrored": around(PadMode.REFLECT, Layout.NCHW),
    "mirrored channels last": around(PadMode.SYMMETRIC, Layout.NHWC),
    "parts": parts_added(FLOAT32, Layout.NCHW),
    "parts in bfloat16": parts_added(BFLOAT16, Layout.NHWC),
    "parts of integers": parts_added(DType.INT8, Layout.NCHW),
    "enlarged": enlarged(Layout.NCHW),
    "enlarged channels last": enlarged(Layout.NHWC),
    "reduced to a row": reduced_to_a_row(),
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
    "taller columns": masked((2, 70, 33), 1),
    "tallest columns": masked((2, 300, 33), 1),
}


def trained(dims: tuple[int, ...], dtype: DType = FLOAT32, layout: Layout = Layout.NHWC) -> Graph:
    """What a residual network does: batch norm, a sum and its relu; some of it is read by others as well."""
    g = GraphBuilder()
    x, residual = g.input("x", dims, dtype, layout=layout), g.input("residual", dims, dtype, layout=layout)
    scale, bias = g.input("scale", dims[1:2], dtype), g.input("bias", dims[1:2], dtype)
    normal = g.batch_norm_training(x, scale, bias, epsilon=1.0)
    y = g.relu(normal + residual)
    return g.build(normal=normal, y=y, mask=y > 0.0)


def gradients(kind: str, dims: tuple[int, ...], layout: Layout, dtype: DType = FLOAT32) -> Graph:
    """The gradients of a norm, of what comes out of the relu behind it and of another reader."""
    g = GraphBuilder()
    x, y = g.input("x", dims, dtype, layout=layout), g.input("y", dims, dtype, layout=layout)
    dy, more = g.input("dy", dims, dtype, layout=layout), g.input("more", dims, dtype, layout=layout)
    scale, wide = g.input("scale", dims[1:2], dtype), DType.FLOAT64 if dtype is DType.FLOAT64 else FLOAT32
    of: dict[str, tuple[Any, tuple[int, ...], dict[str, int]]] = {
        "batch": (BatchNormBackward, dims[1:2], {}),
        "instance": (InstanceNormBackward, dims[:2], {}),
        "groups": (GroupNormBackward, (dims[0], 2), {"groups": 2}),
    }
    norm, statistics, others = of[kind]
    mean, inverse = g.input("mean", statistics, wide), g.input("inverse", statistics, wide)
    passed = g.where(y > 0.0, dy + more, 0.0)
    found = g.apply(
        norm(dy=passed, x=x, mean=mean, inverse_deviation=inverse, scale=scale, **others),
        also=("dscale", "dbias"),
    )
    return g.build(dx=found.dx * 0.5, dscale=found.dscale, dbias=found.dbias, passed=passed)


def before_and_behind(layout: Layout, channels: int = 8) -> Graph:
    """A sum, its norm in groups, and functions of that, with several types and layouts."""
    g = GraphBuilder()
    dims = (2, channels, 5, 4)
    x, other = g.input("x", dims, "bfloat16", layout=layout), g.input("other", dims)
    gate, rows = g.input("gate", (1, channels, 1, 1)), g.input("rows", (1, 1, 1, 4), "int32")
    moved = x + other.astype("bfloat16")
    normal = g.group_norm(moved, 2, g.input("scale", (channels,)), epsilon=1.0)
    return g.build(moved=moved, y=g.swish(normal) * gate, sum=normal.astype("float32") + rows)


def running(dims: tuple[int, ...], dtype: DType = FLOAT32) -> Graph:
    """Batch norm whose running statistics are updated."""
    g = GraphBuilder()
    x = g.input("x", dims, dtype, layout=Layout.NHWC)
    mean, variance = g.input("running_mean", dims[1:2]), g.input("running_variance", dims[1:2])
    y, new_mean, new_variance = g.batch_norm_training(
        x, running_mean=mean, running_variance=variance, epsilon=1.0
    )
    return g.build(y=g.relu(y), updates={"running_mean": new_mean, "running_variance": new_variance})


def inference() -> Graph:
    g = GraphBuilder()
    x = g.input("x", (2, 6, 5, 3), "float16")
    mean, variance = g.input("mean", (6,)), g.input("variance", (6,))
    y = g.batch_norm(x, mean, variance, epsilon=20.0)  # values may be less than 0
    return g.build(y=g.gelu(y.astype("float32")))


def in_place() -> Graph:
    """What is read is overwritten, by a kernel that reads it in two passes."""
    g = GraphBuilder()
    dims = (2, 4, 5, 6)
    x, scale = g.input("x", dims), g.input("scale", dims[1:2])
    return g.build(updates={"x": g.instance_norm(x * 2.0, scale, epsilon=1.0) + x}, old=g.relu(x))


def gradients_in_place() -> Graph:
    """What is read in the passes of both sums is overwritten."""
    g = GraphBuilder()
    x, dy, scale = g.input("x", (2, 4, 5, 6)), g.input("dy", (2, 4, 5, 6)), g.input("scale", (4,))
    mean, inverse = g.input("mean", (2, 4)), g.input("inverse", (2, 4))
    norm = InstanceNormBackward(dy=dy, x=x, mean=mean, inverse_deviation=inverse, scale=scale)
    found = g.apply(norm, also=("dscale",))
    return g.build(dscale=found.dscale, updates={"dy": found.dx * 0.5})


NORMS = {
    "training": trained((2, 8, 5, 4), BFLOAT16),
    "training cut": trained((2, 8, 65, 64)),
    "training nchw": trained((3, 5, 6, 4), layout=Layout.NCHW),
    "training nchw cut": trained((2, 2, 64, 64), layout=Layout.NCHW),
    "training odd": trained((2, 5, 4, 3)),
    "training float64": trained((2, 6, 4, 3), DType.FLOAT64),
    "batch gradients": gradients("batch", (2, 8, 5, 4), Layout.NHWC, BFLOAT16),
    "batch gradients cut": gradients("batch", (2, 8, 65, 64), Layout.NHWC),
    "instance gradients": gradients("instance", (2, 4, 5, 4), Layout.NCHW),
    "group gradients": gradients("groups", (2, 8, 5, 4), Layout.NHWC),
    "groups": before_and_behind(Layout.NHWC),
    "groups nchw": before_and_behind(Layout.NCHW, 6),
    "running": running((2, 8, 5, 4), BFLOAT16),
    "running cut": running((2, 4, 65, 64)),
    "inference": inference(),
    "in place": in_place(),
    "gradients in place": gradients_in_place(),
}
