"""Convolutions, products of matrices, and attention, as ONNX nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.sessions.draft import Draft, refuse
from cudnn_actor.engines.cpu.sessions.onnx_format import Value
from cudnn_actor.protocol.operations import (
    Attention,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    MatMul,
)
from cudnn_actor.protocol.types.conv import ConvSpec

__all__ = ["emit_attention", "emit_backward_data", "emit_backward_filter", "emit_forward", "emit_matmul"]


_PIXELS_OF_A_FILTER = 4
"""Pixels for each filter of a gradient, from which on it pays to turn the filter."""


def _attributes(conv: ConvSpec) -> dict[str, Value]:
    return {
        "strides": conv.stride,
        "dilations": conv.dilation,
        "pads": (*conv.pre_padding, *conv.post_padding),
        "group": conv.groups,
    }


def emit_forward(draft: Draft, operation: ConvolutionForward[int]) -> None:
    """Write a convolution."""
    x, w = draft.read_float(operation.x), draft.read_float(operation.w)
    draft.write_float(operation.y, draft.emit("Conv", x, w, **_attributes(operation.conv)))


def emit_backward_data(draft: Draft, operation: ConvolutionBackwardData[int]) -> None:
    """Write the gradient of a convolution's input: a convolution, or a transposed one."""
    conv, spatial = operation.conv, draft.dims(operation.dx)[2:]
    dy, w = draft.read_float(operation.dy), draft.read_float(operation.w)
    if _is_a_product(conv, draft.dims(operation.dy), draft.dims(operation.w)):
        filters, channels, *taps = draft.dims(operation.w)
        turned = draft.emit("Transpose", _reshape(draft, w, (filters, channels)), perm=(1, 0))
        found = draft.emit("Conv", dy, _reshape(draft, turned, (channels, filters, *taps)))
        draft.write_float(operation.dx, found)
        return
    sizes = zip(
        spatial,
        conv.pre_padding,
        conv.post_padding,
        draft.dims(operation.dy)[2:],
        conv.stride,
        conv.dilation,
        draft.dims(operation.w)[2:],
        strict=True,
    )
    more = tuple(
        size - ((count - 1) * stride + dilation * (taps - 1) + 1 - before - after)
        for size, before, after, count, stride, dilation, taps in sizes
    )
    if any(not 0 <= each < stride for each, stride in zip(more, conv.stride, strict=True)):
        refuse("a transposed convolution of more output padding than its stride")
    found = draft.emit("ConvTranspose", dy, w, output_padding=more, **_attributes(conv))
    draft.write_float(operation.dx, found)


def _is_a_product(conv: ConvSpec, dy: Sequence[int], w: Sequence[int]) -> bool:
    """Whether a gradient is dy times the filter turned around, and that is to be an ordinary convolution.

    With one tap, that takes 0.75 to 0.9 of the time of a transposed one, which adds up columns of dx. With
    several, it would take as little for many channels; but dy would be padded with zeros, and an infinite
    number of the filter would make NaN of them.
    """
    filters, _, *taps = w
    plain = ConvSpec.symmetric(len(taps), dilation=conv.dilation)
    return (
        math.prod(taps) == 1 and conv == plain and dy[0] * math.prod(dy[2:]) >= _PIXELS_OF_A_FILTER * filters
    )


def emit_backward_filter(draft: Draft, operation: ConvolutionBackwardFilter[int]) -> None:
    """Write the gradient of a filter: a convolution of x with dy, whose samples are the channels.

    What was a stride is a dilation, and the reverse. Where the stride leaves inputs out, the filter found has
    further taps, which are left out.
    """
    conv, dims = operation.conv, draft.dims(operation.dw)
    if conv.groups > 1:
        refuse("a filter's gradient in groups")
    rank = len(dims)
    swapped = (1, 0, *range(2, rank))
    x, dy = (
        draft.emit("Transpose", draft.read_float(uid), perm=swapped) for uid in (operation.x, operation.dy)
    )
    pads = (*conv.pre_padding, *conv.post_padding)
    found = draft.emit("Conv", x, dy, strides=conv.dilation, dilations=conv.stride, pads=pads)
    axes = list(range(2, rank))
    zeros, ends = draft.list_of([0] * len(axes)), draft.list_of(dims[2:])
    taps = draft.emit("Slice", found, zeros, ends, draft.list_of(axes))
    draft.write_float(operation.dw, draft.emit("Transpose", taps, perm=swapped))


def emit_matmul(draft: Draft, operation: MatMul[int]) -> None:
    """Write a product of matrices."""
    a, b = draft.read_float(operation.a), draft.read_float(operation.b)
    draft.write_float(operation.y, draft.emit("MatMul", a, b))


_MOST_SCORES = 16 << 20
"""Attention with more scores than this at a time is not written: all of them would be stored."""


def emit_attention(draft: Draft, operation: Attention[int]) -> None:
    """Write attention as its parts."""
    unwritten = ("lengths_q", "lengths_kv", "state", "statistics", "window_left", "window_right", "slopes")
    for name in unwritten:
        if getattr(operation, name) is not None:
            refuse(f"attention with {name}")
    q, k, v = (draft.read_float(uid) for uid in (operation.q, operation.k, operation.v))
    batch, heads, rows, features = draft.dims(operation.q)
    groups, columns = draft.dims(operation.k)[1:3]
    if batch * heads * rows * columns > _MOST_SCORES:
        refuse(f"attention with {batch * heads * rows * columns:,} scores")
    shared = heads // groups
    scaled = draft.emit("Mul", q, draft.number(operation.effective_scale(features)))
    keys, values = draft.emit("Transpose", k, perm=(0, 1, 3, 2)), v
    if shared > 1:
        scaled = _reshape(draft, scaled, (batch, groups, shared, rows, features))
        keys = _reshape(draft, keys, (batch, groups, 1, features, columns))
        values = _reshape(draft, values, (batch, groups, 1, columns, draft.dims(operation.v)[3]))
    scores = draft.emit("MatMul", scaled, keys)
    if shared > 1:
        scores = _reshape(draft, scores, (batch, heads, rows, columns))
    mask, blind = _mask(draft, operation)
    if mask:
        scores = draft.emit("Add", scores, mask)
    weights = draft.emit("Softmax", scores, axis=3)
    if shared > 1:
        weights = _reshape(draft, weights, (batch, groups, shared, rows, columns))
    found = draft.emit("MatMul", weights, values)
    if shared > 1:
        found = _reshape(draft, found, draft.dims(operation.y))
    if blind:
        factor = draft.emit("Where", blind, draft.number(0), draft.number(1))
        found = draft.emit("Mul", found, factor)
    draft.write_float(operation.y, found)


def _mask(draft: Draft, operation: Attention[int]) -> tuple[str, str]:
    """The values that are added to the scores, and the mask of positions that see nothing; an empty name if
    there are none.

    A position that sees nothing sees everything here, and its results are multiplied by 0, so that NaN stays
    NaN. The softmax of scores that are all -infinity would be NaN.
    """
    mask = ""
    if operation.causal:
        rows, columns = draft.dims(operation.q)[2], draft.dims(operation.k)[2]
        mask = draft.constant(np.triu(np.full((1, 1, rows, columns), -math.inf, np.float32), 1))
    if operation.bias is None:
        return mask, ""
    bias = draft.read_float(operation.bias)
    mask = draft.emit("Add", bias, mask) if mask else bias
    most = draft.emit("ReduceMax", mask, draft.list_of([3]))
    blind = draft.emit("Equal", most, draft.number(-math.inf))
    return draft.emit("Where", blind, draft.number(0), mask), blind


def _reshape(draft: Draft, value: str, dims: Any) -> str:
    return draft.emit("Reshape", value, draft.list_of(dims))
