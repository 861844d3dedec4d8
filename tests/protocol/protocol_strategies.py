"""Valid protocol data of every kind, for hypothesis."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np

from cudnn_actor.protocol import (
    Activation,
    Allocate,
    BufferRef,
    CacheStatistics,
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    ConvSpec,
    Copy,
    Download,
    Drain,
    DType,
    Epilogue,
    Explain,
    Explanation,
    Fill,
    Free,
    GetStatistics,
    Graph,
    GraphBuilder,
    Layout,
    Measured,
    Numerics,
    PieceOfPlan,
    Ping,
    PlanStatistics,
    Receipt,
    RunGraph,
    ScratchTensor,
    Statistics,
    TensorSpec,
    Upload,
    Warm,
)
from cudnn_actor.protocol.messages.messages import Travelling
from cudnn_actor.protocol.operations import (
    OPERATIONS,
    AdaptiveWindow,
    BorderPad,
    Coordinates,
    GridPadding,
    GridSample,
    NearestRounding,
    Operation,
    PadMode,
    Pointwise,
    PointwiseMode,
    RandomIntegers,
    ReductionMode,
    Resample,
    ResampleBackward,
    ResampleMode,
    ScatterReduction,
    Window,
)

COUNTS = st.integers(0, 2**63)
NUMBERS = st.floats(allow_nan=False, width=64)
VALUES = NUMBERS | st.integers(-(2**63), 2**64 - 1) | st.booleans()


@st.composite
def specs(draw: st.DrawFn) -> TensorSpec:
    dims = tuple(draw(st.lists(st.integers(0, 9), max_size=8)))
    layouts = [Layout.NCHW, Layout.NHWC] if 3 <= len(dims) <= 5 else [Layout.NCHW]
    dtype = draw(st.sampled_from(DType))
    packed = TensorSpec.packed(dims, dtype, draw(st.sampled_from(layouts)))
    stretch = draw(st.integers(1, 3))
    strides = tuple(stride * stretch for stride in packed.strides)
    return TensorSpec(dims=dims, strides=strides, dtype=dtype, alignment=draw(st.sampled_from([16, 32, 256])))


refs = st.builds(
    BufferRef,
    slot=st.integers(0, 2**32),
    generation=st.integers(0, 2**64 - 1),
    spec=specs(),
    device=st.sampled_from(["cpu", "cuda:0", "cuda:17"]),
)


@st.composite
def convs(draw: st.DrawFn) -> ConvSpec:
    spatial = draw(st.integers(1, 3))
    pads = st.tuples(*[st.integers(0, 5)] * spatial)
    steps = st.tuples(*[st.integers(1, 5)] * spatial)
    return draw(
        st.builds(
            ConvSpec,
            pre_padding=pads,
            post_padding=pads,
            stride=steps,
            dilation=steps,
            groups=st.integers(1, 64),
        )
    )


@st.composite
def windows(draw: st.DrawFn) -> Window | AdaptiveWindow:
    spatial = draw(st.integers(1, 3))
    if draw(st.booleans()):
        return AdaptiveWindow(output=draw(st.tuples(*[st.integers(1, 9)] * spatial)))
    fields = {"size": 1, "pre_padding": 0, "post_padding": 0, "stride": 1, "dilation": 1}
    each = {name: st.tuples(*[st.integers(least, 5)] * spatial) for name, least in fields.items()}
    return draw(st.builds(Window, **each))


epilogues = st.one_of(
    st.builds(Epilogue, activation=st.sampled_from(Activation)),
    st.builds(Epilogue, activation=st.just(Activation.ELU), parameter=st.floats(-9, 9)),
)
numerics = st.builds(Numerics, tf32=st.booleans(), deterministic=st.booleans())
_common = {"conv": convs(), "alpha": NUMBERS, "beta": NUMBERS, "numerics": numerics}
_ATTRIBUTES: dict[str, st.SearchStrategy[object]] = {
    "conv": convs(),
    "parameter": st.none() | NUMBERS,
    "lower": st.none() | NUMBERS,
    "upper": st.none() | NUMBERS,
    "numerics": st.none() | numerics,
    "window": windows(),
    "include_padding": st.booleans(),
    "axis": st.integers(-5, 5),
    "epsilon": NUMBERS,
    "p": NUMBERS,
    "scale": st.none() | NUMBERS,
    "causal": st.booleans(),
    **dict.fromkeys(
        ["dims", "starts", "steps", "sizes", "before", "after"], st.lists(st.integers(-9, 9)).map(tuple)
    ),
    "value": NUMBERS,
    **dict.fromkeys(["window_left", "window_right"], st.none() | st.integers(0, 2**31 - 1)),
    "slopes": st.none() | st.lists(NUMBERS, max_size=3).map(tuple),
    **dict.fromkeys(["dropout", "probability", "mean", "deviation", "low", "high"], NUMBERS),
    **dict.fromkeys(("dtype", "source"), st.sampled_from(DType)),
    **{name: st.integers(-9, 9) for name in ("groups", "size", "batch_dims", "k")},
    **dict.fromkeys(("momentum", "alpha", "beta", "bias"), NUMBERS),
    "unbiased": st.booleans(),
    "reduction": st.sampled_from(ScatterReduction),
    "padding": st.sampled_from(GridPadding),
    **dict.fromkeys(("scales", "roi"), st.none() | st.lists(NUMBERS, max_size=3).map(tuple)),
    "coordinates": st.sampled_from(Coordinates),
    "rounding": st.sampled_from(NearestRounding),
    **dict.fromkeys(("cubic_coefficient", "extrapolation"), NUMBERS),
    **dict.fromkeys(("exclude_outside", "antialias", "align_corners"), st.booleans()),
    "axes": st.lists(st.integers(-8, 7), max_size=3).map(tuple),
    **{name: st.booleans() for name in ("keep_dims", "exclusive", "reverse", "log", "largest", "in_order")},
}
_SEVERAL = {"operands": st.lists(refs, min_size=1, max_size=3).map(tuple)}


def operations(kind: type[Operation[BufferRef]]) -> st.SearchStrategy[Operation[BufferRef]]:
    """Messages of an operation's class, with and without its optional operands."""
    kinds: dict[type[Any], Any] = {Pointwise: PointwiseMode, BorderPad: PadMode}
    kinds[Resample] = kinds[ResampleBackward] = kinds[GridSample] = ResampleMode
    modes = kinds.get(kind, ReductionMode)
    attributes = _ATTRIBUTES | {"mode": st.sampled_from(modes)}
    if issubclass(kind, RandomIntegers):
        attributes |= {name: st.integers(-(2**63), 2**64 - 1) for name in ("low", "high")}
    fields: dict[str, st.SearchStrategy[object]] = {}
    for name in kind.__struct_fields__:
        if name in (*kind.inputs, *kind.outputs):
            fields[name] = _SEVERAL.get(name, st.none() | refs if name in kind.optional else refs)
        else:
            fields[name] = attributes[name]
    return st.builds(kind, **fields)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    g = GraphBuilder(draw(numerics))
    dtype = draw(st.sampled_from(DType))
    x = g.input("x", draw(st.lists(st.integers(1, 9), min_size=1, max_size=8)), dtype)
    g.input("unused", (3,))
    return g.build(y=x + draw(st.integers(-9, 9)) * 0.5, z=x.reshape(-1), updates={"x": x * 0.5})


_computes: dict[type, st.SearchStrategy[Any]] = {
    **{kind: operations(kind) for kind in OPERATIONS},
    RunGraph: st.builds(RunGraph, graph=graphs(), buffers=st.lists(refs, max_size=3).map(tuple)),
    ConvFwd: st.builds(ConvFwd, x=refs, w=refs, y=refs, bias=st.none() | refs, epilogue=epilogues, **_common),
    ConvBwdData: st.builds(ConvBwdData, dy=refs, w=refs, dx=refs, **_common),
    ConvBwdFilter: st.builds(ConvBwdFilter, x=refs, dy=refs, dw=refs, **_common),
}


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dims = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    dtype = draw(st.sampled_from(DType)).numpy
    size = int(np.prod(dims)) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    array: np.ndarray = np.frombuffer(data, dtype=np.uint8).copy().view(dtype).reshape(dims)
    return array.T if draw(st.booleans()) else array


MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    **_computes,
    Allocate: st.builds(Allocate, spec=specs(), data=st.none() | arrays()),
    Upload: st.builds(Upload, dst=refs, data=arrays()),
    Download: st.builds(Download, src=refs),
    Copy: st.builds(Copy, src=refs, dst=refs),
    Fill: st.builds(Fill, dst=refs, value=VALUES),
    Free: st.builds(Free, buffer=refs),
    Ping: st.just(Ping()),
    GetStatistics: st.just(GetStatistics()),
    Warm: st.builds(Warm, messages=st.lists(st.one_of(*_computes.values()), max_size=2).map(tuple)),
    Explain: st.builds(Explain, graph=graphs().map(lambda graph: graph.body)),
    Drain: st.just(Drain()),
}
"""By their classes."""
messages: st.SearchStrategy[Travelling] = st.one_of(*MESSAGES.values())

_plans = st.builds(
    PlanStatistics,
    **dict.fromkeys(["size", "capacity", "hits", "misses", "evictions", "refused"], COUNTS),
    build_s=NUMBERS,
    nbytes=COUNTS,
    capacity_nbytes=COUNTS,
)
_graphs = st.builds(CacheStatistics, **dict.fromkeys(CacheStatistics.__struct_fields__, COUNTS))
_counters = sorted({*Statistics.__struct_fields__} - {"plans", "graphs", "worker_graphs"})
receipts = st.builds(
    Receipt, request_id=COUNTS, generation=COUNTS, plan=st.text(), queue_us=NUMBERS, run_us=NUMBERS
)
statistics = st.builds(
    Statistics,
    **dict.fromkeys(_counters, COUNTS),
    plans=_plans,
    graphs=_graphs,
    worker_graphs=st.none() | _graphs,
)
_texts = st.lists(st.text(), max_size=3).map(tuple)
_pieces = st.builds(
    PieceOfPlan,
    operations=st.lists(COUNTS, max_size=3).map(tuple),
    labels=_texts,
    steps=_texts,
    plan=st.text(),
    why=_texts,
    measured=st.none() | st.builds(Measured, heuristic_us=NUMBERS, tuned_us=NUMBERS, timed=COUNTS),
)
_scratch = st.builds(
    ScratchTensor, label=st.text(), **dict.fromkeys(["nbytes", "offset", "first", "last"], COUNTS)
)
explanations = st.builds(
    Explanation,
    plan=st.text(),
    digest=st.text(),
    pieces=st.lists(_pieces, max_size=3).map(tuple),
    views=_texts,
    scratch=st.lists(_scratch, max_size=3).map(tuple),
    workspace=COUNTS,
)
replies = st.one_of(
    receipts, refs, statistics, explanations, arrays(), st.integers(-(2**63), 2**63), st.none()
)
