from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_actor.engines.base import Engine
from cudnn_actor.protocol import (
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    ConvSpec,
    DType,
    Layout,
    OutOfMemory,
    TensorSpec,
)

from ...whole import some
from ..problems import FLOATS, Problem, normal
from ..references import assert_close, direct_backward_data, direct_backward_filter, direct_forward
from ..workbench import spread, workbench

FUZZ = settings(max_examples=some(120), print_blob=True)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any convolution that fits: small, but with every parameter in play."""
    rank = draw(st.integers(1, 3))
    groups, channels, filters = (draw(st.integers(1, 3)) for _ in range(3))
    x: list[int] = []
    taps: list[int] = []
    conv: dict[str, list[int]] = {"pre_padding": [], "post_padding": [], "stride": [], "dilation": []}
    for _ in range(rank):
        taps.append(draw(st.integers(1, 3)))
        conv["dilation"].append(draw(st.integers(1, 3)))
        conv["stride"].append(draw(st.integers(1, 3)))
        conv["pre_padding"].append(draw(st.integers(0, 3)))
        conv["post_padding"].append(draw(st.integers(0, 3)))
        window = conv["dilation"][-1] * (taps[-1] - 1) + 1
        padding = conv["pre_padding"][-1] + conv["post_padding"][-1]
        x.append(draw(st.integers(max(1, window - padding), max(1, window - padding) + 5)))
    spec = ConvSpec(groups=groups, **{name: tuple(values) for name, values in conv.items()})
    images = draw(st.integers(1, 3))
    return Problem((images, groups * channels, *x), (groups * filters, channels, *taps), spec)


@st.composite
def specs(draw: st.DrawFn, dims: tuple[int, ...], dtype: DType) -> TensorSpec:
    """Any way to lie in memory."""
    layout = draw(st.sampled_from(Layout))
    return spread(dims, dtype) if layout is Layout.STRIDED else TensorSpec.packed(dims, dtype, layout)


@FUZZ
@given(data=st.data(), problem=problems(), dtype=st.sampled_from(FLOATS), tight=st.booleans())
def test_any_convolution_matches_a_direct_sum(
    engine: Engine, data: st.DataObject, problem: Problem, dtype: DType, tight: bool
) -> None:
    x, w, dy = (normal(dims, dtype, seed) for seed, dims in enumerate((problem.x, problem.w, problem.y)))
    wide = [array.astype("float64") for array in (x, w, dy)]
    conv = problem.conv
    with workbench(engine) as bench:
        xs, ws, ys = (data.draw(specs(array.shape, dtype)) for array in (x, w, dy))
        a, b, c = bench.place(x, xs), bench.place(w, ws), bench.place(dy, ys)
        y, dx, dw = map(bench.empty, (ys, xs, ws))
        for message, wanted in (
            (ConvFwd(x=a, w=b, y=y, conv=conv), direct_forward(wide[0], wide[1], conv)),
            (ConvBwdData(dy=c, w=b, dx=dx, conv=conv), direct_backward_data(wide[2], wide[1], conv, x.shape)),
            (
                ConvBwdFilter(x=a, dy=c, dw=dw, conv=conv),
                direct_backward_filter(wide[0], wide[2], conv, w.shape),
            ),
        ):
            try:
                got = bench.run(message, workspace_limit=2048 if tight else None)
            except OutOfMemory as refusal:
                got = bench.run(message, workspace_limit=refusal.requested)
            assert not np.isnan(got.astype("float32")).any()
            assert_close(got, wanted)
