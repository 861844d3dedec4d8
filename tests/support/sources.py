"""The CUDA sources that the engine generates, beyond those of the claimed rows' own plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS
from cudnn_actor.engines.cuda.operations import attention as attentions
from cudnn_actor.engines.cuda.operations import normalization as normalizations
from cudnn_actor.engines.cuda.operations import pooling as poolings
from cudnn_actor.engines.cuda.plans import self_check_memory
from cudnn_actor.engines.cuda.plans.kernels import Expression, Leaf, Scalar, Value, elementwise, source
from cudnn_actor.engines.cuda.plans.reference import Reference
from cudnn_actor.protocol import DType, Layout, OperationGraph, TensorSpec, Window
from cudnn_actor.protocol.operations import (
    AvgPool,
    AvgPoolBackward,
    LayerNorm,
    LayerNormBackward,
    MaxPool,
    MaxPoolBackward,
    PointwiseMode,
    RMSNorm,
    RMSNormBackward,
)

from .claims import attention, graph_of, norms, rows

__all__ = ["sources"]

FLOATS = tuple(dtype for dtype in DType if dtype.is_floating)
_BINARY = (PointwiseMode.ADD, PointwiseMode.MUL)
_MOST_DIMS = 8
_SOURCES: dict[Callable[..., Any], Callable[..., str]] = {
    poolings.pooling_kernel: poolings.source,
    normalizations.normalization_kernels: normalizations.source,
    attentions.attention_kernels: attentions.source,
}
"""What compiles an operation's own kernels → what gives their source."""


def sources() -> Iterator[tuple[str, str]]:
    """A name and a source of each; none is there twice."""
    yield "self-check", self_check_memory.source()
    seen = set()
    for name, text in itertools.chain(_elementwise(), _references(), _kernels()):
        if text not in seen:
            seen.add(text)
            yield name, text


def _elementwise() -> Iterator[tuple[str, str]]:
    for mode, double in itertools.product(PointwiseMode, (False, True)):
        operands: tuple[Value, ...] = (Leaf(0, DType.FLOAT32), Scalar(0))[: 1 + (mode in _BINARY)]
        yield f"{mode}-{double}", _kernel(Expression(mode, operands, 0.5), double=double)
    for dtype, double in itertools.product(DType, (False, True)):
        inner = Expression(PointwiseMode.RELU, (Leaf(0, DType.FLOAT32),), dtype=dtype)
        yield f"rounded-{dtype}-{double}", _kernel(Expression(PointwiseMode.TANH, (inner,)), double=double)
    for read, written, double in itertools.product(DType, DType, (False, True)):
        yield f"{read}-to-{written}-{double}", _kernel(Leaf(0, read), written, double=double)
    for rank in range(1, _MOST_DIMS + 1):
        yield f"{rank}d", _kernel(Leaf(0, DType.FLOAT32), rank=rank, double=False)


def _kernel(value: Value, dtype: DType = DType.FLOAT32, *, rank: int = 2, double: bool) -> str:
    strides = [tuple(3 * 5**axis for axis in reversed(range(rank)))] * 2  # with gaps: no two axes become one
    kernel = elementwise(value, dtype, double, (2,) * rank, strides)
    assert len(kernel.dims) == rank
    return source(kernel)


def _references() -> Iterator[tuple[str, str]]:
    for row in rows():
        if Reference.covers(row.graph):
            yield f"reference-{row.name}", Reference(row.graph).source


def _kernels() -> Iterator[tuple[str, str]]:
    for name, graph in itertools.chain(_poolings(), _norms(), _attentions()):
        (operation,) = graph.operations
        operands = dict(operation.named())
        step = operation.with_operands({name: number for number, name in enumerate(operands)}.__getitem__)
        make = IMPLEMENTATIONS[type(operation)].launchers["kernel"].make
        yield name, _SOURCES[make](step, [graph.tensor(uid) for uid in operands.values()])


def _poolings() -> Iterator[tuple[str, OperationGraph]]:
    """Every class, dtype and number of spatial dims; and one with numbers of more than 32 bits."""
    for dtype, rank in itertools.product(DType, (1, 2, 3)):
        yield from _pooled(dtype, tuple(range(9, 9 + rank)))
    yield from _pooled(DType.FLOAT16, (1 << 16, 1 << 16))


def _pooled(dtype: DType, extents: tuple[int, ...]) -> Iterator[tuple[str, OperationGraph]]:
    window = Window.symmetric(len(extents), 3, pad=1, stride=2)
    x = TensorSpec.packed((2, 3, *extents), dtype, Layout.NHWC)
    y = TensorSpec.packed(window.output_dims(x.dims), dtype, Layout.NHWC)
    index = TensorSpec.packed(y.dims, DType.INT64)
    named = f"{dtype}-{extents}".replace(" ", "")
    yield f"max_pool-{named}", graph_of(MaxPool, {"x": x}, {"y": y}, window=window)
    yield f"max_pool_index-{named}", graph_of(MaxPool, {"x": x}, {"y": y, "index": index}, window=window)
    backward = graph_of(MaxPoolBackward, {"dy": y, "index": index}, {"dx": x}, window=window)
    yield f"max_pool_bwd-{named}", backward
    for padding in (False, True) if dtype.is_floating else ():
        of: dict[str, Any] = {"window": window, "include_padding": padding}
        yield f"avg_pool-{named}-{padding}", graph_of(AvgPool, {"x": x}, {"y": y}, **of)
        yield f"avg_pool_bwd-{named}-{padding}", graph_of(AvgPoolBackward, {"dy": y}, {"dx": x}, **of)


def _norms() -> Iterator[tuple[str, OperationGraph]]:
    """Every class and dtype, with all operands, and with none that may be left out."""
    for dtype in FLOATS:
        wide = DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
        for weights in dict.fromkeys((dtype, wide)):
            for name, graph in norms(dtype, weights, (4, 3, 40)):
                yield f"{name}-{dtype}-{weights}_weights", graph
        x, one = TensorSpec.packed((4, 3, 40), dtype), TensorSpec.packed((4, 3, 1), wide)
        given: dict[str, TensorSpec] = {"dy": x, "x": x}
        mean = {**given, "mean": one, "inverse_deviation": one}
        yield f"layer_norm-{dtype}-plain", graph_of(LayerNorm, {"x": x}, {"y": None})
        yield f"rms_norm-{dtype}-plain", graph_of(RMSNorm, {"x": x}, {"y": None})
        yield f"layer_norm_bwd-{dtype}-plain", graph_of(LayerNormBackward, mean, {"dx": None})
        rms = graph_of(RMSNormBackward, {**given, "inverse_rms": one}, {"dx": None})
        yield f"rms_norm_bwd-{dtype}-plain", rms


def _attentions() -> Iterator[tuple[str, OperationGraph]]:
    choices: tuple[dict[str, Any], ...] = (
        {},
        {"causal": True, "bias": "1hss"},
        {"padded": ("lengths_q", "lengths_kv"), "bias": "b11s"},
        {"head": 12, "groups": 2, "padded": ("lengths_kv",), "causal": True},
        {"head": 1},
        {"head": 256, "layout": "bshd"},
    )
    for dtype, backward, choice in itertools.product(FLOATS, (False, True), choices):
        words = "-".join(f"{name}={value}" for name, value in choice.items()).replace(" ", "")
        kind = "attention_bwd" if backward else "attention"
        yield f"{kind}-{dtype}-{words}", attention(dtype, backward=backward, **choice)
