"""Which convolutions run with channels of zeros, and on blocks of pixels."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from cudnn_actor.engines.cuda.plans import joined_kernels, kernels
from cudnn_actor.engines.cuda.plans.joined_kernels import JoinedKernel
from cudnn_actor.engines.cuda.plans.kernels import Kernel
from cudnn_actor.engines.cuda.plans.partition import cut
from cudnn_actor.engines.cuda.plans.pixel_blocks import blocked, copies
from cudnn_actor.engines.cuda.plans.recipe import Buffer, JoinedStep, KernelStep, Scratch
from cudnn_actor.engines.cuda.plans.widening import is_widened
from cudnn_actor.protocol import ConvSpec, DType, Graph, GraphBuilder, Layout, Tensor
from cudnn_actor.protocol.operations import ConvolutionForward

from . import host_cuda
from .test_partition import array_in

BFLOAT16, FLOAT16, FLOAT32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32


def operands(
    g: GraphBuilder, channels: int, dtype: DType = BFLOAT16, layout: Layout = Layout.NHWC, groups: int = 1
) -> tuple[Tensor, Tensor]:
    w = g.input("w", (18, channels // groups, 3, 3), dtype, layout=layout)
    return g.input("x", (2, channels, 8, 8), dtype, layout=layout), w


def layer(channels: int, dtype: DType = BFLOAT16, layout: Layout = Layout.NHWC, groups: int = 1) -> Graph:
    g = GraphBuilder()
    x, w = operands(g, channels, dtype, layout, groups)
    return g.build(y=g.relu(g.conv(x, w, pad=1, groups=groups, bias=g.input("b", (18,), dtype))))


def alone(size: int) -> Graph:
    g = GraphBuilder()
    x = g.input("x", (2, 3, size, size), BFLOAT16, layout=Layout.NHWC)
    return g.build(y=g.conv(x, g.input("w", (8, 3, 3, 3), BFLOAT16, layout=Layout.NHWC)))


def gradients(channels: int) -> Graph:
    g = GraphBuilder()
    x = g.input("x", (2, channels, 224, 224), BFLOAT16, layout=Layout.NHWC)
    w = g.input("w", (18, channels, 3, 3), BFLOAT16, layout=Layout.NHWC)
    dx, dw = g.grad(g.relu(g.conv(x, w, pad=1)), (x, w))
    return g.build(dx=dx, dw=dw)


def widened(graph: Graph) -> set[bool]:
    """Whether its convolutions have channels of zeros."""
    parts = cut(graph.body)
    pieces = [graph.body] if parts is None else [piece.graph for piece in parts.pieces]
    return {is_widened(piece) for piece in pieces if any("conv" in each.kind for each in piece.operations)}


FEW = {
    "images": layer(3),
    "grey": layer(1),
    "seven": layer(7, FLOAT16),
    "large and alone": alone(224),
    "gradients": gradients(3),
}
OTHERS = {
    "channels enough": layer(8),
    "a wide type": layer(3, FLOAT32),
    "channels first": layer(3, layout=Layout.NCHW),
    "groups": layer(3, groups=3),
    "small and alone": alone(32),
    "gradients": gradients(9),
}


@pytest.mark.parametrize("name", FEW)
def test_a_convolution_of_few_channels_has_channels_of_zeros(name: str) -> None:
    assert widened(FEW[name]) == {True}


@pytest.mark.parametrize("name", OTHERS)
def test_others_have_not(name: str) -> None:
    assert widened(OTHERS[name]) == {False}


def strided(
    channels: int,
    taps: tuple[int, int],
    before: tuple[int, int],
    after: tuple[int, int],
    size: tuple[int, int],
) -> Graph:
    """A convolution of stride 2, with a bias."""
    g = GraphBuilder()
    x = g.input("x", (2, channels, *size), BFLOAT16, layout=Layout.NHWC)
    w = g.input("w", (5, channels, *taps), BFLOAT16, layout=Layout.NHWC)
    conv = ConvSpec(
        pre_padding=tuple(before), post_padding=tuple(after), stride=(2, 2), dilation=(1, 1), groups=1
    )
    return g.build(y=g.relu(g.apply(ConvolutionForward(x=x, w=w, conv=conv))).astype(BFLOAT16))


BLOCKS = {
    "ResNet's": strided(3, (7, 7), (3, 3), (3, 3), (20, 24)),
    "small taps": strided(3, (3, 3), (1, 1), (1, 1), (12, 10)),
    "padding behind": strided(3, (3, 3), (0, 0), (1, 1), (12, 10)),
    "even taps": strided(4, (4, 2), (2, 0), (1, 0), (8, 14)),
    "one tap": strided(1, (1, 1), (0, 0), (0, 0), (6, 4)),
    "much padding": strided(2, (2, 5), (3, 4), (5, 0), (4, 6)),
}


def convolved(conv: ConvSpec, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """By definition."""
    around = zip(conv.pre_padding, conv.post_padding, strict=True)
    windows = sliding_window_view(np.pad(x, ((0, 0), (0, 0), *around)), w.shape[2:], axis=(2, 3))
    return np.asarray(np.einsum("nchwrs,kcrs->nkhw", windows[:, :, :: conv.stride[0], :: conv.stride[1]], w))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_convolution_on_blocks_of_pixels_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host_cuda.use(monkeypatch, kernels, joined_kernels)
    graph = BLOCKS[name].body
    found = blocked(graph)
    assert found is not None
    (operation,) = (each for each in graph.operations if isinstance(each, ConvolutionForward))
    rng, given, wide = np.random.default_rng(3), [], []
    for uid, form in ((operation.x, found.x), (operation.w, found.w)):
        tensor = graph.tensor(uid)
        values = np.array(rng.integers(-4, 5, tensor.spec.size), BFLOAT16.numpy)
        memory = np.full(form.spec.size, np.nan, BFLOAT16.numpy)
        for step in copies(found, tensor, Buffer(0), Scratch(0)):
            addresses = [
                (memory if isinstance(source, Scratch) else values).ctypes.data + source.offset
                for source in step.sources
                if isinstance(source, Scratch | Buffer)
            ]
            if isinstance(step, JoinedStep):
                JoinedKernel(step.kernels).launch(addresses, ())
            else:
                assert isinstance(step, KernelStep)
                Kernel(step.kernel).launch(addresses, ())
        given.append(array_in(values.view(np.uint8), tensor).astype(np.float64))
        wide.append(array_in(memory.view(np.uint8), form).astype(np.float64))
    wanted = convolved(operation.conv, *given)
    np.testing.assert_array_equal(convolved(found.operation.conv, *wide), wanted)
    assert wanted.shape == graph.tensor(operation.y).dims


@pytest.mark.parametrize(
    "graph",
    [
        strided(5, (3, 3), (1, 1), (1, 1), (8, 8)),
        strided(3, (3, 3), (1, 1), (1, 1), (8, 9)),
        layer(3),
        layer(3, FLOAT32),
    ],
)
def test_others_do_not_run_on_blocks(graph: Graph) -> None:
    assert blocked(graph.body) is None
