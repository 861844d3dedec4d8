"""Graphs of several operations, as users build them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from cudnn_actor import BufferRef, CudnnRef, Graph, GraphBuilder
from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan
from cudnn_actor.operations import Attention, AvgPool, LayerNorm, MaxPool, Window
from cudnn_actor.protocol import Tensor
from cudnn_actor.protocol.types.dtypes import DTypeName

__all__ = ["GRAPHS", "Values", "assert_close", "bottleneck", "defined", "downloaded", "updated", "uploaded"]
__all__ += ["values_for"]

Values = dict[str, np.ndarray]
_ERRORS = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""In terms of the largest of a result's values: sums of many products are not exact where they cancel."""


def bottleneck(dtype: DTypeName) -> Graph:
    """ResNet-50's: three convolutions with biases, and what came in added before the last relu."""
    g = GraphBuilder()
    x = g.input("x", (2, 64, 14, 14), dtype, layout="NHWC")

    def conv(x: Tensor, name: str, filters: int, taps: int) -> Tensor:
        w = g.input(f"w{name}", (filters, x.dims[1], taps, taps), dtype, layout="NHWC")
        return g.conv(x, w, pad=taps // 2, bias=g.input(f"b{name}", (filters,), dtype))

    y = g.pointwise("relu", conv(x, "1", 16, 1))
    y = g.pointwise("relu", conv(y, "2", 16, 3))
    return g.build(y=g.pointwise("relu", conv(y, "3", 64, 1) + x))


def stem(dtype: DTypeName) -> Graph:
    """A convolution with a stride, max pooling with its index, and a mean of all pixels."""
    g = GraphBuilder()
    x, w = (
        g.input("x", (2, 8, 24, 24), dtype, layout="NHWC"),
        g.input("w", (16, 8, 3, 3), dtype, layout="NHWC"),
    )
    y = g.pointwise("relu", g.conv(x, w, pad=1, stride=2))
    pooled = g.apply(MaxPool(x=y, window=Window.symmetric(2, 3, 1, 2)), also=("index",))
    mean = g.apply(AvgPool(x=pooled.y, window=Window.symmetric(2, 6)))
    return g.build(mean=mean.reshape(2, 16), index=pooled.index, y=y)


def self_attention(dtype: DTypeName) -> Graph:
    """A norm, and attention between views of one tensor, added to what came in."""
    g = GraphBuilder()
    x, scale, bias = (
        g.input("x", (2, 32, 3 * 64), dtype),
        g.input("scale", (192,), dtype),
        g.input("bias", (192,), dtype),
    )
    normal = g.apply(LayerNorm(x=x, scale=scale, bias=bias))
    q, k, v = (
        normal[:, :, n * 64 : (n + 1) * 64].reshape(2, 32, 4, 16).transpose(0, 2, 1, 3) for n in range(3)
    )
    y = g.apply(Attention(q=q, k=k, v=v, causal=True))
    return g.build(y=y.transpose(0, 2, 1, 3).reshape(2, 32, 64) + x[:, :, :64] * 0.5)


def updated(dtype: DTypeName) -> Graph:
    """A running mean, which is an input that the graph changes."""
    g = GraphBuilder()
    x, mean = g.input("x", (4, 64), dtype), g.input("mean", (4, 64), dtype)
    return g.build(updates={"mean": mean * 0.9 + x * 0.1}, y=x + mean * -1.0, before=mean)


def moved(dtype: DTypeName) -> Graph:
    """Elements in other places: reversed, misaligned, in another order."""
    g = GraphBuilder()
    x = g.input("x", (4, 6, 10), dtype)
    return g.build(
        a=x[:, ::-1, 1:], b=x.transpose(2, 0, 1).reshape(10, 24), c=x[1, 2:5, None, ::3] + 1.0, same=x
    )


def feed_forward(dtype: DTypeName) -> Graph:
    """A residual with its norm, products with numbers, biases and functions behind them, and a softmax."""
    g = GraphBuilder()
    x, other = g.input("x", (2, 24, 64), dtype), g.input("other", (2, 24, 64), dtype)
    up, down = g.input("up", (64, 128), dtype), g.input("down", (128, 64), dtype)
    bias, scale = g.input("bias", (128,), dtype), g.input("scale", (64,), dtype)
    moved = x + other
    hidden = g.gelu(g.rms_norm(moved, scale) @ up * 0.5 + bias)
    y = hidden @ down + moved
    return g.build(y=y, moved=moved, most=g.max(y, axis=-1), soft=g.softmax(y * 0.25, -1))


def scaled(dtype: DTypeName) -> Graph:
    """Convolutions with numbers behind them."""
    g = GraphBuilder()
    x = g.input("x", (2, 16, 10, 10), dtype, layout="NHWC")
    w = g.input("w", (16, 16, 3, 3), dtype, layout="NHWC")
    y = g.relu(g.conv(x, w, pad=1) * 0.5)
    return g.build(y=g.conv(y, w, pad=1) + 1.0, mean=g.mean(y, axis=(2, 3)))


def differentiated(dtype: DTypeName) -> Graph:
    """A loss and its gradients: those of a convolution, a slice, maxima, running products and a softmax."""
    g = GraphBuilder()
    x, w = (
        g.input("x", (2, 8, 6, 6), dtype, layout="NHWC"),
        g.input("w", (4, 8, 3, 3), dtype, layout="NHWC"),
    )
    rows = g.softmax(g.tanh(g.conv(x, w, pad=1, stride=2)).reshape(2, 36)[:, ::-3])
    peaks = g.max(x, (2, 3))
    loss = g.sum(g.square(rows)) * 100.0 + g.logsumexp(peaks) + g.cumprod(peaks * 0.5 + 0.5, 1).sum()
    dx, dw = g.grad(loss, [x, w])
    return g.build(loss=loss, dx=dx, dw=dw)


GRAPHS: dict[str, Callable[[DTypeName], Graph]] = {
    "bottleneck": bottleneck,
    "stem": stem,
    "self attention": self_attention,
    "updated": updated,
    "moved": moved,
    "feed forward": feed_forward,
    "scaled": scaled,
    "differentiated": differentiated,
}


def values_for(graph: Graph) -> Values:
    """Values for the inputs: of mean 0, small enough for every sum here."""
    found: Values = {}
    for number, port in enumerate(graph.inputs):
        values = np.random.default_rng(number).normal(0, 0.3, port.spec.dims)
        found[port.name] = values.astype(np.float32).astype(port.spec.dtype.numpy)
    return found


def defined(graph: Graph, values: Values) -> Values:
    """The outputs and the updated inputs, by the operations' definitions."""
    body, buffers, named = graph.body, [], {}
    for uid in body.bound:
        name, tensor = graph.names_of[uid], body.tensor(uid)
        given = values.get(name)
        buffer = np.empty(tensor.dims, tensor.dtype.numpy) if given is None else given.copy()
        if tensor.overwrites is not None or name not in values:
            named[name] = buffer
        buffers.append(buffer)
    EvaluatedPlan("", body).bind(np.empty(0, np.uint8)).run(buffers, ())
    return named


async def uploaded(gpu: CudnnRef, graph: Graph, values: Values) -> dict[str, BufferRef]:
    return {
        port.name: await gpu.upload(values[port.name], layout=port.spec.layout.value)  # type: ignore[arg-type]
        for port in graph.inputs
    }


async def downloaded(gpu: CudnnRef, graph: Graph, buffers: Mapping[str, BufferRef], out: object) -> Values:
    made = out if isinstance(out, tuple) else (out,)
    found = {port.name: await gpu.download(ref) for port, ref in zip(graph.outputs, made, strict=True)}
    for tensor in graph.body.tensors:
        if tensor.overwrites is not None:
            name = graph.names_of[tensor.uid]
            found[name] = await gpu.download(buffers[name])
    return found


def assert_close(got: Values, wanted: Values, dtype: DTypeName) -> None:
    """The same names, and the same values but for some roundings; whole numbers exactly."""
    assert got.keys() == wanted.keys()
    for name, result in got.items():
        if result.dtype.kind == "i":
            np.testing.assert_array_equal(result, wanted[name])
        else:
            one, other = result.astype(np.float64), wanted[name].astype(np.float64)
            largest = float(np.abs(other).max(initial=0.0))
            np.testing.assert_allclose(
                one, other, rtol=_ERRORS[dtype], atol=_ERRORS[dtype] * largest, err_msg=name
            )
