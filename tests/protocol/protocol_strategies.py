"""Valid protocol data of every kind, for hypothesis."""

from __future__ import annotations

from typing import Any, get_args, get_origin

import hypothesis.strategies as st
import msgspec
import numpy as np

from cudnn_actor.protocol import (
    Activation,
    BufferRef,
    CacheStatistics,
    ConvSpec,
    DType,
    Epilogue,
    Explanation,
    Graph,
    GraphBuilder,
    Layout,
    Loop,
    Measured,
    ModelRef,
    Numerics,
    OperationGraph,
    PieceOfPlan,
    PlanStatistics,
    Receipt,
    ScratchTensor,
    Statistics,
    TensorSpec,
)
from cudnn_actor.protocol.messages.messages import Travelling
from cudnn_actor.protocol.operations import AdaptiveWindow, Window

COUNTS = st.integers(0, 2**63)
NUMBERS = st.floats(allow_nan=False, width=64)


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
_plan_names = st.lists(st.text(min_size=1), max_size=2).map(tuple)
numerics = st.builds(
    Numerics,
    **dict.fromkeys(["tf32", "deterministic"], st.booleans()),
    prefer=_plan_names,
    exclude=_plan_names,
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    g = GraphBuilder(draw(numerics))
    dtype = draw(st.sampled_from(DType))
    x = g.input("x", draw(st.lists(st.integers(1, 9), min_size=1, max_size=8)), dtype)
    g.input("unused", (3,))
    return g.build(y=x + draw(st.integers(-9, 9)) * 0.5, z=x.reshape(-1), updates={"x": x * 0.5})


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    g = GraphBuilder(draw(numerics))
    x, go = g.input("x", draw(st.lists(st.integers(1, 9), max_size=3))), g.input("go", (1,), "bool")
    body = g.build(y=x + 1.0, on=g.logical_not(go), z=x * 2.0)
    carried = {"go": "on"} | ({"x": "y"} if draw(st.booleans()) else {})
    scanned: tuple[str, ...] = () if "x" in carried else draw(st.sampled_from([(), ("x",)]))
    return Loop(body=body, carried=carried, scanned=scanned, condition=draw(st.sampled_from([None, "go"])))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dims = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    dtype = draw(st.sampled_from(DType)).numpy
    size = int(np.prod(dims)) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    array: np.ndarray = np.frombuffer(data, dtype=np.uint8).copy().view(dtype).reshape(dims)
    return array.T if draw(st.booleans()) else array


_KNOWN: dict[type, st.SearchStrategy[Any]] = {
    BufferRef: refs,
    TensorSpec: specs(),
    ConvSpec: convs(),
    Epilogue: epilogues,
    Numerics: numerics,
    Window: windows(),
    AdaptiveWindow: windows(),
    Graph: graphs(),
    Loop: loops(),
    OperationGraph: graphs().map(lambda graph: graph.body),
    np.ndarray: arrays(),
    msgspec.inspect.StrType: st.text(),
    msgspec.inspect.NoneType: st.none(),
    msgspec.inspect.BoolType: st.booleans(),
    msgspec.inspect.IntType: st.integers(-(2**63), 2**64 - 1),
    msgspec.inspect.FloatType: NUMBERS,
}


def _values_of(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Values of the type of a field."""
    match kind:
        case msgspec.inspect.EnumType() | msgspec.inspect.LiteralType():
            choices: Any = kind.cls if isinstance(kind, msgspec.inspect.EnumType) else kind.values
            return st.sampled_from(choices)
        case msgspec.inspect.StructType(cls=cls) | msgspec.inspect.CustomType(cls=cls):
            return _KNOWN[cls] if cls in _KNOWN else _built(kind)
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(_values_of(item), max_size=3).map(tuple)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_values_of(key), _values_of(value), max_size=3)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*map(_values_of, types))
    return _KNOWN[type(kind)]


def _built(kind: Any) -> st.SearchStrategy[Any]:
    """Records with fields of any value of their types: an operation also without its optional operands."""
    fields = {field.name: _values_of(field.type) for field in kind.fields}
    return st.builds(get_origin(kind.cls) or kind.cls, **fields)


def _built_later(cls: Any) -> st.SearchStrategy[Any]:
    """When it is drawn from, not when tests are collected."""
    return st.deferred(lambda: _built(msgspec.inspect.type_info(cls)))


MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    get_origin(cls) or cls: _built_later(cls) for cls in get_args(Travelling)
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
_counters = sorted({*Statistics.__struct_fields__} - {"plans", "graphs", "worker_graphs", "cudnn_version"})
receipts = st.builds(
    Receipt, request_id=COUNTS, generation=COUNTS, plan=st.text(), queue_us=NUMBERS, run_us=NUMBERS
)
statistics = st.builds(
    Statistics,
    **dict.fromkeys(_counters, COUNTS),
    plans=_plans,
    graphs=_graphs,
    worker_graphs=st.none() | _graphs,
    cudnn_version=st.none() | st.text(),
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
models = st.builds(ModelRef, number=COUNTS, service=COUNTS)
replies = st.one_of(
    receipts,
    refs,
    models,
    statistics,
    explanations,
    arrays(),
    st.dictionaries(st.text(), arrays(), max_size=3),
    st.integers(-(2**63), 2**63),
    st.none(),
)
