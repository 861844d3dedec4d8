"""Plans that compute something else than the operation that they are of: each function changes a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from cudnn_actor.engines.cuda.running.recipe import Buffer, OperationStep
from cudnn_actor.protocol import (
    Coordinates,
    DType,
    GraphTensor,
    GridPadding,
    Pad,
    PadMode,
    RandomBernoulli,
    RandomIntegers,
    RandomNormal,
    RandomUniform,
    Reduction,
    ReductionMode,
    ResampleMode,
    ScatterReduction,
    Window,
)

from .checked_graphs import ADAPTIVE, IMAGE, WINDOW

__all__ = [
    "another_b",
    "another_blank",
    "another_distribution",
    "another_mode",
    "backwards",
    "batched",
    "causal",
    "changed",
    "dropped_less",
    "exclusive",
    "fewer",
    "fewer_selected",
    "half_read",
    "left_only",
    "longer_rows",
    "missing",
    "moved",
    "narrower",
    "next_column",
    "next_row",
    "one_column_less",
    "one_deviation",
    "one_end",
    "one_image_less",
    "one_index",
    "one_less",
    "one_matrix",
    "one_sample_less",
    "one_sample_more",
    "one_update",
    "one_weight",
    "other_border",
    "other_corners",
    "other_end",
    "other_epsilon",
    "other_images",
    "other_interpolation",
    "other_padding",
    "other_places",
    "other_power",
    "other_size",
    "other_state",
    "other_widths",
    "reverse",
    "rotated",
    "scaled",
    "shorter_result",
    "shorter_rows",
    "shorter_sums",
    "smallest",
    "smallest_update",
    "steeper",
    "swapped",
    "the_first",
    "transposed",
    "unbounded",
    "unordered",
    "wider",
    "with_output",
    "with_tensors",
]


def missing(_: OperationStep) -> tuple[OperationStep, ...]:
    return ()


def moved(step: OperationStep) -> tuple[OperationStep, ...]:
    """Other windows, as many as before."""
    if step.operation.window == ADAPTIVE:  # type: ignore[attr-defined]
        return changed(step, window=Window.symmetric(2, size=3, stride=2, pad=0))
    window = msgspec.structs.replace(WINDOW, pre_padding=(0, 1), post_padding=(2, 1))
    return (msgspec.structs.replace(step, operation=msgspec.structs.replace(step.operation, window=window)),)


def with_output(step: OperationStep, **changes: Any) -> tuple[OperationStep, ...]:
    """The step with its first output described otherwise."""
    at = len(step.operation.reads)
    tensors = list(step.tensors)
    tensors[at] = msgspec.structs.replace(tensors[at], **changes)
    return (msgspec.structs.replace(step, tensors=tuple(tensors)),)


def transposed(step: OperationStep) -> tuple[OperationStep, ...]:
    *rest, rows, columns = step.tensors[len(step.operation.reads)].strides
    return with_output(step, strides=(*rest, columns, rows))


def one_sample_less(step: OperationStep) -> tuple[OperationStep, ...]:
    return batched(step, 1)


def one_sample_more(step: OperationStep) -> tuple[OperationStep, ...]:
    return batched(step, 3)


def batched(step: OperationStep, samples: int) -> tuple[OperationStep, ...]:
    tensors = tuple(msgspec.structs.replace(t, dims=(samples, *t.dims[1:])) for t in step.tensors)
    return (msgspec.structs.replace(step, tensors=tensors),)


def swapped(step: OperationStep) -> tuple[OperationStep, ...]:
    """Read from the output's place, and write to the input's."""
    return (msgspec.structs.replace(step, sources=step.sources[::-1]),)


def changed(step: OperationStep, **changes: Any) -> tuple[OperationStep, ...]:
    return (msgspec.structs.replace(step, operation=msgspec.structs.replace(step.operation, **changes)),)


def longer_rows(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, axis=-2)


def causal(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, causal=True)


def scaled(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, scale=0.3)


def wider(step: OperationStep) -> tuple[OperationStep, ...]:
    """One more key at each end of the window."""
    return changed(step, window_left=6, window_right=1)


def left_only(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, window_right=None)


def steeper(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, slopes=(0.3, 0.2, 0.1, 0.0))


def dropped_less(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, dropout=0.4)


def other_state(step: OperationStep) -> tuple[OperationStep, ...]:
    """The offset in the seed's place, and the seed in the offset's."""
    tensors, sources = list(step.tensors), list(step.sources)
    at = next(number for number, tensor in enumerate(tensors) if tensor.dtype is DType.INT64)
    tensors[at] = msgspec.structs.replace(tensors[at], strides=(-1,))
    source = sources[at]
    assert isinstance(source, Buffer)
    sources[at] = msgspec.structs.replace(source, offset=8)
    return (msgspec.structs.replace(step, tensors=tuple(tensors), sources=tuple(sources)),)


def fewer(step: OperationStep) -> tuple[OperationStep, ...]:
    return with_output(step, dims=(5, 40))


def next_column(step: OperationStep) -> tuple[OperationStep, ...]:
    """The rows of the result one element nearer to each other."""
    return with_output(step, strides=(39, 1))


def another_distribution(step: OperationStep) -> tuple[OperationStep, ...]:
    changes: dict[type[Any], dict[str, Any]] = {
        RandomUniform: {"low": -0.9},
        RandomNormal: {"deviation": 1.1},
        RandomBernoulli: {"probability": 0.6},
        RandomIntegers: {"high": 101},
    }
    return changed(step, **changes[type(step.operation)])


def another_mode(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, mode=ReductionMode.L2)


def smallest(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, mode=ReductionMode.MIN)


def reverse(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, reverse=True)


def exclusive(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, exclusive=True)


def half_read(step: OperationStep) -> tuple[OperationStep, ...]:
    """Only the first half of the reduced dim."""
    operation: Any = step.operation
    axis = operation.reduced_dims(3)[0] - 3 if isinstance(operation, Reduction) else operation.axis
    x, *rest = step.tensors
    at = axis % len(x.dims)
    x = msgspec.structs.replace(x, dims=(*x.dims[:at], x.dims[at] // 2, *x.dims[at + 1 :]))
    return (msgspec.structs.replace(step, tensors=(x, *rest)),)


def next_row(step: OperationStep) -> tuple[OperationStep, ...]:
    """The input's rows one element further apart."""
    x, *rest = step.tensors
    *outer, last = x.strides
    x = msgspec.structs.replace(x, strides=(*(stride + 1 for stride in outer), last))
    return (msgspec.structs.replace(step, tensors=(x, *rest)),)


def rotated(step: OperationStep) -> tuple[OperationStep, ...]:
    """Each operand in the place of the next one of as many bytes."""
    sizes = [tensor.spec.nbytes for tensor in step.tensors]
    sources = list(step.sources)
    for size in set(sizes):
        places = [number for number, other in enumerate(sizes) if other == size]
        for number, other in zip(places, [*places[1:], places[0]], strict=True):
            sources[number] = step.sources[other]
    return (msgspec.structs.replace(step, sources=tuple(sources)),)


def shorter_sums(step: OperationStep) -> tuple[OperationStep, ...]:
    a, b, y = step.tensors
    a = msgspec.structs.replace(a, dims=(*a.dims[:-1], a.dims[-1] - 1))
    b = msgspec.structs.replace(b, dims=(*b.dims[:-2], b.dims[-2] - 1, b.dims[-1]))
    return (msgspec.structs.replace(step, tensors=(a, b, y)),)


def another_b(step: OperationStep) -> tuple[OperationStep, ...]:
    """Its columns, all one further."""
    a, b, y = step.tensors
    b = msgspec.structs.replace(b, strides=(*b.strides[:-2], b.strides[-2] + 1, b.strides[-1]))
    return (msgspec.structs.replace(step, tensors=(a, b, y)),)


def other_epsilon(step: OperationStep) -> tuple[OperationStep, ...]:
    if hasattr(step.operation, "epsilon"):
        return changed(step, epsilon=0.5)
    return missing(step)


def other_images(step: OperationStep) -> tuple[OperationStep, ...]:
    """Images one element further apart."""
    whole = len(IMAGE)
    tensors = tuple(
        msgspec.structs.replace(t, strides=(t.strides[0] + 1, *t.strides[1:])) if len(t.dims) == whole else t
        for t in step.tensors
    )
    return (msgspec.structs.replace(step, tensors=tensors),)


def one_image_less(step: OperationStep) -> tuple[OperationStep, ...]:
    """Batched tensors only: weights have no samples."""
    tensors = tuple(
        msgspec.structs.replace(t, dims=(1, *t.dims[1:])) if len(t.dims) > 1 else t for t in step.tensors
    )
    return (msgspec.structs.replace(step, tensors=tensors),)


def one_column_less(step: OperationStep) -> tuple[OperationStep, ...]:
    whole = len(IMAGE)
    tensors = tuple(
        msgspec.structs.replace(t, dims=(*t.dims[:-1], t.dims[-1] - 1)) if len(t.dims) == whole else t
        for t in step.tensors
    )
    return (msgspec.structs.replace(step, tensors=tensors),)


def other_size(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, size=5)


def other_power(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, beta=0.5)


def other_border(step: OperationStep) -> tuple[OperationStep, ...]:
    if isinstance(step.operation, Pad):
        return changed(step, value=1.0)
    modes = list(PadMode)
    return changed(step, mode=modes[modes.index(step.operation.mode) - 1])  # type: ignore[attr-defined]


def other_widths(step: OperationStep) -> tuple[OperationStep, ...]:
    """More behind x's elements, and less before them."""
    return changed(step, before=(0, 0, 2), after=(3, 1, 5))


def with_tensors(
    step: OperationStep, names: tuple[str, ...], change: Callable[[GraphTensor], GraphTensor]
) -> tuple[OperationStep, ...]:
    """The step with some of its operands described otherwise."""
    operands = zip(step.operation.named(), step.tensors, strict=True)
    tensors = tuple(change(tensor) if name in names else tensor for (name, _), tensor in operands)
    return (msgspec.structs.replace(step, tensors=tensors),)


def the_first(tensor: GraphTensor) -> GraphTensor:
    """What lies first, in the place of all."""
    return msgspec.structs.replace(tensor, strides=(0, *tensor.strides[1:]))


def one_matrix(step: OperationStep) -> tuple[OperationStep, ...]:
    """The matrix of the first expert for all of them."""
    return with_tensors(step, ("weights", "dweights"), the_first)


def one_weight(step: OperationStep) -> tuple[OperationStep, ...]:
    return with_tensors(step, ("scale",), lambda tensor: msgspec.structs.replace(tensor, strides=(0,)))


def one_deviation(step: OperationStep) -> tuple[OperationStep, ...]:
    """That of the first sample's rows for all samples'."""
    return with_tensors(step, ("inverse_deviation", "inverse_rms"), the_first)


def shorter_rows(step: OperationStep) -> tuple[OperationStep, ...]:
    """Rows without their last element."""

    def cut(tensor: GraphTensor) -> GraphTensor:
        return msgspec.structs.replace(tensor, dims=(*tensor.dims[:-1], tensor.dims[-1] - 1))

    return with_tensors(step, ("x", "dy", "y", "dx", "scale", "bias", "dscale", "dbias"), cut)


def one_end(step: OperationStep) -> tuple[OperationStep, ...]:
    """The rows of the first expert only."""
    return with_tensors(step, ("offsets",), the_first)


def narrower(step: OperationStep) -> tuple[OperationStep, ...]:
    """The last element of each token left out."""

    def cut(tensor: GraphTensor) -> GraphTensor:
        first, second, *others = tensor.dims
        return msgspec.structs.replace(tensor, dims=(first, second - 1, *others))

    return with_tensors(step, ("tokens", "weights", "dweights"), cut)


def shorter_result(step: OperationStep) -> tuple[OperationStep, ...]:
    """Rows of the result without their last element."""
    *outer, last = step.tensors[len(step.operation.reads)].dims
    return with_output(step, dims=(*outer, last - 1))


def other_corners(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, align_corners=True)


def other_padding(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, padding=GridPadding.REFLECTION)


def other_places(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, coordinates=Coordinates.ASYMMETRIC)


def other_interpolation(step: OperationStep) -> tuple[OperationStep, ...]:
    modes = [*ResampleMode]
    mode = modes[modes.index(step.operation.mode) - 1]  # type: ignore[attr-defined]
    return changed(step, mode=mode, antialias=False)


def other_end(step: OperationStep) -> tuple[OperationStep, ...]:
    """The smallest for the largest."""
    return changed(step, largest=not step.operation.largest)  # type: ignore[attr-defined]


def one_less(step: OperationStep) -> tuple[OperationStep, ...]:
    """The best, but for the last one."""
    return changed(step, k=step.operation.k - 1)  # type: ignore[attr-defined]


def another_blank(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, blank=0)


def unbounded(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, clip=None)


def backwards(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, reverse=True)


def unordered(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, in_order=False)


def one_index(step: OperationStep) -> tuple[OperationStep, ...]:
    """The first index for all of them."""
    return with_tensors(step, ("indices",), the_first)


def one_update(step: OperationStep) -> tuple[OperationStep, ...]:
    """The first part of the updates for all of them."""
    return with_tensors(step, ("updates",), the_first)


def smallest_update(step: OperationStep) -> tuple[OperationStep, ...]:
    return changed(step, reduction=ScatterReduction.MIN)


def fewer_selected(step: OperationStep) -> tuple[OperationStep, ...]:
    """The last elements of x are out of range."""

    def cut(tensor: GraphTensor) -> GraphTensor:
        return msgspec.structs.replace(tensor, dims=(tensor.dims[0], tensor.dims[1] - 1, *tensor.dims[2:]))

    return with_tensors(step, ("x",), cut)
