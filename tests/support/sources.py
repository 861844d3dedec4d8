"""The CUDA sources that the engine generates, beyond those of the claimed rows' own plans."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS
from cudnn_actor.engines.cuda.operations import attention as attentions
from cudnn_actor.engines.cuda.operations import matmul as products
from cudnn_actor.engines.cuda.operations import normalization as normalizations
from cudnn_actor.engines.cuda.operations import pooling as poolings
from cudnn_actor.engines.cuda.operations import reduction as reductions
from cudnn_actor.engines.cuda.operations import softmax as softmaxes
from cudnn_actor.engines.cuda.plans import self_check_memory
from cudnn_actor.engines.cuda.plans.kernels import (
    Constant,
    Expression,
    Leaf,
    Scalar,
    Value,
    elementwise,
    source,
)
from cudnn_actor.engines.cuda.plans.reference import Reference
from cudnn_actor.protocol import DType, InvalidRequest, Layout, OperationGraph, TensorSpec, Window
from cudnn_actor.protocol.operations import (
    FUNCTIONS,
    ArgReduction,
    AvgPool,
    AvgPoolBackward,
    Cumulative,
    LayerNorm,
    LayerNormBackward,
    MaxPool,
    MaxPoolBackward,
    PointwiseMode,
    Reduction,
    ReductionMode,
    RMSNorm,
    RMSNormBackward,
    Softmax,
    SoftmaxBackward,
)

from .claims import attention, graph_of, norms, product, rows

__all__ = ["sources"]

FLOATS = tuple(dtype for dtype in DType if dtype.is_floating)
_MOST_DIMS = 8
_SOURCES: dict[Callable[..., Any], Callable[..., str | tuple[str, ...]]] = {
    poolings.pooling_kernel: poolings.source,
    normalizations.normalization_kernels: normalizations.source,
    attentions.attention_kernels: attentions.source,
    products.matmul_kernel: products.source,
    reductions.reduction_kernels: reductions.sources,
    reductions.cumulative_kernel: reductions.cumulative_sources,
    softmaxes.softmax_kernel: softmaxes.sources,
}
"""What compiles an operation's own kernels → what gives their source, or the source of each."""


def sources() -> Iterator[tuple[str, str]]:
    """A name and a source of each; none is there twice."""
    yield "self-check", self_check_memory.source()
    seen = set()
    for name, text in itertools.chain(_elementwise(), _references(), _kernels()):
        if text not in seen:
            seen.add(text)
            yield name, text


def _elementwise() -> Iterator[tuple[str, str]]:
    for mode, function in FUNCTIONS.items():
        for compute in (DType.FLOAT32, DType.FLOAT64, DType.INT64):
            if function.whole if compute is DType.INT64 else not function.bits:
                operands: tuple[Value, ...] = (Leaf(0, compute), Scalar(0), Leaf(0, compute))
                yield f"{mode}-{compute}", _kernel(_expression(mode, operands, compute))
    for dtype, compute in itertools.product(DType, (DType.FLOAT32, DType.FLOAT64, DType.INT64)):
        inner = _expression(PointwiseMode.NEG, (Leaf(0, DType.FLOAT32),), compute, dtype)
        for outer in (DType.FLOAT32, DType.INT64):
            rounded = _expression(PointwiseMode.ABS, (inner,), outer)
            yield f"rounded-{dtype}-{compute}-{outer}", _kernel(rounded)
        if not dtype.is_floating and compute is DType.INT64:
            shifted = _expression(PointwiseMode.SHIFT_LEFT, (Leaf(0, dtype), Constant(3)), compute, dtype)
            yield f"shifted-{dtype}", _kernel(shifted, dtype)
    for read, written in itertools.product(DType, DType):
        yield f"{read}-to-{written}", _kernel(Leaf(0, read), written)
    for rank in range(1, _MOST_DIMS + 1):
        yield f"{rank}d", _kernel(Leaf(0, DType.FLOAT32), rank=rank)


def _expression(
    mode: PointwiseMode, operands: tuple[Value, ...], compute: DType, dtype: DType | None = None
) -> Expression:
    """An expression of as many of the operands as the mode takes. Infinite parameters stay as they are."""
    function = FUNCTIONS[mode]
    parameters = tuple(
        value + 2 if compute is DType.INT64 else value + 0.5 for value in function.parameters.values()
    )
    return Expression(mode, operands[: function.arity], parameters, compute, dtype)


def _kernel(value: Value, dtype: DType = DType.FLOAT32, *, rank: int = 2) -> str:
    strides = [tuple(3 * 5**axis for axis in reversed(range(rank)))] * 2  # with gaps: no two axes become one
    kernel = elementwise(value, dtype, (2,) * rank, strides)
    assert len(kernel.dims) == rank
    return source(kernel)


def _references() -> Iterator[tuple[str, str]]:
    for row in rows():
        if Reference.covers(row.graph):
            yield f"reference-{row.name}", Reference(row.graph).source


def _kernels() -> Iterator[tuple[str, str]]:
    families = (_poolings(), _norms(), _attentions(), _products(), _reductions(), _softmaxes())
    for name, graph in itertools.chain(*families):
        (operation,) = graph.operations
        operands = dict(operation.named())
        step = operation.with_operands({name: number for number, name in enumerate(operands)}.__getitem__)
        make = IMPLEMENTATIONS[type(operation)].launchers["kernel"].make
        found = _SOURCES[make](step, [graph.tensor(uid) for uid in operands.values()])
        for number, text in enumerate([found] if isinstance(found, str) else found):
            yield f"{name}-{number}" if number else name, text


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


def _products() -> Iterator[tuple[str, OperationGraph]]:
    """Every dtype that matrices and their product can have."""
    for dtype, result in itertools.product(DType, DType):
        with contextlib.suppress(InvalidRequest):
            yield f"matmul-{dtype}-{result}", product(dtype, (2, 5, 7), (7, 3), result)


_LINES: dict[str, tuple[tuple[int, ...], int]] = {
    "warps": ((6, 40), 1),
    "odd": ((6, 41), 1),
    "blocks": ((600, 9000), 1),
    "parts": ((2, 9000), 1),
    "columns": ((9000, 40), 0),
    "short columns": ((3, 9000, 2, 5), 0),
    "inner columns": ((5, 7, 9), 1),
    "wide": ((1 << 16, 1 << 16), 1),
}
"""Dims and an axis: each form of a kernel."""


def _reductions() -> Iterator[tuple[str, OperationGraph]]:
    """Every mode and dtype; and every form of some."""
    modes, some = ReductionMode, (DType.FLOAT32, DType.BFLOAT16, DType.UINT64)
    for form, (dims, axis) in _LINES.items():
        for dtype in DType if form == "warps" else some:
            x, name = {"x": TensorSpec.packed(dims, dtype)}, f"{dtype}-{form}".replace(" ", "_")
            exact = {mode for mode in modes if dtype.is_floating or mode.is_exact}
            for mode in sorted(exact if form == "warps" else exact & {modes.SUM, modes.LOG_SUM_EXP}):
                yield f"{mode}-{name}", graph_of(Reduction, x, {"y": None}, mode=mode, axes=(axis,))
            for mode in (modes.MAX, modes.MIN):
                yield f"arg_{mode}-{name}", graph_of(ArgReduction, x, {"y": None}, mode=mode, axis=axis)
            for mode, flag in itertools.product((modes.SUM, modes.PRODUCT), (False, True)):
                given: dict[str, Any] = {"axis": axis, "exclusive": flag, "reverse": flag}
                graph = graph_of(Cumulative, x, {"y": None}, mode=mode, **given)
                yield f"running_{mode}-{name}-{flag}", graph


def _softmaxes() -> Iterator[tuple[str, OperationGraph]]:
    for (form, (dims, axis)), dtype, log in itertools.product(_LINES.items(), FLOATS, (False, True)):
        x, name = TensorSpec.packed(dims, dtype), f"{dtype}-{form}-{log}".replace(" ", "_")
        given: dict[str, Any] = {"axis": axis, "log": log}
        yield f"softmax-{name}", graph_of(Softmax, {"x": x}, {"y": None}, **given)
        yield f"softmax_bwd-{name}", graph_of(SoftmaxBackward, {"dy": x, "y": x}, {"dx": None}, **given)
