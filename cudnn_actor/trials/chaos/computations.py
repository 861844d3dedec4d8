"""What the load computes: a table of problems, each with a few operations on the same tensors.

A new operation is one row. Everything else follows from the operation's declaration: which buffers a request
names, their specs, which values its inputs need, and what it computes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cudnn_actor.protocol import (
    AdaptiveWindow,
    ArgReduction,
    Attention,
    AttentionBackward,
    AvgPool,
    AvgPoolBackward,
    BatchNorm,
    BatchNormBackward,
    BatchNormTraining,
    BitCast,
    BorderPad,
    BufferRef,
    Concat,
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    ConvSpec,
    Cumulative,
    DType,
    Gather,
    GatherElements,
    GatherND,
    GenStats,
    GridSample,
    GroupedMatMul,
    GroupedMatMulBackwardWeights,
    GroupNorm,
    GroupNormBackward,
    InstanceNorm,
    InstanceNormBackward,
    LayerNorm,
    LayerNormBackward,
    LocalResponseNorm,
    LocalResponseNormBackward,
    LpPool,
    LpPoolBackward,
    MatMul,
    MaxPool,
    MaxPoolBackward,
    Operation,
    Pad,
    PadMode,
    Pointwise,
    PointwiseMode,
    RandomBernoulli,
    RandomIntegers,
    RandomNormal,
    RandomUniform,
    Reduction,
    ReductionMode,
    Resample,
    ResampleBackward,
    ResampleMode,
    Reshape,
    RMSNorm,
    RMSNormBackward,
    RunGraph,
    Scatter,
    ScatterElements,
    ScatterND,
    ScatterReduction,
    Slice,
    Softmax,
    SoftmaxBackward,
    TensorSpec,
    TopK,
    Transpose,
    Window,
    alibi_slopes,
)
from cudnn_actor.protocol.messages.messages import Compute
from cudnn_actor.protocol.types.tensor import LayoutName
from cudnn_actor.trials.chaos.graph_computation import GraphComputation

__all__ = [
    "HEAVY",
    "PROBLEMS",
    "Computation",
    "Problem",
    "accumulates",
    "applied",
    "bare",
    "message",
    "updated",
]

Computation = Operation[str] | GraphComputation
"""An operation, or a graph, whose operands are names of a problem's tensors: their roles."""

_COMPOSITES: dict[type, Any] = {
    ConvolutionForward: ConvFwd,
    ConvolutionBackwardData: ConvBwdData,
    ConvolutionBackwardFilter: ConvBwdFilter,
}
"""Operations that are sent as other messages, which can also add to their results."""
_ROUNDED = 1e-4


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """Tensors, and operations on them.

    Parameters
    ----------
    dims
        The dims of the tensors that no operation gives. Those of a gradient, whose role is `d` and another
        one's, are that one's.
    operations
        What is computed, forward first. A tensor that one of them writes and another reads is handed on.
    layout
        Of the tensors of 3 to 5 dims.
    dtypes
        Of the tensors in `dims` that are not float32.
    tolerance
        The allowed error of results, relative to the largest; 0 if they are exact: all values are small
        whole numbers, whose sums are exact in any order.
    """

    dims: Mapping[str, tuple[int, ...]]
    operations: tuple[Computation, ...]
    layout: LayoutName = "NCHW"
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    tolerance: float = 0.0

    @functools.cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The spec of each tensor's buffers."""
        specs = {
            role: self._packed(dims, self.dtypes.get(role, DType.FLOAT32)) for role, dims in self.dims.items()
        }
        for operation in self.operations:
            inputs = dict(operation.named(operation.inputs))
            for role in inputs.values():
                specs.setdefault(role, specs[role.removeprefix("d")])
            inferred = operation.infer({name: specs[role] for name, role in inputs.items()})
            for name, role in operation.named(operation.outputs):
                if role not in specs:
                    like = inferred[name] if name in inferred else specs[role.removeprefix("d")]
                    specs[role] = self._packed(like.dims, like.dtype)
        return specs

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """The tensors that operations read."""
        return tuple(dict.fromkeys(role for operation in self.operations for role in operation.reads))

    @functools.cached_property
    def source(self) -> str:
        """The tensor that all of it begins with."""
        return self.inputs[0]

    @functools.cached_property
    def handed_on(self) -> frozenset[str]:
        """The tensors that one operation writes and another reads."""
        return frozenset(
            role for operation in self.operations for role in operation.writes if role in self.inputs
        )

    @property
    def forms(self) -> tuple[Computation, ...]:
        """The operations, with and without their optional operands."""
        forms = ((each, bare(each)) if each.optional else (each,) for each in self.operations)
        return tuple(itertools.chain.from_iterable(forms))

    def specs_of(self, operation: Computation) -> dict[str, TensorSpec]:
        """The spec of each operand, by its name."""
        return {name: self.specs[role] for name, role in operation.named()}

    def _packed(self, dims: tuple[int, ...], dtype: DType) -> TensorSpec:
        return TensorSpec.packed(dims, dtype, self.layout if 3 <= len(dims) <= 5 else "NCHW")


def bare(operation: Computation) -> Computation:
    """The operation without its optional operands."""
    if isinstance(operation, GraphComputation):
        return operation
    return msgspec.structs.replace(operation, **dict.fromkeys(operation.optional))


def accumulates(operation: Computation) -> bool:
    """Whether there is a message that adds to the operation's result."""
    return type(operation) in _COMPOSITES


def updated(operation: Computation) -> frozenset[str]:
    """The inputs that it writes too: a graph's running state. It must not run twice."""
    return operation.updated if isinstance(operation, GraphComputation) else frozenset()


def message(operation: Computation, refs: Mapping[str, BufferRef], *, beta: float = 0.0) -> Compute:
    """The message for an operation on buffers, by the operands' names."""
    composite = _COMPOSITES.get(type(operation))
    if composite is None:
        asked: Compute = operation.with_operands(refs.__getitem__)
        return asked
    found: Compute = composite(**refs, conv=operation.conv, beta=beta)  # type: ignore[union-attr]
    return found


def applied(operation: Computation, refs: Mapping[str, BufferRef]) -> Compute:
    """The same, to be applied: outputs that have no buffer are left out."""
    if isinstance(operation, GraphComputation):
        graph = operation.graph
        left_out: Any = None
        return RunGraph(graph=graph, buffers=tuple(refs.get(name, left_out) for name in graph.places))
    asked: Compute = operation.with_operands(refs.get)
    return asked


def _convolutions(
    x: tuple[int, ...],
    w: tuple[int, ...],
    layout: LayoutName = "NCHW",
    *,
    pad: int = 0,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
) -> Problem:
    conv = ConvSpec.symmetric(2, pad=pad, stride=stride, dilation=dilation, groups=groups)
    operations = (
        ConvolutionForward(x="x", w="w", y="y", conv=conv),
        ConvolutionBackwardData(dy="dy", w="w", dx="dx", conv=conv),
        ConvolutionBackwardFilter(x="x", dy="dy", dw="dw", conv=conv),
    )
    return Problem(dims={"x": x, "w": w}, operations=operations, layout=layout)


def _max_pools(x: tuple[int, ...], window: Window, layout: LayoutName = "NCHW") -> Problem:
    operations = (
        MaxPool(x="x", y="y", index="index", window=window),
        MaxPoolBackward(dy="dy", index="index", dx="dx", window=window),
    )
    return Problem(dims={"x": x}, operations=operations, layout=layout)


def _avg_pools(
    x: tuple[int, ...], window: Window | AdaptiveWindow, *, include_padding: bool = False
) -> Problem:
    operations = (
        AvgPool(x="x", y="y", window=window, include_padding=include_padding),
        AvgPoolBackward(dy="dy", dx="dx", window=window, include_padding=include_padding),
    )
    return Problem(dims={"x": x}, operations=operations, tolerance=_ROUNDED)


def _lp_pools(x: tuple[int, ...], window: Window, p: float) -> Problem:
    operations = (
        LpPool(x="x", y="y", window=window, p=p),
        LpPoolBackward(dy="dy", x="x", y="y", dx="dx", window=window, p=p),
    )
    return Problem(dims={"x": x}, operations=operations, tolerance=_ROUNDED)


def _layer_norms(x: tuple[int, ...], axis: int) -> Problem:
    statistics: dict[str, Any] = {"mean": "mean", "inverse_deviation": "inverse_deviation", "axis": axis}
    operations = (
        LayerNorm(x="x", scale="scale", bias="bias", y="y", **statistics),
        LayerNormBackward(
            dy="dy", x="x", scale="scale", dx="dx", dscale="dscale", dbias="dbias", **statistics
        ),
    )
    dims = {"x": x, "scale": x[axis:], "bias": x[axis:]}
    return Problem(dims=dims, operations=operations, tolerance=_ROUNDED)


def _rms_norms(x: tuple[int, ...], axis: int) -> Problem:
    statistics: dict[str, Any] = {"inverse_rms": "inverse_rms", "axis": axis}
    operations = (
        RMSNorm(x="x", scale="scale", y="y", **statistics),
        RMSNormBackward(dy="dy", x="x", scale="scale", dx="dx", dscale="dscale", **statistics),
    )
    return Problem(dims={"x": x, "scale": x[axis:]}, operations=operations, tolerance=_ROUNDED)


def _channel_norms(x: tuple[int, ...], groups: int, layout: LayoutName = "NCHW") -> Problem:
    """Batch, instance and group norm, each with statistics of its own, and sums over channels."""
    weights: dict[str, Any] = {"x": "x", "scale": "scale"}
    running: dict[str, Any] = {"running_mean": "mean", "running_variance": "variance"}
    new: dict[str, Any] = {f"new_{name}": f"new_{name}" for name in running}
    of_batch, of_instances, of_groups = (
        dict[str, Any]({"mean": f"mean_of_{name}", "inverse_deviation": f"inverse_of_{name}"})
        for name in ("batch", "instances", "groups")
    )
    sums: dict[str, Any] = {"dy": "dy", "dx": "dx", "dscale": "dscale", "dbias": "dbias"}
    operations = (
        BatchNorm(**weights, bias="bias", mean="mean", variance="variance", y="y"),
        BatchNormTraining(**weights, bias="bias", y="y", **running, **new, **of_batch),
        BatchNormBackward(**weights, **sums, **of_batch),
        InstanceNorm(**weights, bias="bias", y="y", **of_instances),
        InstanceNormBackward(**weights, **sums, **of_instances),
        GroupNorm(**weights, bias="bias", y="y", **of_groups, groups=groups),
        GroupNormBackward(**weights, **sums, **of_groups, groups=groups),
        GenStats(x="x", sum="sum", sum_of_squares="sum_of_squares"),
    )
    dims = {"x": x} | dict.fromkeys(("scale", "bias", "mean", "variance"), x[1:2])
    return Problem(dims=dims, operations=operations, layout=layout, tolerance=_ROUNDED)


def _responses(x: tuple[int, ...], size: int) -> Problem:
    operations = (
        LocalResponseNorm(x="x", y="y", size=size, alpha=0.5),
        LocalResponseNormBackward(dy="dy", x="x", dx="dx", size=size, alpha=0.5),
    )
    return Problem(dims={"x": x}, operations=operations, tolerance=_ROUNDED)


def _sums(x: tuple[int, ...], other: tuple[int, ...]) -> Problem:
    add = Pointwise(mode=PointwiseMode.ADD, operands=("x", "other"), result="result")
    return Problem(dims={"x": x, "other": other}, operations=(add,))


def _reductions(x: tuple[int, ...], axis: int) -> Problem:
    """Of small whole numbers, so all of them are exact."""
    operations = (
        Reduction(x="x", y="sums", mode=ReductionMode.SUM, axes=(axis,)),
        Reduction(x="x", y="largest", mode=ReductionMode.ABSOLUTE_MAX, keep_dims=True),
        ArgReduction(x="x", y="places", mode=ReductionMode.MAX, axis=axis),
        Cumulative(x="x", y="running", mode=ReductionMode.SUM, axis=axis, reverse=True),
    )
    return Problem(dims={"x": x}, operations=operations)


def _softmaxes(x: tuple[int, ...], axis: int, *, log: bool) -> Problem:
    operations = (
        Softmax(x="x", y="y", axis=axis, log=log),
        SoftmaxBackward(dy="dy", y="y", dx="dx", axis=axis, log=log),
    )
    return Problem(dims={"x": x}, operations=operations, tolerance=_ROUNDED)


def _choices(x: tuple[int, ...], other: tuple[int, ...]) -> Problem:
    greater = Pointwise(mode=PointwiseMode.GT, operands=("x", "other"), result="greater")
    select = Pointwise(mode=PointwiseMode.SELECT, operands=("greater", "x", "other"), result="chosen")
    return Problem(dims={"x": x, "other": other}, operations=(greater, select))


def _attentions(
    q: tuple[int, ...], k: tuple[int, ...], *, heads_of_bias: int = 1, causal: bool = False
) -> Problem:
    # Of a batch of 1: in a check, the last of several has no keys, and no meaning without the lengths.
    given: dict[str, Any] = {name: name for name in ("q", "k", "v", "bias", "lengths_kv", "statistics")}
    operations = (
        Attention(**given, y="y", causal=causal),
        AttentionBackward(**given, dy="dy", y="y", dq="dq", dk="dk", dv="dv", dbias="dbias", causal=causal),
    )
    dims = {"q": q, "k": k, "v": k, "bias": (1, heads_of_bias, q[2], k[2]), "lengths_kv": q[:1]}
    dtypes = {"lengths_kv": DType.INT32}
    return Problem(dims=dims, dtypes=dtypes, operations=operations, tolerance=_ROUNDED)


def _local_attentions(q: tuple[int, ...], k: tuple[int, ...]) -> Problem:
    given: dict[str, Any] = {name: name for name in ("q", "k", "v", "statistics")}
    given |= {"window_left": 3, "window_right": 1, "slopes": alibi_slopes(q[1])}
    operations = (
        Attention(**given, y="y"),
        AttentionBackward(**given, dy="dy", y="y", dq="dq", dk="dk", dv="dv"),
    )
    return Problem(dims={"q": q, "k": k, "v": k}, operations=operations, tolerance=_ROUNDED)


def _draws(dims: tuple[int, ...]) -> Problem:
    """Every kind of random number, of one state. All of them are exact."""
    given: dict[str, Any] = {"state": "state", "dims": dims}
    operations = (
        RandomUniform(**given, y="uniform", low=-1.0),
        RandomNormal(**given, y="normal", deviation=0.5),
        RandomBernoulli(**given, y="coins", dtype=DType.INT8, probability=0.3),
        RandomIntegers(**given, y="whole", dtype=DType.INT32, low=-7, high=100),
    )
    return Problem(dims={"state": (2,)}, dtypes={"state": DType.INT64}, operations=operations)


def _movements(x: tuple[int, ...], dims: tuple[int, ...], axes: tuple[int, ...]) -> Problem:
    sizes = tuple((size + 1) // 2 for size in x)
    operations = (
        Reshape(x="x", y="reshaped", dims=dims),
        Transpose(x="x", y="transposed", axes=axes),
        Slice(x="x", y="sliced", starts=(0,) * len(x), steps=(2,) * len(x), sizes=sizes),
        Pad(x="x", y="padded", before=(1,) * len(x), after=(2,) * len(x), steps=(-1,) * len(x), value=5.0),
        BorderPad(x="x", y="bordered", before=(3,) * len(x), after=(1,) * len(x), mode=PadMode.REFLECT),
        Concat(operands=("x", "x"), y="joined", axis=1),
        BitCast(x="x", y="bits", source=DType.FLOAT32, dtype=DType.INT32),
    )
    return Problem(dims={"x": x}, operations=operations)


def _selections(x: tuple[int, ...], count: int) -> Problem:
    """By one tensor of indices: rows, elements and parts of rows, read and written."""
    sums, largest = ScatterReduction.ADD, ScatterReduction.MAX
    operations = (
        Gather(x="x", indices="indices", y="rows"),
        GatherElements(x="x", indices="indices", y="elements"),
        GatherND(x="x", indices="indices", y="parts"),
        Scatter(x="x", indices="indices", updates="rows", y="written"),
        ScatterElements(x="x", indices="indices", updates="elements", y="sums", reduction=sums),
        ScatterND(x="x", indices="indices", updates="parts", y="largest", reduction=largest),
    )
    dims = {"x": x, "indices": (count, *(2,) * (len(x) - 1))}
    return Problem(dims=dims, dtypes={"indices": DType.INT32}, operations=operations)


def _sorts(x: tuple[int, ...], k: int) -> Problem:
    operations = (
        TopK(x="x", values="values", indices="places", k=k),
        TopK(x="x", values="sorted", k=x[0], axis=0, largest=False),
    )
    return Problem(dims={"x": x}, operations=operations)


def _resamplings(x: tuple[int, ...], y: tuple[int, ...]) -> Problem:
    operations = (
        Resample(x="x", y="y", sizes=y, mode=ResampleMode.LINEAR),
        Resample(x="x", y="nearest", sizes=y),
        ResampleBackward(dy="dy", dx="dx", sizes=y, mode=ResampleMode.LINEAR),
    )
    return Problem(dims={"x": x}, operations=operations, tolerance=_ROUNDED)


def _grid_samples(x: tuple[int, ...], grid: tuple[int, ...]) -> Problem:
    operations = (GridSample(x="x", grid="grid", y="y"),)
    return Problem(dims={"x": x, "grid": grid}, operations=operations, tolerance=_ROUNDED)


def _products(a: tuple[int, ...], b: tuple[int, ...]) -> Problem:
    return Problem(dims={"a": a, "b": b}, operations=(MatMul(a="a", b="b", y="y"),))


def _grouped_products(tokens: tuple[int, int], weights: tuple[int, int, int]) -> Problem:
    given: dict[str, Any] = {"tokens": "tokens", "offsets": "offsets"}
    operations = (
        GroupedMatMul(**given, weights="weights", y="y"),
        GroupedMatMulBackwardWeights(**given, dy="dy", dweights="dweights"),
    )
    dims = {"tokens": tokens, "weights": weights, "offsets": weights[:1]}
    return Problem(dims=dims, dtypes={"offsets": DType.INT32}, operations=operations)


PROBLEMS = (
    _convolutions((1, 2, 6, 6), (3, 2, 3, 3), pad=1),
    _convolutions((2, 3, 8, 8), (4, 3, 3, 3)),
    _convolutions((1, 4, 7, 7), (4, 2, 3, 3), pad=1, groups=2),
    _convolutions((2, 4, 9, 9), (2, 4, 3, 3), pad=1, stride=2),
    _convolutions((1, 3, 10, 10), (2, 3, 3, 3), dilation=2),
    _convolutions((4, 8, 5, 5), (8, 8, 1, 1)),
    _convolutions((1, 6, 12, 12), (6, 1, 3, 3), pad=1, groups=6),
    _convolutions((2, 8, 8, 8), (8, 8, 3, 3), "NHWC", pad=1),
    _convolutions((1, 8, 16, 16), (16, 8, 3, 3), pad=1),
    _convolutions((3, 4, 6, 8), (4, 4, 5, 3), "NHWC", pad=2),
    _convolutions((2, 1, 160, 160), (2, 1, 1, 1)),
    _max_pools((2, 3, 8, 8), Window.symmetric(2, size=3, pad=1, stride=2)),
    _max_pools((1, 4, 9, 6), Window.symmetric(2, size=2, stride=1), "NHWC"),
    _max_pools((2, 1, 160, 160), Window.symmetric(2, size=1)),
    _avg_pools((2, 3, 8, 8), Window.symmetric(2, size=3, pad=1, stride=2), include_padding=False),
    _avg_pools((1, 2, 12), Window.symmetric(1, size=4, pad=2), include_padding=True),
    _avg_pools((2, 3, 7, 5), AdaptiveWindow(output=(3, 4))),
    _lp_pools((2, 2, 9, 7), Window.symmetric(2, size=3, pad=1, stride=2), 3.0),
    _layer_norms((4, 3, 40), -1),
    _layer_norms((2, 5, 4, 6), 2),
    _layer_norms((64, 128), 1),
    _rms_norms((4, 3, 40), -1),
    _rms_norms((3, 2, 4, 6), 1),
    _channel_norms((2, 8, 5, 4), 2),
    _channel_norms((3, 16, 6, 6), 4, "NHWC"),
    _responses((2, 6, 5, 4), 3),
    _attentions((1, 4, 9, 8), (1, 2, 16, 8)),
    _attentions((1, 2, 32, 8), (1, 2, 32, 8), heads_of_bias=2, causal=True),
    _local_attentions((1, 2, 16, 8), (1, 2, 16, 8)),
    _draws((6, 5, 40)),
    _products((24, 40), (40, 16)),
    _products((2, 3, 9, 16), (3, 16, 5)),
    _products((160, 8), (8, 160)),
    _grouped_products((40, 24), (5, 24, 16)),
    _reductions((6, 5, 40), -1),
    _reductions((32, 12, 10), 0),
    _softmaxes((8, 3, 50), -1, log=False),
    _softmaxes((2, 9, 6, 5), 1, log=True),
    _sums((2, 3, 5, 7), (1, 3, 1, 1)),
    _movements((4, 6, 8), (24, 8), (2, 0, 1)),
    _choices((3, 4, 6), (3, 1, 6)),
    _selections((20, 24, 6), 9),
    _sorts((12, 3, 300), 20),
    _resamplings((2, 3, 6, 7), (2, 3, 9, 5)),
    _grid_samples((2, 3, 6, 7), (2, 5, 4, 2)),
    _convolutions((1, 1, 260, 260), (1, 1, 1, 1)),
)
"""Many problems, since a quarantined plan is not used again. Some write much and compute little, so that a
fault sometimes hits them while they write."""

HEAVY = len(PROBLEMS) - 1
"""The last problem: its arrays have 264 KiB, more than an event loop copies itself."""
