"""Runs a convolution on rearranged copies of its operands: as a product, or as a convolution without strides.

If the filter is no larger than the stride and nothing is padded, no two windows share an
element. Then a copy of the windows, one after the other, is a matrix, and the
convolution is its product with the filters: the first layer of a vision transformer,
16x16, or of ConvNeXt, 4x4. cuDNN's engines for such strides took long, and those for
few channels were wrong (9.19, H100, stride 16).

1x1 convolutions need no copy. With more output channels than input channels they take less
time as a product by cuBLASLt. Microseconds in ResNet-50, by cuDNN and by cuBLASLt (H200, tuned
in the whole):

====================================  ==========================  ==========================
the four sizes of them                by cuDNN                    by cuBLASLt
====================================  ==========================  ==========================
one image                             4.8, 4.5, 4.6, 6.4          4.2, 3.5, 3.7, 4.2
32 images                             87.3, 38.5, 22.7, 15.0      33.3, 20.6, 11.8, 9.9
32 images, with a float32 result      59.2, 37.4, 21.9, 15.7      37.9, 20.0, 13.7, 12.5
====================================  ==========================  ==========================

With a float32 result for one image, and mostly with fewer output channels, cuDNN took less.

For other filters, a copy of x has each block of pixels, as large as the stride, as one pixel
with the channels of all of them ("space to depth"). On this copy the convolution has no
strides, a filter of a few blocks, and enough channels for fast engines: ResNet's first one,
7x7 with a stride of 2 and 3 channels, becomes 4x4 with 16 channels. That is two thirds of
the work that it takes with 8 channels (see `widening`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels.axes import merge_axes
from cudnn_actor.engines.cuda.planning.copy_kernels import copy_kernel
from cudnn_actor.engines.cuda.planning.products import product_of
from cudnn_actor.engines.cuda.planning.steps import bound_sources, finish, place_part
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import KernelStep, OperationStep, Scratch, Source, Step, align
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.remembering import remember
from cudnn_actor.protocol.operations import (
    ConvolutionForward,
    GraphTensor,
    MatMul,
    Node,
    Pad,
    Pointwise,
    TensorRole,
)
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec, packed_strides

__all__ = [
    "Copy",
    "Rearranged",
    "as_product",
    "plan_of_rearranged",
    "product_in_one_step",
    "rearrangements",
    "without_strides",
]

_MOST_KNOWN = 256
"""The most convolutions whose products are remembered: a build asks for each several times."""
_VECTOR = 8
"""Channels, or elements of a row, of a half type that fast kernels read at once: 16 bytes."""
_LONGEST_STRIDE = 8
"""The longest stride that the tensor memory accelerator takes."""
_LEAST_BYTES = 1 << 20
"""The fewest bytes of x for a convolution with nothing behind it: copies take launches."""
_MOST_RESULTS = 1 << 20
"""The most elements of the result of a 1x1 convolution with as many filters as channels that is a product."""
_LEAST_FLOAT32 = 3 << 20
"""The fewest elements of a float32 result of a 1x1 convolution that is a product."""


class Copy(NamedTuple):
    """A copy of an operand before the graph runs.

    Parameters
    ----------
    uid
        The operand's uid.
    seen
        The elements to copy, as a tensor with the copy's axes: in the operand's memory, or in that of the
        copy of it before.
    form
        The copy. If it has more elements than `seen`, the others are zeros.
    before
        The number of zeros before the copied elements, along each axis.
    """

    uid: int
    seen: GraphTensor
    form: GraphTensor
    before: tuple[int, ...] = ()


class Rearranged(NamedTuple):
    """A graph that computes the same as another one, on copies of some operands. Both have the same uids."""

    what: str
    graph: OperationGraph
    copies: tuple[Copy, ...]


def rearrangements(graph: OperationGraph, *, every: bool = False) -> Iterator[Rearranged]:
    """Yields the ways to run a graph on rearranged copies that are expected to be faster, or every way.

    That is expected for few channels, for strides that cuDNN's fast engines do not take, and for products of
    single pixels with more output channels than input channels.
    """
    found = _convolution(graph)
    if found is None:
        return
    operation, x = found
    few = x.dims[1] < _VECTOR
    large = len(graph.operations) > 1 or x.spec.nbytes >= _LEAST_BYTES
    longest = max(operation.conv.stride)
    windows = large and ((few and longest > 1) or longest > _LONGEST_STRIDE)
    product = as_product(graph)
    if product is not None and (every or windows or _is_fast_product(graph, operation, product)):
        yield product
    if every or (large and few):
        deep = without_strides(graph)
        if deep is not None:
            yield deep


def plan_of_rearranged(
    graph: OperationGraph, rearranged: Rearranged, plan: CudaPlan, limit: int | None
) -> CudaPlan:
    """The plan of a graph that makes the copies, and then runs a plan of the rearranged graph.

    Raises `Refused` if it needs more workspace than the limit.
    """
    sources, scratch = bound_sources(graph), 0
    steps: list[Step] = []
    for copy in rearranged.copies:
        place = Scratch(scratch, copy.form.spec.nbytes)
        scratch += align(copy.form.spec.nbytes)
        both = (place, sources[copy.uid])
        if copy.seen.dims == copy.form.dims:
            steps.append(KernelStep(copy_kernel(copy.seen, copy.form), both))
        else:
            steps.append(_padding_step(copy, both[::-1]))
        sources[copy.uid] = place
    steps += place_part(graph, rearranged.graph, plan, sources, scratch)
    return finish(graph, steps, plan.graphs, scratch + plan.recipe.scratch, limit)


def _padding_step(copy: Copy, sources: tuple[Source, ...]) -> OperationStep:
    """The step that makes a copy with zeros around what it copies."""
    before = copy.before or (0,) * len(copy.form.dims)
    sizes = zip(copy.form.dims, copy.seen.dims, before, strict=True)
    after = tuple(whole - part - start for whole, part, start in sizes)
    pad = Pad(x=0, y=1, before=before, after=after, steps=(1,) * len(before))
    return OperationStep(operation=pad, tensors=(copy.seen, copy.form), sources=sources, launcher="kernel")


def _convolution(graph: OperationGraph) -> tuple[ConvolutionForward[int], GraphTensor] | None:
    """The convolution of a graph of one, with pointwise operations behind it, and its x; None for others.

    Its operands are of a half type and are read by nothing else.
    """
    match [each for each in graph.operations if not isinstance(each, Pointwise)]:
        case [ConvolutionForward() as operation] if operation.conv.groups == 1:
            x, w, y = map(graph.tensor, operation.of_shape)
        case _:
            return None
    touched = [uid for each in graph.operations for uid in (*each.reads, *each.writes)]
    overwritten = {tensor.overwrites for tensor in graph.tensors}
    alone = all(
        tensor.role is TensorRole.BOUND and touched.count(tensor.uid) == 1 and tensor.uid not in overwritten
        for tensor in (x, w)
    )
    fits = x.dtype.is_half and y.dtype in (x.dtype, DType.FLOAT32) and 0 not in (*x.dims, *y.dims)
    return (operation, x) if alone and fits and max(operation.conv.dilation) == 1 else None


# As a product.


def as_product(graph: OperationGraph) -> Rearranged | None:
    """The convolution as a product of its windows and its filters: (N, P Q, C R S) and (C R S, K).

    The elements of a row are ordered as those of a filter lie in memory, so that filters need no copy.
    Windows of one pixel may need none, either. None if windows share elements, or if the pixels of a result
    do not lie as the rows of a matrix.
    """
    return None if _convolution(graph) is None else _as_product(graph)


@remember(_MOST_KNOWN)
def _as_product(graph: OperationGraph) -> Rearranged | None:
    """The product of a graph's one convolution: see `as_product`."""
    found = _convolution(graph)
    assert found is not None
    operation, x = found
    conv, w, y = operation.conv, graph.tensor(operation.w), graph.tensor(operation.y)
    if any(map(int.__lt__, conv.stride, w.dims[2:])) or any((*conv.pre_padding, *conv.post_padding)):
        return None
    order = sorted(range(1, len(w.dims)), key=lambda axis: -w.strides[axis])
    channels = _channels(w.dims[1], math.prod(conv.stride))
    sizes = tuple(channels if axis == 1 else w.dims[axis] for axis in order)
    filters = _with_dims(w, _of(w.dims, order), _of(w.strides, order))
    first, *within = _of(x.strides, order)
    outside = (step * by for step, by in zip(x.strides[2:], conv.stride, strict=True))
    windows = _with_dims(x, (x.dims[0], *y.dims[2:], *filters.dims[1:]), (first, *outside, *within))
    (a, of_x), (b, of_w) = (_rows(seen, sizes) for seen in (windows, filters))
    try:
        folded = {
            tensor.uid: _as_rows_of_pixels(tensor, y.dims) for tensor in graph.tensors if tensor not in (x, w)
        }
    except Refused:
        return None
    folded |= {x.uid: a, w.uid: _with_dims(b, b.dims[::-1], b.strides[::-1])}
    product = MatMul(a=x.uid, b=w.uid, y=y.uid)
    return Rearranged("as a product", _with_operation(graph, folded, operation, product), (*of_x, *of_w))


def _is_fast_product(graph: OperationGraph, operation: ConvolutionForward[int], product: Rearranged) -> bool:
    """Whether a 1x1 convolution is one that takes less time as a product.

    It does with more filters than channels, or with as many if it is small; with a float32 result, only if it
    is large. cuBLASLt must have epilogues for all operations behind it, and no operand may need a copy,
    except the bias.
    """
    filters, channels, *_ = graph.tensor(operation.w).dims
    if len(graph.operations) == 1 or filters % _VECTOR or filters < channels or not _is_one_step(product):
        return False
    (y,) = (graph.tensor(uid) for uid in graph.results)
    size = math.prod(y.dims)
    if not y.dtype.is_half:
        return filters > channels and size >= _LEAST_FLOAT32
    return filters > channels or size <= _MOST_RESULTS


def product_in_one_step(graph: OperationGraph) -> Rearranged | None:
    """A convolution as a product that is one step of cuBLASLt's; None if that is not possible."""
    product = as_product(graph)
    return product if product is not None and _is_one_step(product) else None


def _is_one_step(product: Rearranged) -> bool:
    """Whether cuBLASLt computes all of a product's graph, and no operand but the bias is copied."""
    return not product.copies and product_of(product.graph) is not None


def _rows(tensor: GraphTensor, sizes: tuple[int, ...]) -> tuple[GraphTensor, tuple[Copy, ...]]:
    """A tensor as rows of its last axes, padded to these sizes, and the copy that this takes, if any."""
    if tensor.dims[-len(sizes) :] == sizes:
        with contextlib.suppress(Refused):
            seen = _as_rows(tensor, len(sizes))
            if 1 in seen.strides[-2:]:
                return seen, ()
    form = _packed_like(tensor, (*tensor.dims[: -len(sizes)], *sizes))
    return _as_rows(form, len(sizes)), (Copy(tensor.uid, tensor, form),)


def _as_rows(tensor: GraphTensor, columns: int) -> GraphTensor:
    """A tensor with its last axes as one axis, and the axes between them and the first as another one.

    Raises `Refused` if that is not possible in the same memory.
    """
    first, *between = _axes(tensor)[:-columns]
    axes = [first, *([_one(between)] if between else []), _one(_axes(tensor)[-columns:])]
    return _with_dims(tensor, tuple(size for size, _ in axes), tuple(step for _, step in axes))


def _one(axes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The size and the stride of axes as one. Raises `Refused` if that is not possible."""
    merged = merge_axes((size, (step,)) for size, step in axes)
    if len(merged) > 1:
        raise Refused("axes do not lie as one")
    size, (step,) = merged[0] if merged else (1, (1,))
    return size, step


def _as_rows_of_pixels(tensor: GraphTensor, dims: tuple[int, ...]) -> GraphTensor:
    """A tensor of the dims (N, K, P, Q), or broadcast to them, as one of (N, P Q, K). Raises `Refused`."""
    if len(tensor.dims) != len(dims):
        raise Refused("what follows a convolution has another number of dims")
    size = math.prod(tensor.dims[2:])
    wanted = (tensor.dims[0], size, tensor.dims[1])
    if tensor.role is not TensorRole.BOUND:
        return _with_dims(tensor, wanted, packed_strides(wanted))
    if size not in (1, math.prod(dims[2:])):
        raise Refused("what follows a convolution is broadcast to a part of the pixels")
    _, step = _one(_axes(tensor)[2:])
    return _with_dims(
        tensor, wanted, (tensor.strides[0], step if size > 1 else tensor.dims[1], tensor.strides[1])
    )


# Without strides.


def without_strides(graph: OperationGraph) -> Rearranged | None:
    """The convolution on a copy of x in which each block of pixels, as large as the stride, is one pixel.

    Zeros before the filter round the padding before x up to whole blocks. None if x has no whole blocks.
    """
    found = _convolution(graph)
    if found is None or max(found[0].conv.stride) == 1:
        return None
    operation, x = found
    conv, w, y = operation.conv, graph.tensor(operation.w), graph.tensor(operation.y)
    stride, taps, blocks = conv.stride, w.dims[2:], tuple(map(int.__floordiv__, x.dims[2:], conv.stride))
    before = tuple(-pad % by for pad, by in zip(conv.pre_padding, stride, strict=True))
    filters = tuple(-(-(n + zeros) // by) for n, zeros, by in zip(taps, before, stride, strict=True))
    pre = tuple((pad + zeros) // by for pad, zeros, by in zip(conv.pre_padding, before, stride, strict=True))
    post = tuple(
        out - 1 + n - size - first
        for out, n, size, first in zip(y.dims[2:], filters, blocks, pre, strict=True)
    )
    if any(size % by for size, by in zip(x.dims[2:], stride, strict=True)) or min(post) < 0:
        return None
    channels = _channels(x.dims[1], math.prod(stride))
    deep = channels * math.prod(stride)
    padded = _packed_like(w, (w.dims[0], *(n * by for n, by in zip(filters, stride, strict=True)), channels))
    last = (*range(2, len(x.dims)), 1)
    of_x = _blocks(_with_dims(x, _of(x.dims, last), _of(x.strides, last)), stride)
    copies = [
        Copy(x.uid, of_x, _packed_like(x, (*of_x.dims[:-1], channels))),
        Copy(w.uid, _with_dims(w, _of(w.dims, last), _of(w.strides, last)), padded, (0, *before, 0)),
        Copy(w.uid, _blocks(padded, stride), _packed_like(w, _blocks(padded, stride).dims)),
    ]
    changed = {
        x.uid: _channels_last(x, (x.dims[0], deep, *blocks)),
        w.uid: _channels_last(w, (w.dims[0], deep, *filters)),
    }
    conv = msgspec.structs.replace(conv, pre_padding=pre, post_padding=post, stride=(1,) * len(stride))
    instead = msgspec.structs.replace(operation, conv=conv)
    return Rearranged("without strides", _with_operation(graph, changed, operation, instead), tuple(copies))


def _blocks(tensor: GraphTensor, stride: Sequence[int]) -> GraphTensor:
    """A tensor with its channels last as blocks of pixels: (N, P, Q, R, S, C)."""
    (first, first_step), *spatial, (channels, channel) = _axes(tensor)
    dims = (first, *(n // by for (n, _), by in zip(spatial, stride, strict=True)), *stride, channels)
    outside = (step * by for (_, step), by in zip(spatial, stride, strict=True))
    return _with_dims(tensor, dims, (first_step, *outside, *(step for _, step in spatial), channel))


# Tensors.


def _with_operation(
    graph: OperationGraph, tensors: dict[int, GraphTensor], operation: Node, instead: Node
) -> OperationGraph:
    """The graph with other tensors of the same uids, and with `instead` in place of an operation."""
    return OperationGraph(
        tensors=tuple(tensors.get(tensor.uid, tensor) for tensor in graph.tensors),
        operations=tuple(instead if each is operation else each for each in graph.operations),
        numerics=graph.numerics,
    )


def _channels(channels: int, pixels: int) -> int:
    """The fewest channels, at least `channels`, with which those of `pixels` pixels are whole vectors."""
    return next(n for n in itertools.count(channels) if n * pixels % _VECTOR == 0)


def _of(values: tuple[int, ...], axes: Sequence[int]) -> tuple[int, ...]:
    """The first of some values, and then the values of these axes."""
    return (values[0], *(values[axis] for axis in axes))


def _axes(tensor: GraphTensor) -> list[tuple[int, int]]:
    """Each axis's size and stride."""
    return [*zip(tensor.dims, tensor.strides, strict=True)]


def _with_dims(tensor: GraphTensor, dims: tuple[int, ...], strides: tuple[int, ...]) -> GraphTensor:
    """A tensor's memory with other dims."""
    return msgspec.structs.replace(tensor, dims=dims, strides=strides)


def _packed_like(tensor: GraphTensor, dims: tuple[int, ...]) -> GraphTensor:
    """A packed tensor of these dims, otherwise like another one."""
    spec = TensorSpec.packed(dims, tensor.dtype)
    return msgspec.structs.replace(tensor, dims=dims, strides=spec.strides, alignment=spec.alignment)


def _channels_last(tensor: GraphTensor, dims: tuple[int, ...]) -> GraphTensor:
    """A packed tensor of these dims, channels last, otherwise like another one."""
    spec = TensorSpec.packed(dims, tensor.dtype, Layout.NHWC)
    return msgspec.structs.replace(tensor, dims=dims, strides=spec.strides, alignment=spec.alignment)
