"""Which convolutions run on rearranged copies of their operands, and that those compute the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.products import product_of
from cudnn_actor.engines.cuda.planning.rearranging import (
    Rearranged,
    as_product,
    plan_of_rearranged,
    rearrangements,
    without_strides,
)
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import Buffer, KernelStep, OperationStep, Recipe, Scratch
from cudnn_actor.protocol import DType, GraphBuilder, GraphTensor, Layout, OperationGraph, Tensor
from cudnn_actor.protocol.operations import ConvolutionForward, MatMul

from ....in_one_test import cases_in_one_test
from ....whole import some

BFLOAT16, FLOAT16, FLOAT32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32


def layer(
    x: tuple[int, ...],
    w: tuple[int, ...],
    dtype: DType = BFLOAT16,
    layouts: tuple[Layout, Layout] = (Layout.NHWC, Layout.NHWC),
    *,
    behind: bool = True,
    **options: Any,
) -> OperationGraph:
    """A convolution, perhaps with a bias, a residual and an activation behind it."""
    g = GraphBuilder()
    y: Tensor = g.conv(
        g.input("x", x, dtype, layout=layouts[0]), g.input("w", w, dtype, layout=layouts[1]), **options
    )
    if behind:
        residual = g.input("r", y.dims, dtype, layout=Layout.NHWC)
        y = g.relu(y + g.input("b", (1, w[0], *(1,) * (len(x) - 2)), dtype) + residual).astype(dtype)
    graph = g.build(y=y).body
    assert cut(graph) is None
    return graph


def memory(tensor: GraphTensor, seed: int) -> np.ndarray:
    """Small whole numbers in a tensor's memory."""
    values = np.random.default_rng(seed).integers(-3, 4, tensor.spec.nbytes // tensor.dtype.itemsize)
    return values.astype(tensor.dtype.numpy)


def seen(memory: np.ndarray, tensor: GraphTensor) -> np.ndarray:
    """A tensor's elements in memory."""
    strides = [step * memory.itemsize for step in tensor.strides]
    return np.lib.stride_tricks.as_strided(memory, tensor.dims, strides)


def results(graph: OperationGraph, memories: dict[int, np.ndarray]) -> list[np.ndarray]:
    arrays = [seen(memories[uid], graph.tensor(uid)) for uid in graph.bound]
    EvaluatedPlan("", graph).bind(np.empty(0, np.uint8)).run(arrays, ())
    return [memories[uid] for uid in graph.results]


def copied(rearranged: Rearranged, memories: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The memories of the rearranged graph: each copy, in turn, of what is there."""
    found = dict(memories)
    for copy in rearranged.copies:
        zeros = np.zeros(copy.form.spec.size, copy.form.dtype.numpy)
        before = copy.before or (0,) * len(copy.form.dims)
        inside = tuple(slice(n, n + size) for n, size in zip(before, copy.seen.dims, strict=True))
        seen(zeros, copy.form)[inside] = seen(found[copy.uid], copy.seen)
        found[copy.uid] = zeros
    return found


def check(graph: OperationGraph, rearranged: Rearranged | None, *, zeros: bool = False) -> Rearranged:
    """Both compute the same numbers. `zeros`: whether these may all be 0."""
    assert rearranged is not None
    assert rearranged.graph.bound == graph.bound
    memories = {uid: memory(graph.tensor(uid), uid) for uid in graph.bound}
    others = {uid: values.copy() for uid, values in memories.items()}
    wanted = results(graph, memories)
    assert zeros or any(part.any() for part in wanted)
    for one, other in zip(wanted, results(rearranged.graph, copied(rearranged, others)), strict=True):
        np.testing.assert_array_equal(one, other)
    return rearranged


NHWC, NCHW = Layout.NHWC, Layout.NCHW
PATCHES = {
    "vision transformer": layer((2, 3, 32, 48), (24, 3, 16, 16), stride=16),
    "filters by channels": layer((2, 3, 32, 48), (24, 3, 16, 16), layouts=(NHWC, NCHW), stride=16),
    "images by channels": layer((2, 3, 8, 8), (8, 3, 4, 4), layouts=(NCHW, NCHW), stride=4),
    "a border is left": layer((2, 3, 11, 14), (8, 3, 4, 4), stride=4),
    "rows that are no vectors": layer((2, 3, 28, 28), (8, 3, 14, 14), stride=14),
    "one window": layer((2, 3, 4, 4), (8, 3, 4, 4), stride=4),
    "downsampling": layer((2, 16, 8, 8), (32, 16, 2, 2), FLOAT16, stride=2),
    "uneven": layer((2, 3, 8, 12), (8, 3, 2, 4), stride=(2, 4)),
    "a line": layer((2, 3, 32), (8, 3, 8), stride=8),
    "a volume": layer((2, 3, 4, 8, 8), (8, 3, 2, 4, 4), stride=(2, 4, 4)),
    "alone": layer((2, 3, 32, 48), (24, 3, 16, 16), stride=16, behind=False),
}
PIXELS = {
    "one pixel": layer((2, 16, 6, 5), (8, 16, 1, 1)),
    "one pixel by channels": layer((2, 16, 6, 5), (8, 16, 1, 1), layouts=(NCHW, NCHW)),
    "one pixel of few channels": layer((2, 3, 6, 5), (8, 3, 1, 1)),
    "one pixel of an image of one": layer((2, 16, 1, 1), (8, 16, 1, 1)),
    "one pixel of a line": layer((2, 16, 7), (8, 16, 1)),
    "every other pixel": layer((2, 16, 8, 7), (8, 16, 1, 1), stride=2),
    "windows apart": layer((2, 3, 13, 15), (8, 3, 2, 3), stride=(4, 3)),
}


@cases_in_one_test
@pytest.mark.parametrize("name", PATCHES | PIXELS)
def test_windows_side_by_side_are_a_product(name: str) -> None:
    graph = (PATCHES | PIXELS)[name]
    found = check(graph, as_product(graph))
    (product,) = [each for each in found.graph.operations if isinstance(each, MatMul)]
    assert found.graph.tensor(product.a).dims[-1] % 8 == 0


def test_packed_filters_and_single_pixels_need_no_copy() -> None:
    wanted = {
        "vision transformer": 1,
        "filters by channels": 1,
        "rows that are no vectors": 2,
        "one pixel": 0,
        "one pixel by channels": 0,
        "one pixel of few channels": 2,
    }
    for name, copies in wanted.items():
        found = as_product((PATCHES | PIXELS)[name])
        assert found is not None
        assert len(found.copies) == copies, name


STRIDED = {
    "resnet": layer((2, 3, 32, 32), (16, 3, 7, 7), stride=2, pad=3),
    "mobilenet": layer((2, 3, 32, 24), (16, 3, 3, 3), FLOAT16, stride=2, pad=1),
    "alexnet": layer((2, 3, 32, 32), (16, 3, 11, 11), stride=4, pad=2),
    "by channels": layer((2, 3, 32, 32), (16, 3, 7, 7), layouts=(NCHW, NCHW), stride=2, pad=3),
    "grey": layer((2, 1, 32, 32), (16, 1, 5, 5), stride=2, pad=2),
    "no padding": layer((2, 3, 33 + 3, 36), (16, 3, 6, 6), stride=2),
    "one axis": layer((2, 3, 16, 17), (16, 3, 3, 3), stride=(2, 1), pad=1),
    "a line": layer((2, 3, 32), (16, 3, 7), stride=2, pad=3),
    "a volume": layer((1, 3, 4, 8, 8), (8, 3, 3, 7, 7), stride=(1, 2, 2), pad=(1, 3, 3)),
    "alone": layer((2, 3, 32, 32), (16, 3, 7, 7), stride=2, pad=3, behind=False),
}


@cases_in_one_test
@pytest.mark.parametrize("name", [*STRIDED, *(n for n in PATCHES if n != "a border is left")])
def test_blocks_as_pixels_need_no_strides(name: str) -> None:
    graph = (STRIDED | PATCHES)[name]
    found = check(graph, without_strides(graph))
    (convolution,) = [each for each in found.graph.operations if isinstance(each, ConvolutionForward)]
    assert set(convolution.conv.stride) == {1}
    x, w, y = (found.graph.tensor(uid).dims for uid in convolution.of_shape)
    assert convolution.conv.output_dims(x, w) == y
    assert found.graph.tensor(convolution.x).dims[1] % 8 == 0


def test_the_first_layer_of_resnet_has_4x4_filters_of_16_channels() -> None:
    found = without_strides(STRIDED["resnet"])
    assert found is not None
    assert found.graph.tensor(1).dims == (16, 16, 4, 4)


OTHERS = {
    "channels enough": layer((2, 64, 32, 32), (64, 64, 3, 3), stride=2, pad=1),
    "no strides": layer((2, 3, 32, 32), (16, 3, 3, 3), pad=1),
    "a wide type": layer((2, 3, 32, 32), (16, 3, 4, 4), FLOAT32, stride=4),
    "groups": layer((2, 3, 32, 32), (3, 1, 4, 4), stride=4, groups=3),
    "dilation": layer((2, 3, 32, 32), (16, 3, 2, 2), stride=2, dilation=2),
    "small and alone": layer((2, 3, 32, 32), (16, 3, 4, 4), stride=4, behind=False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_not_rearranged(name: str) -> None:
    assert [*rearrangements(OTHERS[name])] == []


PRODUCTS = {
    "more channels": layer((1, 128, 28, 28), (512, 128, 1, 1)),
    "as many channels": layer((1, 64, 56, 56), (64, 64, 1, 1), FLOAT16),
    "several images": layer((4, 512, 7, 7), (2048, 512, 1, 1)),
    "images by channels": layer((2, 128, 28, 28), (512, 128, 1, 1), layouts=(NCHW, NCHW)),
    "more channels of many images": layer((16, 64, 28, 28), (128, 64, 1, 1)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_single_pixels_are_a_product_of_cublaslt_without_a_copy(name: str) -> None:
    (found,) = rearrangements(PRODUCTS[name])
    assert not found.copies
    assert product_of(found.graph) is not None
    check(PRODUCTS[name], found)


NO_PRODUCTS = {
    "fewer channels": layer((1, 512, 28, 28), (128, 512, 1, 1)),
    "fewer channels of many images": layer((32, 512, 28, 28), (128, 512, 1, 1)),
    "as many channels of many images": layer((32, 64, 56, 56), (64, 64, 1, 1)),
    "strides": layer((1, 128, 28, 28), (512, 128, 1, 1), stride=2),
    "channels that are no vectors": layer((1, 12, 28, 28), (24, 12, 1, 1)),
    "filters that are no vectors": layer((1, 16, 28, 28), (20, 16, 1, 1)),
    "alone": layer((1, 128, 28, 28), (512, 128, 1, 1), behind=False),
}


@pytest.mark.parametrize("name", NO_PRODUCTS)
def test_other_single_pixels_are_left_to_cudnn(name: str) -> None:
    assert [*rearrangements(NO_PRODUCTS[name])] == []


def test_single_pixels_with_a_function_behind_that_cublaslt_lacks_are_left_to_cudnn() -> None:
    g = GraphBuilder()
    x = g.input("x", (1, 32, 14, 14), BFLOAT16, layout=NHWC)
    y = g.conv(x, g.input("w", (192, 32, 1, 1), BFLOAT16, layout=NHWC))
    graph = g.build(y=g.sigmoid(y).astype(BFLOAT16)).body
    assert [*rearrangements(graph)] == []


def shortcut(images: int) -> OperationGraph:
    """A convolution of single pixels with a bias of bfloat16 and a float32 result: ResNet's shortcut."""
    g = GraphBuilder()
    x = g.input("x", (images, 128, 28, 28), BFLOAT16, layout=NHWC)
    y = g.conv(x, g.input("w", (512, 128, 1, 1), BFLOAT16, layout=NHWC))
    return g.build(y=(y + g.input("b", (1, 512, 1, 1), BFLOAT16)).astype(FLOAT32)).body


def test_single_pixels_with_a_float32_result_are_a_product_if_there_are_many() -> None:
    assert [*rearrangements(shortcut(1))] == []
    (found,) = rearrangements(shortcut(8))
    assert not found.copies
    product = product_of(found.graph)
    assert product is not None
    assert product.bias is not None


def test_what_few_channels_and_long_strides_are_tried_as() -> None:
    def tried(graph: OperationGraph, *, every: bool = False) -> list[str]:
        return [each.what for each in rearrangements(graph, every=every)]

    assert tried(PATCHES["vision transformer"]) == ["as a product", "without strides"]
    assert tried(STRIDED["resnet"]) == ["without strides"]
    assert tried(layer((2, 8, 32, 32), (64, 8, 16, 16), stride=16)) == ["as a product"]
    assert tried(PATCHES["downsampling"]) == []
    assert tried(PATCHES["downsampling"], every=True) == ["as a product", "without strides"]


def test_a_plan_makes_the_copies_before_it_runs_the_rearranged_graph() -> None:
    """What is scratch memory of the rearranged graph's plan lies behind the copies."""
    graph = STRIDED["resnet"]
    found = without_strides(graph)
    assert found is not None
    step = OperationStep(found.graph.operations[0], (), (Buffer(0), Buffer(1), Scratch(0, 512)), "kernel")
    inner = CudaPlan(Recipe("", (step,), 512, len(found.graph.bound), 0), ())
    plan = plan_of_rearranged(graph, found, inner, None)
    *copies, last = plan.recipe.steps
    assert [type(each) for each in copies] == [OperationStep, OperationStep, KernelStep]
    places = [each.sources for each in copies]
    written = [places[0][1], places[1][1], places[2][0]]
    assert [each[0] for each in places[:2]] == [Buffer(0), Buffer(1)]
    assert places[2][1] == written[1]
    copied = sum(-(-copy.form.spec.nbytes // 256) * 256 for copy in found.copies)
    assert last.sources == (written[0], written[2], Scratch(copied, 512))
    assert plan.recipe.scratch == copied + 512


@given(st.data())
@settings(max_examples=some(60), deadline=None)
def test_any_convolution_that_can_be_rearranged_computes_the_same(data: st.DataObject) -> None:
    def number(most: int, least: int = 1) -> int:
        return data.draw(st.integers(least, most))

    channels, filters, layout = number(9), number(9), data.draw(st.sampled_from([NHWC, NCHW]))
    stride, taps = (number(4), number(4)), (number(5), number(5))
    if data.draw(st.booleans()):
        taps = stride
    pads = tuple((number(3, 0), number(3, 0)) for _ in taps)
    x = (number(3), channels, *(number(9) + tap for tap in taps))
    w = (filters, channels, *taps)
    graph = layer(x, w, layouts=(layout, NHWC), stride=stride, pad=pads)
    for rearranged in rearrangements(graph, every=True):
        check(graph, rearranged, zeros=True)
