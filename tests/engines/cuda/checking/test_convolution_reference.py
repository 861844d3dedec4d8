"""What results of convolutions are compared with. The kernel that computes it runs on the host here."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import pytest

from cudnn_actor.engines.cuda.checking import convolution_reference
from cudnn_actor.engines.cuda.checking.convolution_reference import Reference
from cudnn_actor.engines.cuda.checking.evaluated_reference import OnHost, evaluate_graph
from cudnn_actor.protocol import (
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvSpec,
    GraphBuilder,
    GraphTensor,
    Layout,
    OperationGraph,
)

from ....in_one_test import cases_in_one_test
from ... import host_cuda


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host_cuda.stand_in(monkeypatch)


class Problem(NamedTuple):
    """A convolution's x and w, and how the filter moves."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    pre: tuple[int, ...]
    post: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def conv(self) -> ConvSpec:
        return ConvSpec(
            pre_padding=self.pre,
            post_padding=self.post,
            stride=self.stride,
            dilation=self.dilation,
            groups=self.groups,
        )


PROBLEMS = {
    "one tap": Problem((2, 70, 3, 5), (3, 70, 1, 1), (0, 0), (0, 0), (1, 1), (1, 1)),
    "as many channels as lanes": Problem((1, 32, 4, 3), (2, 32, 3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
    "few channels": Problem((2, 3, 9, 11), (4, 3, 7, 5), (3, 2), (2, 1), (2, 1), (1, 1)),
    "groups": Problem((2, 12, 5, 6), (8, 3, 3, 2), (1, 0), (0, 1), (1, 2), (2, 1), 4),
    "depthwise": Problem((2, 4, 6, 5), (8, 1, 3, 3), (2, 1), (1, 1), (1, 1), (2, 1), 4),
    "one dim": Problem((2, 5, 40), (3, 5, 9), (4,), (3,), (3,), (2,)),
    "three dims": Problem((1, 3, 4, 5, 6), (2, 3, 2, 3, 1), (1, 0, 2), (0, 1, 0), (1, 2, 1), (2, 1, 1)),
}
KINDS = ("forward", "data", "filter")


def graph_of(problem: Problem, kind: str, layout: Layout) -> OperationGraph:
    """The convolution with something behind it, in float32: results of whole numbers are exact."""
    g = GraphBuilder()
    x, w = g.input("x", problem.x, layout=layout), g.input("w", problem.w, layout=layout)
    taps = zip(
        problem.x[2:], problem.w[2:], problem.pre, problem.post, problem.stride, problem.dilation, strict=True
    )
    pixels = ((n + a + b - (of - 1) * by - 1) // step + 1 for n, of, a, b, step, by in taps)
    dims = problem.x[0], problem.w[0], *pixels
    if kind == "forward":
        y = g.conv(
            x,
            w,
            pad=[*zip(problem.pre, problem.post, strict=True)],
            stride=problem.stride,
            dilation=problem.dilation,
            groups=problem.groups,
        )
        assert y.dims == dims
    elif kind == "data":
        dy = g.input("dy", dims, layout=layout)
        y = g.apply(ConvolutionBackwardData(dy=dy, w=w, conv=problem.conv), like={"dx": x})
    else:
        dy = g.input("dy", dims, layout=layout)
        y = g.apply(ConvolutionBackwardFilter(x=x, dy=dy, conv=problem.conv), like={"dw": w})
    return g.build(result=y * 2.0 + g.input("added", (1, 1, *(1,) * (len(dims) - 3), y.dims[-1]))).body


def seen(tensor: GraphTensor, memory: np.ndarray) -> np.ndarray:
    """A tensor's elements in its memory."""
    steps = [stride * memory.itemsize for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(memory, tensor.dims, steps)


class Data:
    """Random whole numbers in all of a graph's tensors, and the result that the definitions give for them."""

    def __init__(self, graph: OperationGraph) -> None:
        rng = np.random.default_rng(3)
        self._graph = graph
        self._memory = {
            uid: rng.integers(-3, 5, graph.tensor(uid).spec.nbytes // 4).astype(np.float32)
            for uid in graph.bound
        }
        (self.uid,) = graph.results
        self.result = self._seen(self.uid).ravel()
        self.wanted = evaluate_graph(graph, OnHost, lambda uid: self._seen(uid).astype(np.float64), ())[
            self.uid
        ].ravel()

    def address(self, uid: int) -> int:
        return self._memory[uid].ctypes.data

    def _seen(self, uid: int) -> np.ndarray:
        return seen(self._graph.tensor(uid), self._memory[uid])


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_each_element_is_that_of_the_definition(name: str, kind: str, layout: Layout) -> None:
    graph = graph_of(PROBLEMS[name], kind, layout)
    data = Data(graph)
    wanted, got, uncertainty = Reference(graph, data.uid).compute(data.address, ())
    assert wanted.tolist() == data.wanted.tolist()
    assert got.tolist() == data.result.tolist()
    assert np.all(uncertainty <= 1e-4 * (1 + np.abs(wanted)))


def test_other_sizes_share_a_source_and_other_numbers_and_dtypes_do_not() -> None:
    """Sources are kept: what compares equal must not find another's."""

    def source(number: float, samples: int = 2, dtype: Literal["float32", "bfloat16"] = "float32") -> str:
        g = GraphBuilder()
        x, w = g.input("x", (samples, 4, 5, 5), dtype), g.input("w", (3, 4, 3, 3), dtype)
        graph = g.build(y=g.conv(x, w) * number).body
        return Reference(graph, *graph.results).source

    one = source(1.0)
    assert one == source(1.0, samples=7)
    others = [source(number) for number in (0.0, -0.0, 2.0)] + [source(1.0, dtype="bfloat16")]
    assert len({one, *others}) == 1 + len(others)
    assert others[:3] == [source(number) for number in (0.0, -0.0, 2.0)]


@pytest.mark.parametrize("kind", KINDS)
def test_so_it_is_at_a_sample_of_the_elements(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_reference, "_MOST_SAMPLES", 70)
    graph = graph_of(PROBLEMS["few channels"], kind, Layout.NHWC)
    data = Data(graph)
    total = data.wanted.size
    assert total > 70
    places = [sample * 11400714819323198485 % (1 << 64) % total for sample in range(70)]
    places[:2] = 0, total - 1
    wanted, got, _ = Reference(graph, data.uid).compute(data.address, ())
    assert wanted.tolist() == data.wanted[places].tolist()
    assert got.tolist() == data.result[places].tolist()


@pytest.mark.parametrize(("kind", "products"), [("forward", 3 * 35), ("data", 4 * 35), ("filter", 2 * 40)])
def test_longer_sums_have_fewer_samples(kind: str, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reference(graph := graph_of(PROBLEMS["few channels"], kind, Layout.NHWC), graph.results[0])
    assert reference.length == products
    monkeypatch.setattr(convolution_reference, "_LEAST_SAMPLES", 1)
    monkeypatch.setattr(convolution_reference, "_MOST_PRODUCTS", 7 * products)
    assert Reference(graph, graph.results[0]).samples == 7
