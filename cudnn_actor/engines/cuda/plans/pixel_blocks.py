"""Runs a convolution of few channels and stride 2 as one of stride 1 on blocks of 2x2 pixels.

The pixels of a block are channels then: 3 channels become 12, and 16 with zeros, the taps
are half as many along each axis, and every product counts, where with 8 channels, 5 of them
zeros, most do not. For the first layer of ResNet-50 with 32 images, cuDNN's kernel alone took
112 us so, and with 8 channels 358 and more (9.19, H200, bfloat16;
`benchmarks/results/first-layer-h200-20261123.json`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.engines.cuda.plans.frontend_graph import Refused
from cudnn_actor.engines.cuda.plans.graphs import build_candidate, candidates, check_whole
from cudnn_actor.engines.cuda.plans.kernels import Constant, Elementwise, Leaf, Result, fused
from cudnn_actor.engines.cuda.plans.plan import CudaPlan
from cudnn_actor.engines.cuda.plans.recipe import (
    Buffer,
    JoinedStep,
    KernelStep,
    Scratch,
    Source,
    Step,
    aligned,
)
from cudnn_actor.engines.cuda.plans.steps import finish, given_sources, graph_step
from cudnn_actor.engines.cuda.plans.widening import has_channels_last, lone_operands
from cudnn_actor.protocol.conv import ConvSpec
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.operations import ConvolutionForward, GraphTensor, Pointwise
from cudnn_actor.protocol.tensor import Layout, TensorSpec

__all__ = ["blocked", "compile_in_blocks", "copies", "is_in_blocks"]

_CHANNELS = 16
_PIXELS = 4
"""Of a block."""


class _Axis(NamedTuple):
    """A spatial axis. Place `p` of x is pixel `p % 2` of block `start + p // 2`; tap `t` is tap
    `(t + ahead) % 2` of block `(t + ahead) // 2`.
    """

    start: int
    ahead: int
    blocks: int
    """How many of x's own blocks are read."""
    size: int
    """How many blocks there are, those of padding included."""
    taps: int
    """How many blocks of taps there are."""


class Blocked(NamedTuple):
    """The convolution on blocks: the operation, its operands' new forms, and their axes."""

    operation: ConvolutionForward[int]
    x: GraphTensor
    w: GraphTensor
    axes: tuple[_Axis, _Axis]


def is_in_blocks(graph: OperationGraph) -> bool:
    """Whether a graph is such a convolution, perhaps with pointwise operations behind it."""
    return blocked(graph) is not None


def blocked(graph: OperationGraph) -> Blocked | None:
    """The convolution on blocks of pixels; None of another graph."""
    match [each for each in graph.operations if not isinstance(each, Pointwise)]:
        case [ConvolutionForward() as operation]:
            x, w, y = map(graph.tensor, operation.of_shape)
        case _:
            return None
    conv = operation.conv
    halves = conv.groups == 1 and conv.stride == (2, 2) and conv.dilation == (1, 1)
    few = x.dtype.is_half and 0 < x.dims[1] * _PIXELS <= _CHANNELS and 0 not in (*x.dims, *w.dims, *y.dims)
    if not halves or not few or any(size % 2 for size in x.dims[2:]):
        return None
    if not lone_operands(graph, (x, w)) or not all(map(has_channels_last, (x, w, y))):
        return None
    first, second = (
        _axis(*sizes) for sizes in zip(x.dims[2:], w.dims[2:], y.dims[2:], conv.pre_padding, strict=True)
    )
    if min(first.blocks, second.blocks) < 1:
        return None
    return Blocked(
        msgspec.structs.replace(operation, conv=ConvSpec.symmetric(2)),
        _form(x, (x.dims[0], _CHANNELS, first.size, second.size)),
        _form(w, (w.dims[0], _CHANNELS, first.taps, second.taps)),
        (first, second),
    )


def _axis(size: int, taps: int, out: int, padding: int) -> _Axis:
    ahead = padding % 2
    start, blocks_of_taps = (padding + ahead) // 2, -(-(taps + ahead) // 2)
    blocks = out + blocks_of_taps - 1
    return _Axis(start, ahead, min(size // 2, blocks - start), blocks, blocks_of_taps)


def _form(tensor: GraphTensor, dims: tuple[int, ...]) -> GraphTensor:
    spec = TensorSpec.packed(dims, tensor.dtype, Layout.NHWC)
    return msgspec.structs.replace(tensor, dims=spec.dims, strides=spec.strides, alignment=spec.alignment)


def compile_in_blocks(graph: OperationGraph, handle: Any, limit: int | None, candidate: int = 0) -> CudaPlan:
    """The graph with copies of x and of the filter whose channels are blocks of pixels: see `is_in_blocks`.

    Raises `Refused`.
    """
    found = blocked(graph)
    assert found is not None, "it has no blocks"
    forms = {found.x.uid: found.x, found.w.uid: found.w}
    wide = OperationGraph(
        tensors=tuple(forms.get(tensor.uid, tensor) for tensor in graph.tensors),
        operations=tuple(
            each if isinstance(each, Pointwise) else found.operation for each in graph.operations
        ),
        numerics=graph.numerics,
    )
    check_whole(wide)
    lowered = candidates(wide, handle, limit)
    if candidate >= lowered.get_execution_plan_count():
        raise Refused(f"cuDNN has no candidate {candidate} for it on blocks of pixels")
    build_candidate(wide, lowered, candidate)
    sources, scratch = given_sources(graph), 0
    steps: list[Step] = []
    for uid, form in forms.items():
        place = Scratch(scratch)
        scratch += aligned(form.spec.nbytes)
        steps += copies(found, graph.tensor(uid), sources[uid], place)
        sources[uid] = place
    return finish(graph, [*steps, graph_step(wide, lowered, sources)], [lowered], scratch, limit)


def copies(found: Blocked, tensor: GraphTensor, source: Source, place: Scratch) -> list[Step]:
    """The steps that write the copy of x, or of the filter: zeros first."""
    form = found.x if tensor.uid == found.x.uid else found.w
    count = form.spec.nbytes // form.dtype.itemsize
    zeros = fused([Result(Constant(0.0), form.dtype)], [], (count,), [(1,)])
    kernels, sources = list[Elementwise](), list[Source]()
    regions = _of_x(found, tensor) if form is found.x else _of_filter(found, tensor)
    for dims, to, to_at, of, of_at in regions:
        kernels.append(fused([Result(Leaf(0, form.dtype), form.dtype)], [], dims, [to, of]))
        sources += [_at(place, to_at, form), _at(source, of_at, form)]
    return [KernelStep(zeros, (place,)), JoinedStep(tuple(kernels), tuple(sources))]


_Region = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...], int]
"""Dims, and strides and the first element of the copy and of the tensor."""


def _of_x(found: Blocked, x: GraphTensor) -> Iterator[_Region]:
    """All at once, by sample, block, pixel of the block and channel."""
    n, c, h, w = x.strides
    to_n, to_c, to_h, to_w = found.x.strides
    channels, (down, across) = x.dims[1], found.axes
    dims = x.dims[0], down.blocks, 2, across.blocks, 2, channels
    to = to_n, to_h, 2 * channels * to_c, to_w, channels * to_c, to_c
    yield dims, to, down.start * to_h + across.start * to_w, (n, 2 * h, h, 2 * w, w, c), 0


def _of_filter(found: Blocked, w: GraphTensor) -> Iterator[_Region]:
    """Each pixel of the blocks apart: of some, the first block has none of the taps."""
    k, c, r, s = w.strides
    to_k, to_c, to_r, to_s = found.w.strides
    channels, (down, across) = w.dims[1], found.axes
    for row, column in itertools.product(range(2), repeat=2):
        (first, rows), (left, columns) = (
            _taps(axis.ahead, pixel, size)
            for axis, pixel, size in zip((down, across), (row, column), w.dims[2:], strict=True)
        )
        if rows > 0 and columns > 0:
            to_at = first * to_r + left * to_s + (2 * row + column) * channels * to_c
            of_at = (2 * first + row - down.ahead) * r + (2 * left + column - across.ahead) * s
            dims = w.dims[0], rows, columns, channels
            yield dims, (to_k, to_r, to_s, to_c), to_at, (k, 2 * r, 2 * s, c), of_at


def _taps(ahead: int, pixel: int, size: int) -> tuple[int, int]:
    """The first block that has a tap at this pixel, and how many blocks have."""
    first = max(0, ahead - pixel)
    return first, (size - 1 + ahead - pixel) // 2 - first + 1


def _at(source: Source, elements: int, tensor: GraphTensor) -> Source:
    assert isinstance(source, Buffer | Scratch), "an operand of a convolution is no number"
    return msgspec.structs.replace(source, offset=source.offset + elements * tensor.dtype.itemsize)
