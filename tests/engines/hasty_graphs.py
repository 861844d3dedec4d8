"""Graphs whose preferred plan has a kernel that cuDNN compiles, and others."""

from __future__ import annotations

from cudnn_actor.protocol import GraphBuilder, OperationGraph, Tensor
from cudnn_actor.protocol.operations import LayerNorm, RMSNorm

from .cuda.cudnn.test_kernel_caches import piece_of

__all__ = [
    "COMPILED",
    "NORMS",
    "PRECOMPILED",
    "SINGLE_PIXELS",
    "WITHOUT_BIAS",
    "attention",
    "network",
    "norm",
]


def _convolved(
    taps: int, kind: str, *, stride: int = 1, size: int = 14, channels: int = 64
) -> OperationGraph:
    g = GraphBuilder()
    x = g.input("x", (8, channels, size, size), "bfloat16", layout="NHWC")
    w = g.input("w", (128, channels, taps, taps), "bfloat16", layout="NHWC")
    bias = None if kind == "relu alone" else g.input("b", (128,), "bfloat16")
    y = g.conv(x, w, stride=stride, pad=taps // 2, bias=bias)
    if kind == "residual":
        y = g.relu(y + g.input("r", y.dims, "bfloat16", layout="NHWC"))
    elif kind != "bias":
        y = g.relu(y, upper=6.0) if kind == "bounded" else g.relu(y)
    return piece_of(g.build(y=y))


def _multiplied(function: str) -> OperationGraph:
    g = GraphBuilder()
    x, w = g.input("x", (128, 64), "bfloat16"), g.input("w", (64, 96), "bfloat16")
    y = x @ w + g.input("b", (96,), "bfloat16")
    made: Tensor = getattr(g, function)(y)
    return piece_of(g.build(y=made))


COMPILED = {
    "residual": _convolved(1, "residual", channels=256),
    "shortcut": _convolved(1, "bias", stride=2, size=28),
    "bounded": _convolved(1, "bounded"),
    "3x3 residual": _convolved(3, "residual"),
    "gelu": _multiplied("gelu"),
    "tanh": _multiplied("tanh"),
}
PRECOMPILED = {"relu": _convolved(3, "relu")}
SINGLE_PIXELS = {"1x1 relu": _convolved(1, "relu", channels=256)}
"""cuDNN has a kernel for each of these, too, but cuBLASLt has one sooner."""
WITHOUT_BIAS = _convolved(3, "relu alone")
"""Some graphs of its kind have kernels in cuDNN; it has candidates with compiled kernels only."""


def norm(kind: str, rows: int = 200) -> OperationGraph:
    """A norm of rows, alone."""
    g = GraphBuilder()
    x, scale = g.input("x", (rows, 64), "bfloat16"), g.input("scale", (64,), "bfloat16")
    if kind == "layer norm":
        return g.build(y=g.apply(LayerNorm(x=x, scale=scale, bias=g.input("bias", (64,), "bfloat16")))).body
    return g.build(y=g.apply(RMSNorm(x=x, scale=scale))).body


NORMS = {kind: norm(kind) for kind in ("layer norm", "rms norm")}
"""cuDNN compiles a kernel for each of these, too; the kernels that run them sooner are ours."""


def attention(samples: int, *, width: int = 64) -> OperationGraph:
    """Attention of 12 heads of 197 positions."""
    g = GraphBuilder()
    q, k, v = (g.input(name, (samples, 12, 197, width), "bfloat16") for name in "qkv")
    return piece_of(g.build(y=g.attention(q, k, v)))


def network(batch: int) -> OperationGraph:
    """Some layers of a residual network: pieces of both kinds."""
    g = GraphBuilder()
    x = g.input("x", (batch, 64, 14, 14), "bfloat16", layout="NHWC")
    down = g.input("down", (64, 64, 1, 1), "bfloat16", layout="NHWC")
    up = g.input("up", (64, 64, 1, 1), "bfloat16", layout="NHWC")
    wide = g.input("wide", (64, 64, 3, 3), "bfloat16", layout="NHWC")
    for _ in range(2):
        y = g.relu(g.conv(x, down))
        y = g.relu(g.conv(y, wide, pad=1))
        x = g.relu(g.conv(y, up) + x)
    return g.build(y=x).body
