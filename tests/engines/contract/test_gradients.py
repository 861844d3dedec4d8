from __future__ import annotations

import numpy as np
import pytest

from cudnn_actor.protocol import (
    BufferRef,
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    ConvSpec,
    DType,
    Layout,
    TensorSpec,
)

from ...in_one_test import cases_in_one_test
from ..problems import FLOATS, PROBLEMS, Problem, normal
from ..references import assert_close, direct_backward_data, direct_backward_filter, scipy_forward
from ..remembered import remembered
from ..workbench import Workbench


class Gradients:
    """A problem with random x, w and dy on a workbench."""

    def __init__(
        self, bench: Workbench, problem: Problem, dtype: DType, layout: Layout = Layout.NCHW
    ) -> None:
        self.bench, self.problem, self.dtype, self.layout = bench, problem, dtype, layout
        self.x, self.w, self.dy = (
            normal(dims, dtype, seed) for seed, dims in enumerate((problem.x, problem.w, problem.y))
        )

    def place(self, array: np.ndarray) -> BufferRef:
        return self.bench.place(array, TensorSpec.packed(array.shape, self.dtype, self.layout))

    def empty(self, dims: tuple[int, ...]) -> BufferRef:
        return self.bench.empty(TensorSpec.packed(dims, self.dtype, self.layout))

    def forward(self) -> np.ndarray:
        y = self.empty(self.problem.y)
        x, w = self.place(self.x), self.place(self.w)
        return self.bench.run(ConvFwd(x=x, w=w, y=y, conv=self.problem.conv))

    def backward_data(self) -> np.ndarray:
        dy, w, dx = self.place(self.dy), self.place(self.w), self.empty(self.problem.x)
        return self.bench.run(ConvBwdData(dy=dy, w=w, dx=dx, conv=self.problem.conv))

    def backward_filter(self) -> np.ndarray:
        x, dy, dw = self.place(self.x), self.place(self.dy), self.empty(self.problem.w)
        return self.bench.run(ConvBwdFilter(x=x, dy=dy, dw=dw, conv=self.problem.conv))


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
def test_the_gradients_are_adjoint_to_the_convolution(bench: Workbench, name: str, layout: Layout) -> None:
    """<conv(x, w), dy> = <x, bwd_data(dy, w)> = <w, bwd_filter(x, dy)>."""
    g = Gradients(bench, PROBLEMS[name], DType.FLOAT64, layout)
    product = np.vdot(g.forward(), g.dy)
    scale = np.linalg.norm(g.forward()) * np.linalg.norm(g.dy)
    assert abs(np.vdot(g.x, g.backward_data()) - product) <= 1e-13 * scale
    assert abs(np.vdot(g.w, g.backward_filter()) - product) <= 1e-13 * scale


@remembered
def central_differences(x: np.ndarray, w: np.ndarray, dy: np.ndarray, conv: ConvSpec, by: str) -> np.ndarray:
    """How <conv(x, w), dy> changes with each element of x or w; exact but for rounding, as it is linear."""
    x, w = x.copy(), w.copy()
    of = x if by == "x" else w
    slopes = np.empty_like(of)
    for index in np.ndindex(of.shape):
        kept, ends = of[index], []
        for step in (0.5, -0.5):
            of[index] = kept + step
            ends.append(np.vdot(scipy_forward(x, w, conv), dy))
        of[index] = kept
        slopes[index] = ends[0] - ends[1]
    return slopes


SMALL = ["one_of_everything", "mostly_padding", "pointwise_strided", "one_output"]


@cases_in_one_test
@pytest.mark.parametrize("name", SMALL)
def test_backward_data_matches_central_differences(bench: Workbench, name: str) -> None:
    g = Gradients(bench, PROBLEMS[name], DType.FLOAT64)
    assert_close(g.backward_data(), central_differences(g.x, g.w, g.dy, g.problem.conv, "x"))


@pytest.mark.parametrize("name", ["one_of_everything", "mostly_padding", "pointwise_strided"])
def test_backward_filter_matches_central_differences(bench: Workbench, name: str) -> None:
    g = Gradients(bench, PROBLEMS[name], DType.FLOAT64)
    assert_close(g.backward_filter(), central_differences(g.x, g.w, g.dy, g.problem.conv, "w"))


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["one_dimensional", "strided", "three_dimensional", "depthwise"])
def test_both_gradients_match_a_direct_sum_in_every_dtype(bench: Workbench, name: str, dtype: DType) -> None:
    g = Gradients(bench, PROBLEMS[name], dtype, Layout.NHWC)
    x, w, dy = (array.astype("float64") for array in (g.x, g.w, g.dy))
    assert_close(g.backward_data(), direct_backward_data(dy, w, g.problem.conv, g.problem.x))
    assert_close(g.backward_filter(), direct_backward_filter(x, dy, g.problem.conv, g.problem.w))


def test_inputs_that_no_output_sees_have_a_gradient_of_0(bench: Workbench) -> None:
    g = Gradients(bench, PROBLEMS["strided_past_the_filter"], DType.FLOAT32)
    dx = g.backward_data()
    assert not dx[:, :, 2:4].any()
    assert not dx[:, :, :, 10:].any()
    assert dx[:, :, :2, :2].all()


@cases_in_one_test
@pytest.mark.parametrize("dtype", FLOATS)
def test_backward_data_takes_alpha_and_beta(bench: Workbench, dtype: DType) -> None:
    g = Gradients(bench, PROBLEMS["grouped"], dtype)
    message = ConvBwdData(
        dy=g.place(g.dy), w=g.place(g.w), dx=g.place(g.x), conv=g.problem.conv, alpha=-1.5, beta=0.5
    )
    x, w, dy = (array.astype("float64") for array in (g.x, g.w, g.dy))
    wanted = -1.5 * direct_backward_data(dy, w, g.problem.conv, g.problem.x) + 0.5 * x
    assert_close(bench.run(message), wanted)


@cases_in_one_test
@pytest.mark.parametrize("dtype", FLOATS)
def test_backward_filter_takes_alpha_and_beta(bench: Workbench, dtype: DType) -> None:
    g = Gradients(bench, PROBLEMS["grouped"], dtype)
    message = ConvBwdFilter(
        x=g.place(g.x), dy=g.place(g.dy), dw=g.place(g.w), conv=g.problem.conv, alpha=-1.5, beta=0.5
    )
    x, w, dy = (array.astype("float64") for array in (g.x, g.w, g.dy))
    wanted = -1.5 * direct_backward_filter(x, dy, g.problem.conv, g.problem.w) + 0.5 * w
    assert_close(bench.run(message), wanted)
