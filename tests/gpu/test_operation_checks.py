"""The self-check of an operation with a kernel of ours finds plans that compute something else."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from cudnn_actor.engines.cuda import CudaEngine
from cudnn_actor.engines.cuda.checking.self_check import BuildContext, SelfCheck
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.planning.compiler import possible_plans
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.splitting import compile_split, ways
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.recipe import Buffer, OperationStep
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
    Coordinates,
    CTCLoss,
    Cumulative,
    DType,
    Gather,
    GatherElements,
    GatherND,
    GenStats,
    GraphTensor,
    GridPadding,
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
    Node,
    OperationGraph,
    Pad,
    PadMode,
    Pointwise,
    PointwiseMode,
    RandomBernoulli,
    RandomIntegers,
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
    TensorRole,
    TensorSpec,
    TopK,
    Window,
    alibi_slopes,
)
from cudnn_actor.protocol.operations import FUNCTIONS, Randomness

WINDOW = Window(size=(3, 3), pre_padding=(1, 1), post_padding=(1, 1), stride=(2, 2), dilation=(1, 1))
ADAPTIVE = AdaptiveWindow(output=(3, 3))
X, Y, THREES = (2, 3, 8, 8), (2, 3, 4, 4), (2, 3, 3, 3)


def tensor(uid: int, dims: tuple[int, ...], dtype: DType = DType.FLOAT32) -> GraphTensor:
    spec = TensorSpec.packed(dims, dtype)
    return GraphTensor(uid=uid, dims=dims, strides=spec.strides, dtype=dtype)


def tensors(*dims: tuple[int, ...]) -> list[GraphTensor]:
    return [tensor(uid, each) for uid, each in enumerate(dims)]


GRAPHS: dict[str, tuple[list[GraphTensor], Node]] = {
    "max": ([tensor(0, X), tensor(1, Y)], MaxPool(x=0, y=1, window=WINDOW)),
    "max with index": (
        [tensor(0, X), tensor(1, Y), tensor(2, Y, DType.INT64)],
        MaxPool(x=0, y=1, index=2, window=WINDOW),
    ),
    "max backward": (
        [tensor(0, Y), tensor(1, Y, DType.INT64), tensor(2, X)],
        MaxPoolBackward(dy=0, index=1, dx=2, window=WINDOW),
    ),
    "average": ([tensor(0, X), tensor(1, Y)], AvgPool(x=0, y=1, window=WINDOW)),
    "average backward": ([tensor(0, Y), tensor(1, X)], AvgPoolBackward(dy=0, dx=1, window=WINDOW)),
    "norm": ([tensor(0, X), tensor(1, Y)], LpPool(x=0, y=1, window=WINDOW, p=3.0)),
    "norm backward": (
        [tensor(0, Y), tensor(1, X), tensor(2, Y), tensor(3, X)],
        LpPoolBackward(dy=0, x=1, y=2, dx=3, window=WINDOW, p=3.0),
    ),
    "adaptive max": ([tensor(0, X), tensor(1, THREES)], MaxPool(x=0, y=1, window=ADAPTIVE)),
    "adaptive max backward": (
        [tensor(0, THREES), tensor(1, THREES, DType.INT64), tensor(2, X)],
        MaxPoolBackward(dy=0, index=1, dx=2, window=ADAPTIVE),
    ),
    "adaptive average": ([tensor(0, X), tensor(1, THREES)], AvgPool(x=0, y=1, window=ADAPTIVE)),
    "adaptive average backward": (
        [tensor(0, THREES), tensor(1, X)],
        AvgPoolBackward(dy=0, dx=1, window=ADAPTIVE),
    ),
}
ROWS, LENGTH = (4, 3, 40), (40,)
STATISTICS = (4, 3, 1)
NORMS: dict[str, tuple[list[GraphTensor], Node]] = {
    "layer norm": (
        [
            tensor(0, ROWS),
            tensor(1, LENGTH),
            tensor(2, LENGTH),
            tensor(3, ROWS),
            *map(tensor, (4, 5), (STATISTICS,) * 2),
        ],
        LayerNorm(x=0, scale=1, bias=2, y=3, mean=4, inverse_deviation=5),
    ),
    "layer norm backward": (
        tensors(ROWS, ROWS, STATISTICS, STATISTICS, LENGTH, ROWS, LENGTH, LENGTH),
        LayerNormBackward(dy=0, x=1, mean=2, inverse_deviation=3, scale=4, dx=5, dscale=6, dbias=7),
    ),
    "rms norm": (
        tensors(ROWS, LENGTH, ROWS, STATISTICS),
        RMSNorm(x=0, scale=1, y=2, inverse_rms=3),
    ),
    "rms norm backward": (
        [
            *map(tensor, (0, 1), (ROWS,) * 2),
            tensor(2, STATISTICS),
            tensor(3, LENGTH),
            tensor(4, ROWS),
            tensor(5, LENGTH),
        ],
        RMSNormBackward(dy=0, x=1, inverse_rms=2, scale=3, dx=4, dscale=5),
    ),
}
CHANNELS, IMAGE, LARGE = (8,), (2, 8, 5, 4), (2, 8, 60, 70)
IMAGES: dict[str, tuple[list[GraphTensor], Node]] = {
    "batch norm": (
        tensors(IMAGE, *[CHANNELS] * 4, IMAGE),
        BatchNorm(x=0, mean=1, variance=2, scale=3, bias=4, y=5),
    ),
    "batch norm training": (
        tensors(IMAGE, *[CHANNELS] * 4, IMAGE, *[CHANNELS] * 4),
        BatchNormTraining(
            x=0,
            scale=1,
            bias=2,
            running_mean=3,
            running_variance=4,
            y=5,
            mean=6,
            inverse_deviation=7,
            new_running_mean=8,
            new_running_variance=9,
        ),
    ),
    "batch norm backward": (
        tensors(IMAGE, IMAGE, *[CHANNELS] * 3, IMAGE, CHANNELS, CHANNELS),
        BatchNormBackward(dy=0, x=1, mean=2, inverse_deviation=3, scale=4, dx=5, dscale=6, dbias=7),
    ),
    "instance norm": (
        tensors(IMAGE, CHANNELS, CHANNELS, IMAGE, IMAGE[:2], IMAGE[:2]),
        InstanceNorm(x=0, scale=1, bias=2, y=3, mean=4, inverse_deviation=5),
    ),
    "instance norm backward": (
        tensors(IMAGE, IMAGE, IMAGE[:2], IMAGE[:2], CHANNELS, IMAGE, CHANNELS, CHANNELS),
        InstanceNormBackward(dy=0, x=1, mean=2, inverse_deviation=3, scale=4, dx=5, dscale=6, dbias=7),
    ),
    "group norm in parts": (
        tensors(LARGE, CHANNELS, CHANNELS, LARGE, (2, 2), (2, 2)),
        GroupNorm(x=0, scale=1, bias=2, y=3, mean=4, inverse_deviation=5, groups=2),
    ),
    "group norm backward": (
        tensors(IMAGE, IMAGE, (2, 2), (2, 2), CHANNELS, IMAGE, CHANNELS, CHANNELS),
        GroupNormBackward(dy=0, x=1, mean=2, inverse_deviation=3, scale=4, dx=5, dscale=6, dbias=7, groups=2),
    ),
    "sums of channels": (tensors(LARGE, CHANNELS, CHANNELS), GenStats(x=0, sum=1, sum_of_squares=2)),
}
RESPONSES: dict[str, tuple[list[GraphTensor], Node]] = {
    "response": (tensors(IMAGE, IMAGE), LocalResponseNorm(x=0, y=1, size=3, alpha=0.5)),
    "response backward": (
        tensors(IMAGE, IMAGE, IMAGE),
        LocalResponseNormBackward(dy=0, x=1, dx=2, size=4, alpha=0.5),
    ),
}
HEADS = (2, 4, 41, 8)
ROUNDS = (2, 4, 41, 1)
WIDE_HEADS, WIDE_ROUNDS = (2, 40, 70, 136), (2, 40, 70, 1)
"""Enough for large tiles, two for the positions of a head, and for more features than a block has."""
ATTENTION: dict[str, tuple[list[GraphTensor], Node]] = {
    "attention": (
        [*tensors(HEADS, HEADS, HEADS, HEADS, ROUNDS), tensor(5, (2,), DType.INT32)],
        Attention(q=0, k=1, v=2, y=3, statistics=4, lengths_kv=5),
    ),
    "attention backward": (
        tensors(*[HEADS] * 5, ROUNDS, *[HEADS] * 3, (2, 4, 41, 41), (2, 4, 41, 41)),
        AttentionBackward(dy=0, q=1, k=2, v=3, y=4, statistics=5, dq=6, dk=7, dv=8, bias=9, dbias=10),
    ),
    "attention of wide heads": (
        tensors(*[WIDE_HEADS] * 4, WIDE_ROUNDS),
        Attention(q=0, k=1, v=2, y=3, statistics=4),
    ),
    "attention of wide heads backward": (
        tensors(*[WIDE_HEADS] * 5, WIDE_ROUNDS, *[WIDE_HEADS] * 3),
        AttentionBackward(dy=0, q=1, k=2, v=3, y=4, statistics=5, dq=6, dk=7, dv=8),
    ),
}
LONGER, LONGER_ROUNDS = (2, 4, 48, 8), (2, 4, 48, 1)
STATE = tensor(11, (2,), DType.INT64)
LOCAL: dict[str, tuple[list[GraphTensor], Node]] = {
    "attention in a window": (
        tensors(LONGER, LONGER, LONGER, LONGER, LONGER_ROUNDS),
        Attention(q=0, k=1, v=2, y=3, statistics=4, window_left=5, window_right=0, slopes=alibi_slopes(4)),
    ),
    "attention in a window backward": (
        tensors(*[LONGER] * 5, LONGER_ROUNDS, *[LONGER] * 3),
        AttentionBackward(
            dy=0,
            q=1,
            k=2,
            v=3,
            y=4,
            statistics=5,
            dq=6,
            dk=7,
            dv=8,
            window_left=5,
            window_right=0,
            slopes=alibi_slopes(4),
        ),
    ),
    "attention with dropout": (
        [*tensors(HEADS, HEADS, HEADS, HEADS, ROUNDS), STATE],
        Attention(q=0, k=1, v=2, y=3, statistics=4, dropout=0.5, state=11),
    ),
    "attention with dropout backward": (
        [*tensors(*[HEADS] * 5, ROUNDS, *[HEADS] * 3), STATE],
        AttentionBackward(dy=0, q=1, k=2, v=3, y=4, statistics=5, dq=6, dk=7, dv=8, dropout=0.5, state=11),
    ),
}
DRAWN: dict[str, tuple[list[GraphTensor], Node]] = {
    name: ([STATE, tensor(0, (6, 40), dtype)], of)
    for name, dtype, of in (
        ("uniform", DType.FLOAT32, RandomUniform(state=11, y=0, dims=(6, 40), low=-1.0)),
        ("normal", DType.FLOAT32, RandomNormal(state=11, y=0, dims=(6, 40))),
        ("coins", DType.BOOL, RandomBernoulli(state=11, y=0, dims=(6, 40), dtype=DType.BOOL)),
        ("whole", DType.INT64, RandomIntegers(state=11, y=0, dims=(6, 40), high=100)),
    )
}
MATRICES = (2, 8, 8)
PRODUCTS: dict[str, tuple[list[GraphTensor], Node]] = {
    "product": (tensors(MATRICES, MATRICES, MATRICES), MatMul(a=0, b=1, y=2)),
    "product of one b": (tensors((2, 3, 40, 24), (24, 17), (2, 3, 40, 17)), MatMul(a=0, b=1, y=2)),
    "product of uneven batches": (
        tensors((2, 1, 40, 24), (5, 24, 17), (2, 5, 40, 17)),
        MatMul(a=0, b=1, y=2),
    ),
}


ROWS_OF, EXPERTS = (40, 24), 5
GROUPED: dict[str, tuple[list[GraphTensor], Node]] = {
    "grouped product": (
        [
            tensor(0, ROWS_OF),
            tensor(1, (EXPERTS, 24, 17)),
            tensor(2, (EXPERTS,), DType.INT32),
            tensor(3, (40, 17)),
        ],
        GroupedMatMul(tokens=0, weights=1, offsets=2, y=3),
    ),
    "grouped product in eights": (
        [
            tensor(0, (200, 64)),
            tensor(1, (EXPERTS, 64, 136)),
            tensor(2, (EXPERTS,), DType.INT32),
            tensor(3, (200, 136)),
        ],
        GroupedMatMul(tokens=0, weights=1, offsets=2, y=3),
    ),
    "gradient of weights": (
        [
            tensor(0, ROWS_OF),
            tensor(1, (40, 17)),
            tensor(2, (EXPERTS,), DType.INT32),
            tensor(3, (EXPERTS, 24, 17)),
        ],
        GroupedMatMulBackwardWeights(tokens=0, dy=1, offsets=2, dweights=3),
    ),
}


LONG = (2, 9000)
REDUCTIONS: dict[str, tuple[list[GraphTensor], Node]] = {
    "sum": (
        tensors(ROWS, STATISTICS),
        Reduction(x=0, y=1, mode=ReductionMode.SUM, axes=(-1,), keep_dims=True),
    ),
    "sum in parts": (
        tensors(LONG, (2, 1)),
        Reduction(x=0, y=1, mode=ReductionMode.SUM, axes=(-1,), keep_dims=True),
    ),
    "product along rows": (
        tensors(ROWS, ROWS[:2]),
        Reduction(x=0, y=1, mode=ReductionMode.PRODUCT, axes=(-1,)),
    ),
    "largest": (tensors(ROWS, (4, 40)), Reduction(x=0, y=1, mode=ReductionMode.MAX, axes=(1,))),
    "log sum exp": (tensors(ROWS, ROWS[:2]), Reduction(x=0, y=1, mode=ReductionMode.LOG_SUM_EXP, axes=(-1,))),
}
PLACES: dict[str, tuple[list[GraphTensor], Node]] = {
    "place": (
        [tensor(0, ROWS), tensor(1, ROWS[:2], DType.INT64)],
        ArgReduction(x=0, y=1, mode=ReductionMode.MAX, axis=-1),
    ),
    "place in columns": (
        [tensor(0, ROWS), tensor(1, (4, 40), DType.INT64)],
        ArgReduction(x=0, y=1, mode=ReductionMode.MAX, axis=1),
    ),
}
RUNNING: dict[str, tuple[list[GraphTensor], Node]] = {
    "running sum": (tensors(ROWS, ROWS), Cumulative(x=0, y=1, mode=ReductionMode.SUM, axis=-1)),
    "running product": (tensors(ROWS, ROWS), Cumulative(x=0, y=1, mode=ReductionMode.PRODUCT, axis=-1)),
}
GATHERS: dict[str, tuple[list[GraphTensor], Node]] = {
    "gather": (
        [tensor(0, ROWS), tensor(1, (7,), DType.INT64), tensor(2, (4, 7, 40))],
        Gather(x=0, indices=1, y=2, axis=1),
    ),
    "gather elements": (
        [tensor(0, ROWS), tensor(1, ROWS, DType.INT64), tensor(2, ROWS)],
        GatherElements(x=0, indices=1, y=2, axis=1),
    ),
    "gather parts": (
        [tensor(0, ROWS), tensor(1, (9, 2), DType.INT32), tensor(2, (9, 40))],
        GatherND(x=0, indices=1, y=2),
    ),
}
SCATTERS: dict[str, tuple[list[GraphTensor], Node]] = {
    "scatter": (
        [tensor(0, ROWS), tensor(1, (7,), DType.INT64), tensor(2, (4, 7, 40)), tensor(3, ROWS)],
        Scatter(x=0, indices=1, updates=2, y=3, axis=1),
    ),
    "scatter elements": (
        [tensor(0, ROWS), tensor(1, ROWS, DType.INT64), tensor(2, ROWS), tensor(3, ROWS)],
        ScatterElements(x=0, indices=1, updates=2, y=3, axis=1, reduction=ScatterReduction.ADD),
    ),
    "scatter parts": (
        [tensor(0, ROWS), tensor(1, (9, 2), DType.INT32), tensor(2, (9, 40)), tensor(3, ROWS)],
        ScatterND(x=0, indices=1, updates=2, y=3, reduction=ScatterReduction.MAX),
    ),
}
SORTS: dict[str, tuple[list[GraphTensor], Node]] = {
    "largest five": (
        [tensor(0, ROWS), tensor(1, (4, 3, 5)), tensor(2, (4, 3, 5), DType.INT64)],
        TopK(x=0, values=1, indices=2, k=5),
    ),
    "smallest of many": (
        [tensor(0, LONG), tensor(1, (2, 600)), tensor(2, (2, 600), DType.INT64)],
        TopK(x=0, values=1, indices=2, k=600, largest=False),
    ),
    "sorted columns": ([tensor(0, ROWS), tensor(1, ROWS)], TopK(x=0, values=1, k=3, axis=1)),
}
GRID = (2, 4, 5, 2)
SAMPLED: dict[str, tuple[list[GraphTensor], Node]] = {
    "grid sample": (tensors(X, GRID, (2, 3, 4, 5)), GridSample(x=0, grid=1, y=2)),
    "nearest of a grid": (
        tensors(X, GRID, (2, 3, 4, 5)),
        GridSample(x=0, grid=1, y=2, mode=ResampleMode.NEAREST, padding=GridPadding.BORDER),
    ),
}
LARGER_X, TWICE_X = (2, 3, 11, 5), (2, 3, 16, 16)
RESAMPLED: dict[str, tuple[list[GraphTensor], Node]] = {
    "nearest": (tensors(X, LARGER_X), Resample(x=0, y=1, sizes=LARGER_X)),
    "linear": (tensors(X, LARGER_X), Resample(x=0, y=1, sizes=LARGER_X, mode=ResampleMode.LINEAR)),
    "twice": (tensors(X, TWICE_X), Resample(x=0, y=1, sizes=TWICE_X, mode=ResampleMode.LINEAR)),
    "cubic backward": (
        tensors(LARGER_X, X),
        ResampleBackward(dy=0, dx=1, sizes=LARGER_X, mode=ResampleMode.CUBIC, antialias=True),
    ),
}
CTC_LOSSES: dict[str, tuple[list[GraphTensor], Node]] = {
    name: (
        [
            tensor(0, (30, 4, 9)),
            tensor(1, (4, labels), DType.INT32),
            tensor(2, (4,), DType.INT32),
            tensor(3, (4,), DType.INT64),
            tensor(4, (4,)),
            tensor(5, (30, 4, 9)),
        ],
        CTCLoss(log_probs=0, targets=1, input_lengths=2, target_lengths=3, losses=4, dlog_probs=5, blank=2),
    )
    for name, labels in (("ctc loss", 7), ("ctc loss of several states a thread", 900))
}
RECURRENT_STEPS: dict[str, tuple[list[GraphTensor], Node]] = {
    name: (
        [
            tensor(0, (12, 5, 4 * units)),
            tensor(1, (1, 4 * units, units)),
            tensor(2, (1, 3, units)),
            tensor(3, (5,), DType.INT32),
            tensor(4, (12, 5, units)),
        ],
        RecurrentSteps(
            x=0, w=1, peepholes=2, lengths=3, y=4, cell=RecurrentCell.LSTM, clip=0.1, coupled=coupled
        ),
    )
    for name, units, coupled in (
        ("recurrent steps", 24, True),
        ("recurrent steps of a launch each", 600, False),
    )
}
SOFTMAX: dict[str, tuple[list[GraphTensor], Node]] = {
    "softmax": (tensors(ROWS, ROWS), Softmax(x=0, y=1)),
    "softmax backward": (tensors(ROWS, ROWS, ROWS), SoftmaxBackward(dy=0, y=1, dx=2)),
    "log-softmax backward": (tensors(ROWS, ROWS, ROWS), SoftmaxBackward(dy=0, y=1, dx=2, log=True)),
}
WIDER = (7, 4, 47)
WIDTHS: dict[str, Any] = {"x": 0, "y": 1, "before": (1, 0, 3), "after": (2, 1, 4)}
PADDED: dict[str, tuple[list[GraphTensor], Node]] = {
    "pad": (tensors(ROWS, WIDER), Pad(**WIDTHS, steps=(1, 1, 1), value=2.0)),
    **{f"pad, {mode}": (tensors(ROWS, WIDER), BorderPad(**WIDTHS, mode=mode)) for mode in PadMode},
}
CAST: dict[str, tuple[list[GraphTensor], Node]] = {
    "bits of floats": (
        [tensor(0, ROWS), tensor(1, ROWS, DType.INT32)],
        BitCast(x=0, y=1, source=DType.FLOAT32, dtype=DType.INT32),
    ),
    "bits of integers": (
        [tensor(0, ROWS, DType.INT64), tensor(1, ROWS, DType.FLOAT64)],
        BitCast(x=0, y=1, source=DType.INT64, dtype=DType.FLOAT64),
    ),
}
OURS = ("-kernel", "lines")
"""How the names of ways end that are kernels of our own."""
ONLY_OURS = {
    "instance norm backward",
    "attention with dropout backward",
    "attention of wide heads",
    "attention of wide heads backward",
    "max with index",
    "max backward",
    *(name for name in GRAPHS if name.startswith(("norm", "adaptive"))),
    *GROUPED,
    *(REDUCTIONS.keys() - {"sum", "sum in parts"}),
    *PLACES,
    *RUNNING,
    *PADDED,
    *CAST,
    *DRAWN,
    *GATHERS,
    *SCATTERS,
    *SORTS,
    *CTC_LOSSES,
    *RECURRENT_STEPS,
    *RESAMPLED,
    *SAMPLED,
    *RESPONSES,
    "batch norm",
    "group norm in parts",
    "group norm backward",
    "sums of channels",
}
Sabotage = Callable[[OperationStep], tuple[OperationStep, ...]]


def missing(_: OperationStep) -> tuple[OperationStep, ...]:
    return ()


def moved(step: OperationStep) -> tuple[OperationStep, ...]:
    """Other windows, as many as before."""
    if step.operation.window == ADAPTIVE:  # type: ignore[attr-defined]
        return changed(step, window=Window.symmetric(2, size=3, stride=2, pad=0))
    window = msgspec.structs.replace(WINDOW, pre_padding=(0, 1), post_padding=(2, 1))
    return (msgspec.structs.replace(step, operation=msgspec.structs.replace(step.operation, window=window)),)


def with_output(step: OperationStep, **changes: Any) -> tuple[OperationStep, ...]:
    """The step with its first output described otherwise."""
    at = len(step.operation.reads)
    tensors = list(step.tensors)
    tensors[at] = msgspec.structs.replace(tensors[at], **changes)
    return (msgspec.structs.replace(step, tensors=tuple(tensors)),)


def transposed(step: OperationStep) -> tuple[OperationStep, ...]:
    *rest, rows, columns = step.tensors[len(step.operation.reads)].strides
    return with_output(step, strides=(*rest, columns, rows))


def one_sample_less(step: OperationStep) -> tuple[OperationStep, ...]:
    return batched(step, 1)


def one_sample_more(step: OperationStep) -> tuple[OperationStep, ...]:
    return batched(step, 3)


def batched(step: OperationStep, samples: int) -> tuple[OperationStep, ...]:
    tensors = tuple(msgspec.structs.replace(t, dims=(samples, *t.dims[1:])) for t in step.tensors)
    return (msgspec.structs.replace(step, tensors=tensors),)


def swapped(step: OperationStep) -> tuple[OperationStep, ...]:
    """Read from the output's place, and write to the input's."""
    return (msgspec.structs.replace(step, sources=step.sources[::-1]),)


def changed(step: OperationStep, **changes: Any) -> tuple[OperationStep, ...]:
    return (msgspec.structs.replace(step, operation=msgspec.structs.replace(step.operation, **changes)),)


def longer_rows(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, axis=-2)


def causal(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, causal=True)


def scaled(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, scale=0.3)


def wider(step: OperationStep) -> tuple[OperationStep, ...]:
    """One more key at each end of the window."""
    return changed(step, window_left=6, window_right=1)


def left_only(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, window_right=None)


def steeper(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, slopes=(0.3, 0.2, 0.1, 0.0))


def dropped_less(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, dropout=0.4)


def other_state(step: OperationStep) -> tuple[OperationStep, ...]:
    """The offset in the seed's place, and the seed in the offset's."""
    tensors, sources = list(step.tensors), list(step.sources)
    at = next(number for number, tensor in enumerate(tensors) if tensor.dtype is DType.INT64)
    tensors[at] = msgspec.structs.replace(tensors[at], strides=(-1,))
    source = sources[at]
    assert isinstance(source, Buffer)
    sources[at] = msgspec.structs.replace(source, offset=8)
    return (msgspec.structs.replace(step, tensors=tuple(tensors), sources=tuple(sources)),)


def fewer(step: OperationStep) -> tuple[OperationStep, ...]:
    return with_output(step, dims=(5, 40))


def next_column(step: OperationStep) -> tuple[OperationStep, ...]:
    """The rows of the result one element nearer to each other."""
    return with_output(step, strides=(39, 1))


def another_distribution(step: OperationStep) -> tuple[OperationStep, ...]:
    changes: dict[type[Any], dict[str, Any]] = {
        RandomUniform: {"low": -0.9},
        RandomNormal: {"deviation": 1.1},
        RandomBernoulli: {"probability": 0.6},
        RandomIntegers: {"high": 101},
    }
    return changed(step, **changes[type(step.operation)])


def another_mode(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, mode=ReductionMode.L2)


def smallest(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, mode=ReductionMode.MIN)


def reverse(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, reverse=True)


def exclusive(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, exclusive=True)


def half_read(step: OperationStep) -> tuple[OperationStep, ...]:
    """Only the first half of the reduced dim."""
    axis = step.operation.reduced(3)[0] - 3 if isinstance(step.operation, Reduction) else step.operation.axis  # type: ignore[attr-defined]
    x, *rest = step.tensors
    at = axis % len(x.dims)
    x = msgspec.structs.replace(x, dims=(*x.dims[:at], x.dims[at] // 2, *x.dims[at + 1 :]))
    return (msgspec.structs.replace(step, tensors=(x, *rest)),)


def next_row(step: OperationStep) -> tuple[OperationStep, ...]:
    """The input's rows one element further apart."""
    x, *rest = step.tensors
    *outer, last = x.strides
    x = msgspec.structs.replace(x, strides=(*(stride + 1 for stride in outer), last))
    return (msgspec.structs.replace(step, tensors=(x, *rest)),)


def rotated(step: OperationStep) -> tuple[OperationStep, ...]:
    """Each operand in the place of the next one of as many bytes."""
    sizes = [tensor.spec.nbytes for tensor in step.tensors]
    sources = list(step.sources)
    for size in set(sizes):
        places = [number for number, other in enumerate(sizes) if other == size]
        for number, other in zip(places, [*places[1:], places[0]], strict=True):
            sources[number] = step.sources[other]
    return (msgspec.structs.replace(step, sources=tuple(sources)),)


def shorter_sums(step: OperationStep) -> tuple[OperationStep, ...]:
    a, b, y = step.tensors
    a = msgspec.structs.replace(a, dims=(*a.dims[:-1], a.dims[-1] - 1))
    b = msgspec.structs.replace(b, dims=(*b.dims[:-2], b.dims[-2] - 1, b.dims[-1]))
    return (msgspec.structs.replace(step, tensors=(a, b, y)),)


def another_b(step: OperationStep) -> tuple[OperationStep, ...]:
    """Its columns, all one further."""
    a, b, y = step.tensors
    b = msgspec.structs.replace(b, strides=(*b.strides[:-2], b.strides[-2] + 1, b.strides[-1]))
    return (msgspec.structs.replace(step, tensors=(a, b, y)),)


def other_epsilon(step: OperationStep) -> tuple[OperationStep, ...]:
    if hasattr(step.operation, "epsilon"):
        return changed(step, epsilon=0.5)
    return missing(step)


def other_images(step: OperationStep) -> tuple[OperationStep, ...]:
    """Images one element further apart."""
    whole = len(IMAGE)
    tensors = tuple(
        msgspec.structs.replace(t, strides=(t.strides[0] + 1, *t.strides[1:])) if len(t.dims) == whole else t
        for t in step.tensors
    )
    return (msgspec.structs.replace(step, tensors=tensors),)


def one_image_less(step: OperationStep) -> tuple[OperationStep, ...]:
    """Batched tensors only: weights have no samples."""
    tensors = tuple(
        msgspec.structs.replace(t, dims=(1, *t.dims[1:])) if len(t.dims) > 1 else t for t in step.tensors
    )
    return (msgspec.structs.replace(step, tensors=tensors),)


def one_column_less(step: OperationStep) -> tuple[OperationStep, ...]:
    whole = len(IMAGE)
    tensors = tuple(
        msgspec.structs.replace(t, dims=(*t.dims[:-1], t.dims[-1] - 1)) if len(t.dims) == whole else t
        for t in step.tensors
    )
    return (msgspec.structs.replace(step, tensors=tensors),)


def other_size(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, size=5)


def other_power(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, beta=0.5)


def other_border(step: OperationStep) -> tuple[OperationStep, ...]:
    if isinstance(step.operation, Pad):
        return changed(step, value=1.0)
    modes = list(PadMode)
    return changed(step, mode=modes[modes.index(step.operation.mode) - 1])  # type: ignore[attr-defined]


def other_widths(step: OperationStep) -> tuple[OperationStep, ...]:
    """More behind x's elements, and less before them."""
    return changed(step, before=(0, 0, 2), after=(3, 1, 5))


def with_tensors(
    step: OperationStep, names: tuple[str, ...], change: Callable[[GraphTensor], GraphTensor]
) -> tuple[OperationStep, ...]:
    """The step with some of its operands described otherwise."""
    operands = zip(step.operation.named(), step.tensors, strict=True)
    tensors = tuple(change(tensor) if name in names else tensor for (name, _), tensor in operands)
    return (msgspec.structs.replace(step, tensors=tensors),)


def the_first(tensor: GraphTensor) -> GraphTensor:
    """What lies first, in the place of all."""
    return msgspec.structs.replace(tensor, strides=(0, *tensor.strides[1:]))


def one_matrix(step: OperationStep) -> tuple[OperationStep, ...]:
    """The matrix of the first expert for all of them."""
    return with_tensors(step, ("weights", "dweights"), the_first)


def one_weight(step: OperationStep) -> tuple[OperationStep, ...]:
    return with_tensors(step, ("scale",), lambda tensor: msgspec.structs.replace(tensor, strides=(0,)))


def one_deviation(step: OperationStep) -> tuple[OperationStep, ...]:
    """That of the first sample's rows for all samples'."""
    return with_tensors(step, ("inverse_deviation", "inverse_rms"), the_first)


def shorter_rows(step: OperationStep) -> tuple[OperationStep, ...]:
    """Rows without their last element."""

    def cut(tensor: GraphTensor) -> GraphTensor:
        return msgspec.structs.replace(tensor, dims=(*tensor.dims[:-1], tensor.dims[-1] - 1))

    return with_tensors(step, ("x", "dy", "y", "dx", "scale", "bias", "dscale", "dbias"), cut)


def one_end(step: OperationStep) -> tuple[OperationStep, ...]:
    """The rows of the first expert only."""
    return with_tensors(step, ("offsets",), the_first)


def narrower(step: OperationStep) -> tuple[OperationStep, ...]:
    """The last element of each token left out."""

    def cut(tensor: GraphTensor) -> GraphTensor:
        first, second, *others = tensor.dims
        return msgspec.structs.replace(tensor, dims=(first, second - 1, *others))

    return with_tensors(step, ("tokens", "weights", "dweights"), cut)


def shorter_result(step: OperationStep) -> tuple[OperationStep, ...]:
    """Rows of the result without their last element."""
    *outer, last = step.tensors[len(step.operation.reads)].dims
    return with_output(step, dims=(*outer, last - 1))


def other_corners(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, align_corners=True)


def other_padding(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, padding=GridPadding.REFLECTION)


def other_places(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, coordinates=Coordinates.ASYMMETRIC)


def other_interpolation(step: OperationStep) -> tuple[OperationStep, ...]:
    modes = [*ResampleMode]
    mode = modes[modes.index(step.operation.mode) - 1]  # type: ignore[attr-defined]
    return changed(step, mode=mode, antialias=False)


def other_end(step: OperationStep) -> tuple[OperationStep, ...]:
    """The smallest for the largest."""
    return changed(step, largest=not step.operation.largest)  # type: ignore[attr-defined]


def one_less(step: OperationStep) -> tuple[OperationStep, ...]:
    """The best, but for the last one."""
    return changed(step, k=step.operation.k - 1)  # type: ignore[attr-defined]


def another_blank(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, blank=0)


def unbounded(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, clip=None)


def backwards(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, reverse=True)


def unordered(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, in_order=False)


def one_index(step: OperationStep) -> tuple[OperationStep, ...]:
    """The first index for all of them."""
    return with_tensors(step, ("indices",), the_first)


def one_update(step: OperationStep) -> tuple[OperationStep, ...]:
    """The first part of the updates for all of them."""
    return with_tensors(step, ("updates",), the_first)


def smallest_update(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, reduction=ScatterReduction.MIN)


def fewer_selected(step: OperationStep) -> tuple[OperationStep, ...]:
    """The last elements of x are out of range."""

    def cut(tensor: GraphTensor) -> GraphTensor:
        return msgspec.structs.replace(tensor, dims=(tensor.dims[0], tensor.dims[1] - 1, *tensor.dims[2:]))

    return with_tensors(step, ("x",), cut)


def by_kernel(graph: OperationGraph, handle: Any) -> CudaPlan:
    """The plan that runs an operation by a kernel of our own."""
    for way in range(ways(graph)):
        with contextlib.suppress(Refused):
            plan = compile_split(graph, handle, None, choice=way)
            if plan.tag.endswith("-kernel"):
                return plan
    pytest.fail("there is no kernel")


@pytest.fixture
def engine() -> Iterator[CudaEngine]:
    engine = CudaEngine()
    engine.open()
    yield engine
    engine.close()


GIVEN = GRAPHS | NORMS | IMAGES | RESPONSES | ATTENTION | LOCAL | DRAWN | PRODUCTS | GROUPED
GIVEN |= REDUCTIONS | PLACES | RUNNING | SOFTMAX | GATHERS | SCATTERS | SORTS | RESAMPLED | PADDED
GIVEN |= SAMPLED | CAST | CTC_LOSSES | RECURRENT_STEPS
CASES = [
    *itertools.product(GRAPHS, [missing, moved, transposed, one_sample_less, one_sample_more, swapped]),
    *itertools.product(NORMS, [missing, shorter_rows, one_weight, rotated, one_sample_less, one_sample_more]),
    *itertools.product(["layer norm", "rms norm"], [other_epsilon]),
    *itertools.product(["layer norm backward", "rms norm backward"], [one_deviation]),
    *itertools.product(IMAGES, [missing, other_epsilon, other_images, one_column_less, one_image_less]),
    *itertools.product(RESPONSES, [missing, other_size, other_power, other_images, one_column_less]),
    *itertools.product(ATTENTION, [missing, causal, scaled, rotated, one_sample_less]),
    # Of wide heads, that would be far outside of the tensors.
    *itertools.product([*ATTENTION][:2], [one_sample_more]),
    *itertools.product([*LOCAL][:2], [missing, wider, left_only, steeper, scaled, rotated]),
    *itertools.product([*LOCAL][2:], [missing, causal, dropped_less, other_state, scaled, rotated]),
    *itertools.product(DRAWN, [missing, other_state, fewer, next_column, another_distribution]),
    *itertools.product(GATHERS, [missing, shorter_result, next_row, one_index, fewer_selected]),
    *itertools.product(SCATTERS, [missing, shorter_result, one_index, one_update, smallest_update]),
    *itertools.product(SORTS, [missing, other_end, one_less, unordered, next_row, half_read]),
    *itertools.product(CTC_LOSSES, [missing, another_blank, next_row]),
    *itertools.product(RECURRENT_STEPS, [missing, unbounded, backwards, next_row]),
    *itertools.product(RESAMPLED, [missing, shorter_result, next_row, other_places, other_interpolation]),
    *itertools.product(SAMPLED, [missing, shorter_result, next_row, other_corners, other_padding]),
    *itertools.product(PRODUCTS, [missing, transposed, shorter_sums, another_b, one_sample_less]),
    *itertools.product(GROUPED, [missing, transposed, next_row, one_matrix, one_end, narrower]),
    ("product", rotated),
    ("product", one_sample_more),
    *itertools.product(REDUCTIONS, [missing, another_mode, half_read, next_row, one_sample_less]),
    *itertools.product(PLACES, [missing, smallest, half_read, next_row, one_sample_less, one_sample_more]),
    *itertools.product(PADDED, [missing, other_border, other_widths, next_row, transposed]),
    *itertools.product(CAST, [missing, shorter_result, next_row, transposed, swapped]),
    *itertools.product(RUNNING, [missing, reverse, exclusive, longer_rows, one_sample_less, one_sample_more]),
]


@pytest.mark.parametrize(("name", "sabotage"), CASES)
def test_a_sabotaged_plan_is_found(engine: CudaEngine, name: str, sabotage: Sabotage) -> None:
    given, operation = GIVEN[name]
    graph = OperationGraph(tensors=tuple(given), operations=(operation,))
    plan = by_kernel(graph, engine._handle)
    check = SelfCheck(graph, BuildContext(engine._handle, engine.stream))
    assert check.fault(plan) is None
    (step,) = plan.recipe.steps
    assert isinstance(step, OperationStep)
    recipe = msgspec.structs.replace(plan.recipe, steps=sabotage(step))
    assert check.fault(CudaPlan(recipe, ())) is not None
    assert check.fault(plan) is None, "the next plan was blamed"
    check.close()


@pytest.fixture
def builder() -> Iterator[CudaBuilder]:
    builder = CudaBuilder(0)
    builder.open()
    yield builder
    builder.close()


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (dtype, name)
        for dtype, name in itertools.product([DType.FLOAT32, DType.BFLOAT16], GIVEN)
        if dtype is DType.FLOAT32 or name not in CAST
    ],
)
def test_each_way_to_run_an_operation(
    builder: CudaBuilder, name: str, dtype: DType, record_property: Callable[[str, object], None]
) -> None:
    """Each is checked, stored, restored and captured; our own kernel, and one of cuDNN's ways, are right."""
    given, operation = GIVEN[name]
    tensors = tuple(
        msgspec.structs.replace(tensor, dtype=dtype)
        if tensor.dtype is DType.FLOAT32
        and tensor.dims[-1] > 1
        and (name not in IMAGES | CTC_LOSSES or len(tensor.dims) == len(given[0].dims))
        else tensor
        for tensor in given
    )
    if isinstance(operation, Randomness) and operation.dtype is DType.FLOAT32:
        operation = msgspec.structs.replace(operation, dtype=dtype)
    graph = OperationGraph(tensors=tensors, operations=(operation,))
    context = builder.context
    check = SelfCheck(graph, context)
    found: dict[str, str | None] = {}
    for plan in possible_plans(graph, context.handle, None):
        way = plan.tag.rsplit("/", 1)[-1]
        found[way] = check.fault(plan)
        data = builder.export(plan)
        assert data is not None
        # What a wrong plan writes may differ from run to run, and so does what is wrong with it.
        again = check.fault(builder.restore(graph, data))
        assert (again is None) == (found[way] is None), f"{way}: {found[way]}, and restored: {again}"
        program, workspace = Program(plan, context.handle, context.stream), check.room_for(plan)
        for _ in range(5):
            program.run((1.0,), check.pointers, check.scalars, workspace.pointer)
        assert program.replays, f"{way} cannot be captured"
    check.close()
    record_property("ways", found)
    right = [way for way, fault in found.items() if fault is None]
    assert any(way.endswith(OURS) for way in right)
    only_ours = name in ONLY_OURS or (dtype is DType.FLOAT32 and name in ATTENTION | LOCAL | REDUCTIONS)
    assert only_ours or any(not way.endswith(OURS) for way in right)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_an_operation_may_read_one_tensor_more_than_once(builder: CudaBuilder, dtype: DType) -> None:
    x, y = (tensor(uid, (2, 4, 128, 64), dtype) for uid in range(2))
    graph = OperationGraph(tensors=(x, y), operations=(Attention(q=0, k=0, v=0, y=1),))
    context = builder.context
    check = SelfCheck(graph, context)
    for choice in range(ways(graph)):
        with contextlib.suppress(Refused):
            assert check.fault(compile_split(graph, context.handle, None, choice=choice)) is None
    check.close()


def test_operations_with_different_numbers_of_ways_run_one_after_the_other(builder: CudaBuilder) -> None:
    x, y, z = tensors(X, Y, Y)
    inner = msgspec.structs.replace(y, role=TensorRole.VIRTUAL)
    operations = MaxPool(x=0, y=1, window=WINDOW), RMSNorm(x=1, y=2)  # cuDNN has no norm without a scale
    graph = OperationGraph(tensors=(x, inner, z), operations=operations)
    plan = builder.build(graph, workspace_limit=None)
    assert plan.tag.endswith("rms_norm-kernel")


@pytest.mark.parametrize("mode", PointwiseMode)
def test_every_tensor_of_a_check_has_values_of_its_own(engine: CudaEngine, mode: PointwiseMode) -> None:
    """Of equal ones each difference would be 0, and a plan that reads one operand twice would look right.

    Every function, also one that has no result for some numbers, must be right in its own check.
    """
    arity, dtype = FUNCTIONS[mode].arity, DType.INT32 if FUNCTIONS[mode].bits else DType.FLOAT32
    operation = Pointwise(mode=mode, operands=tuple(range(arity)), result=arity)
    operands = tuple(tensor(uid, X, dtype) for uid in range(arity + 1))
    graph = OperationGraph(tensors=operands, operations=(operation,))
    plan = engine.build(graph, workspace_limit=None)
    check = SelfCheck(graph, BuildContext(engine._handle, engine.stream))
    assert check.fault(plan) is None
    if arity > 1:
        check.pointers[1] = check.pointers[0]
        assert "are wrong" in (check.fault(plan) or "")
    check.close()
