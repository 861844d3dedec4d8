"""Blocks of well-known networks as graphs, forward and backward, and the same in PyTorch.

Tests and benchmarks build them from here, of any size. PyTorch is imported where it is called.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.protocol import DType, Graph, GraphBuilder, Layout, Tensor
from cudnn_actor.protocol.types.dtypes import DTypeLike

__all__ = ["BLOCKS", "Block", "bottleneck", "convnext", "transformer"]

_EPSILON = 1e-5
"""Of batch norms. PyTorch takes none of 0."""


class Block(NamedTuple):
    """A block of a network.

    Parameters
    ----------
    forward
        From x and the weights: y.
    training
        From these and `upstream`, the gradient of y: y, and the gradient of each of them, by its name in
        `gradients`.
    torch
        The same as `forward` in PyTorch: y, from tensors by the inputs' names, with logical dims as here.
    """

    forward: Graph
    training: Graph
    torch: Callable[[Mapping[str, Any]], Any]

    @property
    def gradients(self) -> dict[str, str]:
        """Each input of `forward` → the output of `training` that is its gradient."""
        return {port.name: f"gradient of {port.name}" for port in self.forward.inputs}

    def values(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Inputs of `training`: x and upstream of deviation 1; weights that keep it, all near their usual."""
        rng, found = np.random.default_rng(seed), {}
        for port in self.training.inputs:
            dims = port.spec.dims
            if port.name in ("x", "upstream"):
                values = rng.normal(0, 1, dims)
            elif (
                len(dims) > 1
            ):  # products sum over the first of two dims, convolutions over all but the first
                values = rng.normal(
                    0, 1 / math.sqrt(dims[0] if len(dims) == 2 else math.prod(dims[1:])), dims
                )
            else:
                values = rng.normal("bias" not in port.name, 0.2, dims)
            found[port.name] = values.astype(port.spec.dtype.numpy)
        return found


class _Parameters:
    """A builder, and the inputs that are declared as they are used."""

    def __init__(self, dtype: DTypeLike) -> None:
        self.g = GraphBuilder()
        self._dtype = dtype
        self._inputs: dict[str, Tensor] = {}

    def __call__(self, name: str, *dims: int) -> Tensor:
        """An input; of four dims with the channels last."""
        layout = Layout.NHWC if len(dims) == 4 else Layout.NCHW
        self._inputs[name] = self.g.input(name, dims, self._dtype, layout=layout)
        return self._inputs[name]

    def block(self, y: Tensor, torch: Callable[[Any, Mapping[str, Any]], Any]) -> Block:
        """`torch`: from `torch.nn.functional` and the inputs, y."""
        forward = self.g.build(y=y)
        layout = y._entry.spec.layout
        upstream = self.g.input("upstream", y.dims, y.dtype, layout=layout)
        gradients = self.g.grad(y, list(self._inputs.values()), upstream)
        names = (f"gradient of {name}" for name in self._inputs)
        training = self.g.build({"y": y, **dict(zip(names, gradients, strict=True))})

        def by_torch(inputs: Mapping[str, Any]) -> Any:
            return torch(importlib.import_module("torch.nn.functional"), inputs)

        return Block(forward, training, by_torch)


def bottleneck(
    *,
    batch: int = 32,
    channels: int = 256,
    width: int = 64,
    size: int = 56,
    stride: int = 1,
    dtype: DTypeLike = DType.BFLOAT16,
    inference: bool = False,
) -> Block:
    """ResNet-50's: 1x1, 3x3 and 1x1 convolutions, each with its batch norm, added to what came in.

    Batch norm is that of training, with the statistics of the batch; for `inference`, of a mean of 0 and a
    variance of 1: a scale and a bias for each channel. What came in is convolved where the dims change: by a
    stride, or because `channels` is not 4 * `width`.
    """
    p = _Parameters(dtype)
    g = p.g
    projected = stride > 1 or channels != 4 * width

    def conv(x: Tensor, name: str, filters: int, taps: int, stride: int = 1) -> Tensor:
        y = g.conv(x, p(f"w{name}", filters, x.dims[1], taps, taps), pad=taps // 2, stride=stride)
        scale, bias = (p(f"{part}{name}", filters) for part in ("scale", "bias"))
        if inference:
            return y * scale[:, None, None] + bias[:, None, None]
        return g.batch_norm_training(y, scale, bias, epsilon=_EPSILON)  # type: ignore[no-any-return]

    x = p("x", batch, channels, size, size)
    y = g.relu(conv(x, "1", width, 1))
    y = g.relu(conv(y, "2", width, 3, stride))
    y = conv(y, "3", 4 * width, 1)
    y = g.relu(y + (conv(x, "4", 4 * width, 1, stride) if projected else x))

    def torch(f: Any, inputs: Mapping[str, Any]) -> Any:
        def conv(x: Any, name: str, stride: int = 1) -> Any:
            w, scale, bias = (inputs[f"{part}{name}"] for part in ("w", "scale", "bias"))
            y = f.conv2d(x, w, stride=stride, padding=w.shape[2] // 2)
            if not inference:
                return f.batch_norm(y, None, None, scale, bias, training=True, eps=_EPSILON)
            mean, variance = x.new_zeros(len(scale)), x.new_full((len(scale),), 1 - _EPSILON)
            return f.batch_norm(y, mean, variance, scale, bias, eps=_EPSILON)

        x = inputs["x"]
        y = conv(f.relu(conv(f.relu(conv(x, "1")), "2", stride)), "3")
        return f.relu(y + (conv(x, "4", stride) if projected else x))

    return p.block(y, torch)


def convnext(
    *, batch: int = 32, channels: int = 96, size: int = 56, dtype: DTypeLike = DType.BFLOAT16
) -> Block:
    """ConvNeXt's: a depthwise 7x7 convolution, layer norm, two products with gelu between, and a scale.

    https://arxiv.org/abs/2201.03545
    """
    p = _Parameters(dtype)
    g = p.g
    x = p("x", batch, channels, size, size)
    y = g.conv(x, p("w", channels, 1, 7, 7), pad=3, groups=channels, bias=p("bias", channels))
    rows = g.layer_norm(
        y.transpose(0, 2, 3, 1), p("norm_scale", channels), p("norm_bias", channels), epsilon=1e-6
    )
    rows = g.gelu(rows.reshape(-1, channels) @ p("w1", channels, 4 * channels) + p("bias1", 4 * channels))
    rows = (rows @ p("w2", 4 * channels, channels) + p("bias2", channels)) * p("layer_scale", channels)
    y = x + rows.reshape(batch, size, size, channels).transpose(0, 3, 1, 2)

    def torch(f: Any, inputs: Mapping[str, Any]) -> Any:
        x = inputs["x"]
        y = f.conv2d(x, inputs["w"], inputs["bias"], padding=3, groups=channels).permute(0, 2, 3, 1)
        y = f.layer_norm(y, (channels,), inputs["norm_scale"], inputs["norm_bias"], 1e-6)
        y = f.gelu(f.linear(y, inputs["w1"].T, inputs["bias1"]))
        y = f.linear(y, inputs["w2"].T, inputs["bias2"]) * inputs["layer_scale"]
        return x + y.permute(0, 3, 1, 2)

    return p.block(y, torch)


def transformer(
    *,
    batch: int = 4,
    length: int = 1024,
    width: int = 1024,
    heads: int = 16,
    hidden: int = 2816,
    dtype: DTypeLike = DType.BFLOAT16,
) -> Block:
    """A transformer's: causal attention and SwiGLU, each behind an RMS norm and added to what came in."""
    p = _Parameters(dtype)
    g = p.g
    x = p("x", batch, length, width)
    rows = x.reshape(-1, width)

    def by_head(y: Tensor) -> Tensor:
        return y.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)

    normal = g.rms_norm(rows, p("scale1", width), epsilon=1e-6)
    q, k, v = (by_head(normal @ p(f"w{name}", width, width)) for name in "qkv")
    seen = g.attention(q, k, v, causal=True).transpose(0, 2, 1, 3).reshape(-1, width)
    rows = rows + seen @ p("wo", width, width)
    normal = g.rms_norm(rows, p("scale2", width), epsilon=1e-6)
    gated = g.swish(normal @ p("w1", width, hidden)) * (normal @ p("w2", width, hidden))
    y = (rows + gated @ p("w3", hidden, width)).reshape(batch, length, width)

    def torch(f: Any, inputs: Mapping[str, Any]) -> Any:
        def product(x: Any, name: str) -> Any:
            return f.linear(x, inputs[name].T)

        x = inputs["x"]
        normal = f.rms_norm(x, (width,), inputs["scale1"], 1e-6)
        q, k, v = (
            product(normal, f"w{name}").view(batch, length, heads, -1).transpose(1, 2) for name in "qkv"
        )
        seen = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + product(seen.transpose(1, 2).reshape(batch, length, width), "wo")
        normal = f.rms_norm(x, (width,), inputs["scale2"], 1e-6)
        return x + product(f.silu(product(normal, "w1")) * product(normal, "w2"), "w3")

    return p.block(y, torch)


BLOCKS: dict[str, Callable[..., Block]] = {
    "bottleneck": bottleneck,
    "convnext": convnext,
    "transformer": transformer,
}
"""By default of the sizes of ResNet-50's first stage, ConvNeXt-T's first, and a layer of 1024 features."""
