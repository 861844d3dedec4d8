"""The CUDA sources that the engine generates, beyond those of the claimed rows' own plans.

NVRTC takes 25 ms for each, so `make test-support` compiles a part of them, and all with `TEST_ALL=1`
(`tests.whole`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from cudnn_actor.engines.cuda.checking import self_check_memory
from cudnn_actor.engines.cuda.checking.convolution_reference import Reference
from cudnn_actor.engines.cuda.kernels.elementwise import elementwise, source
from cudnn_actor.engines.cuda.kernels.expressions import Constant, Expression, Leaf, Scalar, Value
from cudnn_actor.engines.cuda.kernels.transposes import Tiled, tiled_source
from cudnn_actor.engines.cuda.operations.recurrent_steps import BY_STEP
from cudnn_actor.engines.cuda.planning.compiler import possible_plans
from cudnn_actor.engines.cuda.planning.depthwise import compile_depthwise, ways_of_depthwise
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running.recipe import KernelStep
from cudnn_actor.protocol import DType, InvalidRequest, Layout, OperationGraph, TensorSpec, Window
from cudnn_actor.protocol.operations import (
    FUNCTIONS,
    AdaptiveWindow,
    ArgReduction,
    AvgPool,
    AvgPoolBackward,
    BitCast,
    BorderPad,
    CellActivation,
    CellFunction,
    CTCLoss,
    Cumulative,
    Gather,
    GatherElements,
    GatherND,
    GridPadding,
    GridSample,
    GroupedMatMul,
    GroupedMatMulBackwardWeights,
    LayerNorm,
    LayerNormBackward,
    LocalResponseNorm,
    LocalResponseNormBackward,
    LpPool,
    LpPoolBackward,
    MaxPool,
    MaxPoolBackward,
    Pad,
    PadMode,
    PointwiseMode,
    RandomBernoulli,
    RandomIntegers,
    Randomness,
    RandomNormal,
    RandomUniform,
    RecurrentCell,
    RecurrentSteps,
    Reduction,
    ReductionMode,
    Resample,
    ResampleBackward,
    ResampleMode,
    RMSNorm,
    RMSNormBackward,
    Scatter,
    ScatterElements,
    ScatterND,
    ScatterReduction,
    Softmax,
    SoftmaxBackward,
    TopK,
)
from cudnn_actor.protocol.operations.random import STATE

from ..engines import depthwise_graphs, fused_graphs, moved_graphs
from ..engines.host_cuda import sources_of
from ..whole import pairwise
from .claims import attention, graph_of, norms, product, rows
from .claims import channel_norms as channel_norms_of

__all__ = ["every_source", "sources"]

FLOATS = tuple(dtype for dtype in DType if dtype.is_floating)
_MOST_DIMS = 8


def sources() -> list[tuple[str, str]]:
    """A name and a source of each that is compiled.

    The names' first words are kinds of kernels, and the others their parameters. A part of the sources has
    each pair of words that one name has: each kind in each dtype, and each dtype in each form.
    """
    return pairwise(every_source(), lambda named: named[0].split("-"))


def every_source() -> Iterator[tuple[str, str]]:
    """A name and a source of each; none is there twice."""
    yield "self-check", self_check_memory.source()
    seen = set()
    for name, text in itertools.chain(
        _elementwise(), _references(), _kernels(), _fused(), _moved(), _depthwise()
    ):
        if text not in seen:
            seen.add(text)
            yield name, text


def _elementwise() -> Iterator[tuple[str, str]]:
    for mode, function in FUNCTIONS.items():
        for compute in (DType.FLOAT32, DType.FLOAT64, DType.INT64, DType.UINT64):
            if not function.bits if compute.is_floating else function.whole:
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
    for dtype in DType:
        yield f"constant-{dtype}", _kernel(Constant(1.0), dtype)
    for rank in range(1, _MOST_DIMS + 1):
        yield f"{rank}d", _kernel(Leaf(0, DType.FLOAT32), rank=rank)


def _fused() -> Iterator[tuple[str, str]]:
    graphs = fused_graphs.ELEMENTWISE | fused_graphs.IN_LINES | fused_graphs.NORMS
    bodies = [(name, graph.body) for name, graph in graphs.items()]
    for name, body in (*bodies, *_softmaxes()):
        parts = cut(body)
        for piece in [body] if parts is None else [piece.graph for piece in parts.pieces]:
            (step,) = next(possible_plans(piece, None, None)).recipe.steps
            assert isinstance(step, KernelStep)
            for number, launch in enumerate(step.kernel.launches()):
                yield f"{step.kernel.name}-{name}-{number}".replace(" ", "_"), launch.source


def _moved() -> Iterator[tuple[str, str]]:
    for name, graph in [
        *moved_graphs.CONCATENATED.items(),
        *moved_graphs.TRANSPOSED.items(),
        *moved_graphs.IN_ROWS.items(),
    ]:
        for step in compile_split(graph.body, None, None).recipe.steps:
            assert isinstance(step, KernelStep)
            for launch in step.kernel.launches():
                yield f"{launch.name}-{name}", launch.source
    large: Any = dict.fromkeys(("rows", "columns", "row_step", "column_step"), 1 << 16)
    for many in (1, 8):
        wide = Tiled(itemsize=2, batch=(), read=many, written=many, rows_within=(2, 1), **large)
        yield f"tiled-wide-{many}", tiled_source(wide)
    for itemsize, row_step in itertools.product((1, 2, 4, 8), (8191, 8192)):
        skewed = Tiled(itemsize=itemsize, batch=(), read=1, written=1, **large | {"row_step": row_step})
        yield f"tiled-skewed-{itemsize}-{row_step}", tiled_source(skewed)


def _depthwise() -> Iterator[tuple[str, str]]:
    for name, graph in (depthwise_graphs.DEPTHWISE | depthwise_graphs.ONLY_COMPILED).items():
        parts = cut(graph.body)
        (piece,) = [graph.body] if parts is None else [piece.graph for piece in parts.pieces]
        for choice in range(ways_of_depthwise(piece)):
            (step,) = compile_depthwise(piece, None, choice).recipe.steps
            assert isinstance(step, KernelStep)
            for launch in step.kernel.launches():
                yield f"{launch.name}-{name}-{choice}".replace(" ", "_"), launch.source


def _expression(
    mode: PointwiseMode, operands: tuple[Value, ...], compute: DType, dtype: DType | None = None
) -> Expression:
    """An expression of as many of the operands as the mode takes. Infinite parameters stay as they are."""
    function = FUNCTIONS[mode]
    parameters = tuple(
        value + 0.5 if compute.is_floating else value + 2 for value in function.parameters.values()
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
            for result in row.graph.results:
                yield f"reference-{row.name}-{result}", Reference(row.graph, result).source


def _kernels() -> Iterator[tuple[str, str]]:
    families = (
        _poolings(),
        _norms(),
        _channel_norms(),
        _response_norms(),
        _attentions(),
        _products(),
        _grouped(),
        _reductions(),
        _randoms(),
        _paddings(),
        _bit_casts(),
        _gathers(),
        _scatters(),
        _sorts(),
        _ctc_losses(),
        _recurrent_steps(),
        _resamplings(),
        _grid_samples(),
    )
    for name, graph in itertools.chain(*families):
        (operation,) = graph.operations
        tensors = [graph.tensor(uid) for _, uid in operation.named()]
        found = sources_of(operation, tensors)
        if isinstance(operation, RecurrentSteps):
            found += sources_of(operation, tensors, BY_STEP)
        for number, text in enumerate(dict.fromkeys(found)):
            yield f"{name}-{number}" if number else name, text


def _poolings() -> Iterator[tuple[str, OperationGraph]]:
    """Every class, dtype and number of spatial dims; and one with numbers of more than 32 bits."""
    for dtype, rank in itertools.product(DType, (1, 2, 3)):
        yield from _pooled(dtype, tuple(range(9, 9 + rank)), Window.symmetric(rank, 3, pad=1, stride=2))
        yield from _pooled(dtype, tuple(range(9, 9 + rank)), AdaptiveWindow(output=(4,) * rank))
    yield from _pooled(DType.FLOAT16, (1 << 16, 1 << 16), Window.symmetric(2, 3, pad=1, stride=2))
    yield from _pooled(DType.FLOAT16, (1 << 16, 1 << 16), AdaptiveWindow(output=(1 << 14, 1 << 14)))


def _pooled(
    dtype: DType, extents: tuple[int, ...], window: Window | AdaptiveWindow
) -> Iterator[tuple[str, OperationGraph]]:
    x = TensorSpec.packed((2, 3, *extents), dtype, Layout.NHWC)
    y = TensorSpec.packed(window.output_dims(x.dims), dtype, Layout.NHWC)
    index = TensorSpec.packed(y.dims, DType.INT64)
    adaptive = "-adaptive" if isinstance(window, AdaptiveWindow) else ""
    named = f"{dtype}-{extents}{adaptive}".replace(" ", "")
    yield f"max_pool-{named}", graph_of(MaxPool, {"x": x}, {"y": y}, window=window)
    yield f"max_pool_index-{named}", graph_of(MaxPool, {"x": x}, {"y": y, "index": index}, window=window)
    backward = graph_of(MaxPoolBackward, {"dy": y, "index": index}, {"dx": x}, window=window)
    yield f"max_pool_bwd-{named}", backward
    for padding in (False, True) if dtype.is_floating else ():
        of: dict[str, Any] = {"window": window, "include_padding": padding}
        yield f"avg_pool-{named}-{padding}", graph_of(AvgPool, {"x": x}, {"y": y}, **of)
        yield f"avg_pool_bwd-{named}-{padding}", graph_of(AvgPoolBackward, {"dy": y}, {"dx": x}, **of)
    for p in (1.0, 2.0, 3.0, 2.5) if dtype.is_floating else ():
        of = {"window": window, "p": p}
        yield f"lp_pool-{named}-{p}", graph_of(LpPool, {"x": x}, {"y": y}, **of)
        given = {"dy": y, "x": x, "y": y}
        yield f"lp_pool_bwd-{named}-{p}", graph_of(LpPoolBackward, given, {"dx": x}, **of)


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


_IMAGES: dict[str, tuple[tuple[int, ...], Layout]] = {
    "nchw": ((4, 16, 5, 8), Layout.NCHW),
    "nhwc": ((4, 16, 5, 8), Layout.NHWC),
    "odd": ((3, 6, 5), Layout.NHWC),
    "cut-nchw": ((4, 16, 100, 80), Layout.NCHW),
    "cut-nhwc": ((4, 16, 100, 80), Layout.NHWC),
    "matrix": ((9000, 40), Layout.NCHW),
    "wide": ((2, 16, 1 << 15, 1 << 15), Layout.NHWC),
}
"""Dims and a layout: each form of a kernel."""


def _channel_norms() -> Iterator[tuple[str, OperationGraph]]:
    """Every class, dtype and form, with all operands, and with none that may be left out."""
    for (form, (dims, layout)), dtype in itertools.product(_IMAGES.items(), FLOATS):
        wide = DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
        every = form in ("nchw", "nhwc")
        for weights, bare in ((wide, False), (dtype, False), (dtype, True))[: 3 if every else 1]:
            if every or dtype in (DType.FLOAT32, DType.BFLOAT16):
                for name, graph in channel_norms_of(dtype, dims, layout, weights, bare=bare):
                    yield f"{name}-{dtype}-{form}-{weights}_weights-{bare}", graph


def _response_norms() -> Iterator[tuple[str, OperationGraph]]:
    for (form, (dims, layout)), dtype in itertools.product(_IMAGES.items(), FLOATS):
        x = TensorSpec.packed(dims, dtype, layout)
        yield f"lrn-{dtype}-{form}", graph_of(LocalResponseNorm, {"x": x}, {"y": None}, size=5)
        back = graph_of(LocalResponseNormBackward, {"dy": x, "x": x}, {"dx": None}, size=4)
        yield f"lrn_bwd-{dtype}-{form}", back


def _attentions() -> Iterator[tuple[str, OperationGraph]]:
    choices: tuple[dict[str, Any], ...] = (
        {},
        {"causal": True, "bias": "1hss"},
        {"padded": ("lengths_q", "lengths_kv"), "bias": "b11s"},
        {"head": 12, "groups": 2, "padded": ("lengths_kv",), "causal": True},
        {"head": 1},
        {"head": 256, "layout": "bshd"},
        {"window": (3, 5), "alibi": True},
        {"dropout": 0.1, "bias": "1hss", "alibi": True},
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


def _grouped() -> Iterator[tuple[str, OperationGraph]]:
    """Every dtype, with operands that are read in eights, transposed, and with gaps."""
    orders: tuple[tuple[str, int, bool], ...] = (
        ("eights", 64, False),
        ("odd", 61, False),
        ("turned", 64, True),
    )
    for dtype, (name, size, turned) in itertools.product(FLOATS, orders):
        tokens, offsets = _matrix((size, size), dtype, turned), TensorSpec.packed((5,), DType.INT32)
        weights = _matrix((5, size, size), dtype, turned)
        for result in dict.fromkeys((dtype, DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32)):
            y, dweights = (TensorSpec.packed(spec.dims, result) for spec in (tokens, weights))
            given = {"tokens": tokens, "weights": weights, "offsets": offsets}
            yield f"grouped_matmul-{dtype}-{result}-{name}", graph_of(GroupedMatMul, given, {"y": y})
            given = {"tokens": tokens, "dy": tokens, "offsets": offsets}
            backward = graph_of(GroupedMatMulBackwardWeights, given, {"dweights": dweights})
            yield f"grouped_matmul_bwd-{dtype}-{result}-{name}", backward


def _matrix(dims: tuple[int, ...], dtype: DType, turned: bool) -> TensorSpec:
    """Packed, or with the last two dims swapped in memory."""
    packed = TensorSpec.packed(dims, dtype)
    *outer, row, column = packed.strides
    return TensorSpec.strided(dims, (*outer, column, row), dtype) if turned else packed


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


def _randoms() -> Iterator[tuple[str, OperationGraph]]:
    """Every distribution and dtype, packed and not."""
    kinds: tuple[type[Randomness[Any]], ...] = (RandomUniform, RandomNormal, RandomBernoulli, RandomIntegers)
    for kind, dtype, layout in itertools.product(kinds, DType, (Layout.NCHW, Layout.NHWC)):
        if dtype in kind.dtypes:
            dims = (2, 3, 5, 7)
            of: dict[str, Any] = {"dims": dims, "dtype": dtype}
            of |= {"high": 9} if kind is RandomIntegers else {}
            y = TensorSpec.packed(dims, dtype, layout)
            yield f"{kind.kind}-{dtype}-{layout}", graph_of(kind, {"state": STATE}, {"y": y}, **of)


def _paddings() -> Iterator[tuple[str, OperationGraph]]:
    """Every mode and dtype; packed, with gaps, and with places of more than 32 bits."""
    for dtype, mode in itertools.product(DType, ("constant", *PadMode)):
        for name, dims in (("small", (2, 3, 5)), ("large", (2, 1 << 16, 1 << 16))):
            x = TensorSpec.packed(dims, dtype)
            of: dict[str, Any] = {"before": (0, 1, 2), "after": (0, 3, 0)}
            of |= {"steps": (1, -1, 2), "value": 1.0} if mode == "constant" else {"mode": mode}
            kind: type[Any] = Pad if mode == "constant" else BorderPad
            y = kind(x=0, y=1, **of).infer({"x": x})["y"]
            apart = TensorSpec.strided(y.dims, [2 * step for step in y.strides], dtype)
            for layout, spec in (("packed", y), ("apart", apart)):
                yield f"{mode}_pad-{dtype}-{name}-{layout}", graph_of(kind, {"x": x}, {"y": spec}, **of)


def _bit_casts() -> Iterator[tuple[str, OperationGraph]]:
    """Each size, packed and with gaps."""
    pairs = (
        (DType.INT8, DType.UINT8),
        (DType.FLOAT16, DType.BFLOAT16),
        (DType.FLOAT32, DType.INT32),
        (DType.INT64, DType.FLOAT64),
    )
    for before, dtype in pairs:
        x = TensorSpec.packed((2, 3, 8), before)
        for name, spec in {"packed": x, "apart": TensorSpec.strided(x.dims, (60, 20, 2), before)}.items():
            of: dict[str, Any] = {"source": before, "dtype": dtype}
            yield f"bit_cast-{before}-{name}", graph_of(BitCast, {"x": spec}, {"y": None}, **of)


def _gathers() -> Iterator[tuple[str, OperationGraph]]:
    """Each way to name elements, of each size, with neighbours that are moved at once and without."""
    ways: tuple[tuple[Any, tuple[int, ...], dict[str, Any]], ...] = (
        (Gather, (5, 3), {"axis": 1}),
        (Gather, (4, 5), {"axis": 2, "batch_dims": 1}),
        (GatherElements, (4, 5, 16), {"axis": 1}),
        (GatherND, (7, 1), {}),
        (GatherND, (4, 7, 2), {"batch_dims": 1}),
    )
    dtypes = (DType.INT8, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64)
    for (kind, at, of), dtype, last in itertools.product(ways, dtypes, (16, 17)):
        for layout, index in ((Layout.NCHW, DType.INT64), (Layout.NHWC, DType.INT32)):
            given = {
                "x": TensorSpec.packed((4, 6, last), dtype, layout),
                "indices": TensorSpec.packed(at, index),
            }
            name = f"{kind.kind}-{len(at)}-{dtype}-{last}-{layout}"
            yield name, graph_of(kind, given, {"y": None}, **of)
    given = {
        "x": TensorSpec.packed((1 << 16, 1 << 16)),
        "indices": TensorSpec.packed((1 << 16,), DType.INT64),
    }
    yield "gather-wide", graph_of(Gather, given, {"y": None})


def _scatters() -> Iterator[tuple[str, OperationGraph]]:
    """Each reduction and dtype; and each way to name elements."""
    ways: tuple[tuple[Any, tuple[int, ...], dict[str, Any]], ...] = (
        (Scatter, (3,), {"axis": 1}),
        (Scatter, (4, 5), {"axis": 2, "batch_dims": 1}),
        (ScatterElements, (4, 5, 9), {"axis": 1}),
        (ScatterND, (7, 2), {}),
    )
    for reduction, dtype in itertools.product(ScatterReduction, DType):
        some = dtype in (DType.FLOAT32, DType.BFLOAT16, DType.INT64)
        for kind, at, of in ways if some else ways[:1]:
            index = DType.INT32 if some else DType.INT64
            x, indices = TensorSpec.packed((4, 6, 9), dtype), TensorSpec.packed(at, index)
            updates = kind(x=0, indices=0, updates=0, **of).places(x.dims, at).dims
            given = {"x": x, "indices": indices, "updates": TensorSpec.packed(updates, dtype)}
            name = f"{kind.kind}-{len(at)}-{reduction}-{dtype}"
            yield name, graph_of(kind, given, {"y": None}, reduction=reduction, **of)
    x, indices = TensorSpec.packed((1 << 16, 1 << 16)), TensorSpec.packed((9,), DType.INT64)
    given = {"x": x, "indices": indices, "updates": TensorSpec.packed((9, 1 << 16))}
    for reduction in ScatterReduction:
        yield f"scatter-wide-{reduction}", graph_of(Scatter, given, {"y": None}, reduction=reduction)


def _sorts() -> Iterator[tuple[str, OperationGraph]]:
    """Each dtype, largest and smallest, in order and not, with places and without."""
    for dtype, largest, in_order in itertools.product(DType, (False, True), (False, True)):
        x = {"x": TensorSpec.packed((4, 6, 9), dtype)}
        y: dict[str, Any] = {"values": None, "indices": None} if in_order else {"values": None}
        name = f"top_k-{dtype}-{largest}-{in_order}"
        yield name, graph_of(TopK, x, y, k=4, axis=1, largest=largest, in_order=in_order)
    wide = {"x": TensorSpec.packed((1 << 16, 1 << 16), DType.FLOAT16)}
    yield "top_k-wide", graph_of(TopK, wide, {"values": None, "indices": None}, k=9)


def _resamplings() -> Iterator[tuple[str, OperationGraph]]:
    """Each dtype and mode, with none to three dims that change, and twice as large; and gradients."""
    sizes = {0: (2, 3, 4, 5), 1: (2, 3, 4, 9), 2: (2, 3, 7, 9), 3: (2, 8, 7, 9)}
    for (count, wanted), dtype in itertools.product(sizes.items(), DType):
        x = TensorSpec.packed((2, 3, 4, 5), dtype, Layout.NHWC if count == 2 else Layout.NCHW)
        y = TensorSpec.packed(wanted, dtype)
        for mode in (ResampleMode.NEAREST, ResampleMode.LINEAR)[: 1 + dtype.is_floating]:
            of: dict[str, Any] = {"sizes": wanted, "mode": mode}
            yield f"resample-{dtype}-{count}-{mode}", graph_of(Resample, {"x": x}, {"y": y}, **of)
        if dtype.is_floating:
            of = {"sizes": wanted, "mode": ResampleMode.CUBIC}
            yield f"resample_bwd-{dtype}-{count}", graph_of(ResampleBackward, {"dy": y}, {"dx": x}, **of)
    for dtype in DType:
        x, y = (TensorSpec.packed((2, 3, rows, 3 * rows), dtype) for rows in (16, 32))
        for mode in [*ResampleMode][: len(ResampleMode) if dtype.is_floating else 1]:
            of = {"sizes": y.dims, "mode": mode}
            yield f"resample-{dtype}-twice-{mode}", graph_of(Resample, {"x": x}, {"y": y}, **of)


def _grid_samples() -> Iterator[tuple[str, OperationGraph]]:
    """Each way to read, of each dtype and number of spatial dims."""
    ways = itertools.product(ResampleMode, GridPadding, (False, True))
    spatial = itertools.cycle((1, 2, 3))
    for (mode, padding, corners), dtype in itertools.product(ways, FLOATS):
        count = next(spatial)
        x = TensorSpec.packed((2, 3, *(5,) * count), dtype)
        grid = TensorSpec.packed((2, *(4,) * count, count), DType.FLOAT32)
        of: dict[str, Any] = {"mode": mode, "padding": padding, "align_corners": corners}
        name = f"grid_sample-{dtype}-{mode}-{padding}-{corners}"
        yield name, graph_of(GridSample, {"x": x, "grid": grid}, {"y": None}, **of)


def _ctc_losses() -> Iterator[tuple[str, OperationGraph]]:
    """Each dtype, with derivatives and without; states in shared memory, and several of each thread."""
    for dtype, labels, zero in itertools.product(FLOATS, (9, 3_000), (False, True)):
        whole = DType.INT64 if zero else DType.INT32
        given = {"log_probs": TensorSpec.packed((200, 3, 7), dtype)}
        given |= {"targets": TensorSpec.packed((3, labels), whole)}
        given |= dict.fromkeys(("input_lengths", "target_lengths"), TensorSpec.packed((3,), whole))
        for results in ({"losses": None}, {"losses": None, "dlog_probs": None}):
            name = f"ctc_loss-{dtype}-{labels}-{zero}-{len(results)}"
            yield name, graph_of(CTCLoss, given, results, zero_infinity=zero)


def _recurrent_steps() -> Iterator[tuple[str, OperationGraph]]:
    """Each cell and dtype in both directions, with all operands and functions; and without any."""
    for dtype, cell in itertools.product(FLOATS, RecurrentCell):
        rows, lstm = 6 * cell.gates, cell is RecurrentCell.LSTM
        dims: dict[str, tuple[int, ...]] = {"x": (5, 3, 2 * rows), "w": (2, rows, 6), "bias": (2, rows)}
        dims |= {"peepholes": (2, 3, 6), "lengths": (3,)} if lstm else {"lengths": (3,)}
        dims |= dict.fromkeys(("h0", "c0")[: 1 + lstm], (2, 3, 6))
        given = {
            name: TensorSpec.packed(each, DType.INT64 if name == "lengths" else dtype)
            for name, each in dims.items()
        }
        functions = itertools.islice(itertools.cycle(CellFunction), 2 * cell.functions)
        activations = tuple(CellActivation(function=each) for each in functions)
        ends = dict.fromkeys(("y", "h_n", "c_n")[: 2 + lstm])
        of: dict[str, Any] = {"cell": cell, "clip": 2.0, "activations": activations}
        yield f"recurrent_steps-{dtype}-{cell}", graph_of(RecurrentSteps, given, ends, **of)
        bare = {name: given[name] for name in ("x", "w")}
        yield f"recurrent_steps-{dtype}-{cell}-bare", graph_of(RecurrentSteps, bare, {"y": None}, cell=cell)
