"""Graphs of one operation each, for the tests of self-checks."""

from __future__ import annotations

from typing import Any

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
    Pad,
    PadMode,
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
    TensorSpec,
    TopK,
    Window,
    alibi_slopes,
)

__all__ = [
    "ADAPTIVE",
    "ATTENTION",
    "CAST",
    "CHANNELS",
    "CTC_LOSSES",
    "DRAWN",
    "EXPERTS",
    "GATHERS",
    "GRAPHS",
    "GRID",
    "GROUPED",
    "HEADS",
    "IMAGE",
    "IMAGES",
    "LARGE",
    "LARGER_X",
    "LENGTH",
    "LOCAL",
    "LONG",
    "LONGER",
    "LONGER_ROUNDS",
    "MATRICES",
    "NORMS",
    "PADDED",
    "PLACES",
    "PRODUCTS",
    "RECURRENT_STEPS",
    "REDUCTIONS",
    "RESAMPLED",
    "RESPONSES",
    "ROUNDS",
    "ROWS",
    "ROWS_OF",
    "RUNNING",
    "SAMPLED",
    "SCATTERS",
    "SOFTMAX",
    "SORTS",
    "STATE",
    "STATISTICS",
    "THREES",
    "TWICE_X",
    "WIDER",
    "WIDE_HEADS",
    "WIDE_ROUNDS",
    "WIDTHS",
    "WINDOW",
    "X",
    "Y",
    "tensor",
    "tensors",
]


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
