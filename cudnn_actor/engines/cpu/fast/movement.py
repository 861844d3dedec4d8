"""Movement of elements: copies of views, in blocks.

Transposes, slices, and reshapes of what lies behind each other need no kernel where the planner reads their
operand in place (`Movement.view` says when). These are for the others, and for results in buffers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from cudnn_actor.engines.cpu.fast.blocks import BLOCK_ELEMENTS, merged_axes, pieces
from cudnn_actor.engines.cpu.fast.kernels import (
    COPY_NS,
    MOST_SCRATCH,
    Call,
    Step,
    carrier_dtype,
    deal,
    in_turn,
    lanes_worth,
)
from cudnn_actor.engines.cpu.fast.lines import boxes_of_elements
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.operations import (
    BitCast,
    BorderPad,
    Concat,
    Node,
    Pad,
    PadMode,
    Reshape,
    Slice,
    Specs,
    Transpose,
)

__all__ = ["Copies", "Reshaped", "bit_cast", "border_pad", "concat", "copied_blocks", "pad", "reshape"]
__all__ += ["slice_", "transpose"]

Array = npt.NDArray[Any]
Pair = tuple[Array, Array]
"""A source and a target of the same dims, or a source that is broadcast to them."""

_LINE = 64
_SHORT = 128
"""Columns that a block of a transpose has at most: a cache line for each is in the cache together."""
_PACKED = MOST_SCRATCH // 4
"""Bytes of the packed copy of a part of a reshape, about: each lane has its own."""


@dataclass(frozen=True)
class Copies:
    """Copies, from what is read to what is written; those of a step need nothing from each other.

    `steps`: from the operands and the results, by name: the pairs of each step. `within`: whether some are
    from one part of an array to another: of these, NumPy would allocate a copy where the two are interlaced.
    """

    steps: Callable[[Mapping[str, Array], Mapping[str, Array]], Sequence[Sequence[Pair]]]
    within: bool = False

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for a block of what is copied within an array."""
        del lanes
        return footprint((BLOCK_ELEMENTS,)) if self.within else 0

    def bind(
        self, operands: Mapping[str, Array], results: Mapping[str, Array], lanes: Sequence[Scratch]
    ) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        return [copied_blocks(pairs, lanes, within=self.within) for pairs in self.steps(operands, results)]


def copied_blocks(pairs: Sequence[Pair], lanes: Sequence[Scratch], *, within: bool = False) -> Step:
    """A step in which arrays are copied to others. `within`: see `Copies`."""
    lanes = lanes_worth(lanes, COPY_NS * sum(target.size for _, target in pairs))
    blocks = itertools.chain.from_iterable(itertools.starmap(_blocks, pairs))

    def call(pair: Pair, lane: int) -> Call:
        source, target = pair
        if not (within and np.may_share_memory(source, target)):
            return partial(np.copyto, target, source)
        between = lanes[lane].fork().take(source.shape, source.dtype)
        return in_turn([partial(np.copyto, between, source), partial(np.copyto, target, between)])

    return deal(blocks, len(lanes), call)


def _blocks(source: Array, target: Array) -> Iterator[Pair]:
    """Parts of a source and of a target: as long as possible along the axes along which both are in order."""
    if not target.size:
        return
    dims, (into, of) = merged_axes(target.shape, [target, source])
    if abs(of.strides[-1]) >= _LINE and len(dims) > 1:
        length = min(dims[-1], _SHORT)
        for place in pieces(dims[:-1], max(1, BLOCK_ELEMENTS // length)):
            for start in range(0, dims[-1], length):
                part = (*place, ..., slice(start, start + length))
                yield of[part], into[part]
        return
    for place in pieces(dims, BLOCK_ELEMENTS):
        yield of[place], into[place]


# Of one operand.


def transpose(node: Node, specs: Specs) -> Copies:
    """The kernel for `Transpose`."""
    assert isinstance(node, Transpose)
    del specs
    return Copies(lambda operands, results: [[(operands["x"].transpose(node.axes), results["y"])]])


def slice_(node: Node, specs: Specs) -> Copies:
    """The kernel for `Slice`."""
    assert isinstance(node, Slice)
    part = tuple(map(_spaced_slice, node.starts, node.steps, node.sizes))
    del specs
    return Copies(lambda operands, results: [[(operands["x"][part], results["y"])]])


def _spaced_slice(start: int, step: int, size: int) -> slice:
    stop = start + size * step
    return slice(start, stop if stop >= 0 else None, step)


def bit_cast(node: Node, specs: Specs) -> Copies | None:
    """The kernel for `BitCast`; None for half types, whose values are not here as bits."""
    assert isinstance(node, BitCast)
    if node.source.is_half or node.dtype.is_half:
        return None
    del specs
    return Copies(lambda operands, results: [[(operands["x"].view(node.dtype.numpy), results["y"])]])


def pad(node: Node, specs: Specs) -> Copies:
    """The kernel for `Pad`."""
    assert isinstance(node, Pad)
    dtype = specs["y"].dtype.numpy
    number = np.array(node.value).astype(dtype).astype(carrier_dtype(specs["y"].dtype))
    order = tuple(slice(None, None, -1 if step < 0 else 1) for step in node.steps)
    gaps = any(abs(step) > 1 for step in node.steps)

    def steps(operands: Mapping[str, Array], results: Mapping[str, Array]) -> list[list[Pair]]:
        x, y = operands["x"][order], results["y"]
        ends = [size - after for size, after in zip(y.shape, node.after, strict=True)]
        inside = tuple(map(slice, node.before, ends, map(abs, node.steps)))
        if gaps:
            return [[(number, y)], [(x, y[inside])]]
        around = [(number, side) for side in _sides(y, node.before, ends)]
        return [[(x, y[inside]), *around]]

    return Copies(steps)


def _sides(y: Array, starts: Sequence[int], ends: Sequence[int]) -> Iterator[Array]:
    """The parts of an array that lie around a box in it."""
    for axis in range(y.ndim):
        inner = tuple(map(slice, starts[:axis], ends[:axis]))
        yield y[(*inner, slice(0, starts[axis]))]
        yield y[(*inner, slice(ends[axis], None))]


def border_pad(node: Node, specs: Specs) -> Copies:
    """The kernel for `BorderPad`: of one axis after the other, from what is already there."""
    assert isinstance(node, BorderPad)
    sizes = specs["x"].dims

    def steps(operands: Mapping[str, Array], results: Mapping[str, Array]) -> list[list[Pair]]:
        y = results["y"]
        inside = [slice(before, before + size) for before, size in zip(node.before, sizes, strict=True)]
        found: list[list[Pair]] = [[(operands["x"], y[tuple(inside)])]]
        for axis, (before, size, after) in enumerate(zip(node.before, sizes, node.after, strict=True)):

            def at(run: slice, axis: int = axis) -> Array:
                part: Array = y[(*[slice(None)] * axis, run, *inside[axis + 1 :])]
                return part

            borders = _borders(node.mode, before, before + size, before + size + after)
            found += ([(at(of), at(into)) for of, into in step] for step in borders)
        return found

    return Copies(steps, within=True)


def _borders(mode: PadMode, start: int, end: int, total: int) -> Iterator[list[tuple[slice, slice]]]:
    """Steps of copies along an axis, (from, to), that fill it from 0 to `total`.

    It is filled from `start` to `end` before. Where borders are longer than that, each step copies twice as
    many elements as the one before.
    """
    size = end - start
    if mode is PadMode.EDGE or size == 1:
        outermost = ((slice(start, start + 1), slice(0, start)), (slice(end - 1, end), slice(end, total)))
        if step := [(of, into) for of, into in outermost if into.start < into.stop]:
            yield step
        return
    period = size
    if mode is not PadMode.WRAP:
        apart = 1 if mode is PadMode.REFLECT else 0
        period = 2 * (size - apart)
        before, after = (min(size - apart, wanted) for wanted in (start, total - end))
        mirrored = []
        if before:
            mirrored.append(
                (_spaced_slice(start + apart + before - 1, -1, before), slice(start - before, start))
            )
        if after:
            mirrored.append((_spaced_slice(end - 1 - apart, -1, after), slice(end, end + after)))
        if mirrored:
            yield mirrored
        start, end = start - before, end + after
    while start or end < total:
        known = (end - start) // period * period
        before, after = min(known, start), min(known, total - end)
        step = [
            (slice(start - before + known, start + known), slice(start - before, start)),
            (slice(end - known, end - known + after), slice(end, end + after)),
        ]
        yield [(of, into) for of, into in step if into.start < into.stop]
        start, end = start - before, end + after


def concat(node: Node, specs: Specs) -> Copies:
    """The kernel for `Concat`."""
    assert isinstance(node, Concat)
    axis = node.axis % specs["y"].rank
    names = [name for name, _ in node.named(node.inputs)]
    sizes = [specs[name].dims[axis] for name in names]
    ends = list(itertools.accumulate(sizes))

    def steps(operands: Mapping[str, Array], results: Mapping[str, Array]) -> list[list[Pair]]:
        before = (slice(None),) * axis
        parts = (slice(end - size, end) for size, end in zip(sizes, ends, strict=True))
        return [[(operands[n], results["y"][(*before, part)]) for n, part in zip(names, parts, strict=True)]]

    return Copies(steps)


# Reshapes.


def reshape(node: Node, specs: Specs) -> Reshaped:
    """The kernel for `Reshape`."""
    assert isinstance(node, Reshape)
    x, y = specs["x"], specs["y"]
    packed = _strides_with_dims(y.dims, y.strides, x.dims) is not None
    itemsize = carrier_dtype(x.dtype).itemsize
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(x.dims, y.dims, strict=False))
    outer = tuple(size for size, _ in same)
    inner = itemsize * math.prod(x.dims[len(outer) :])
    return Reshaped(outer, max(1, _PACKED // inner), 0 if packed else inner * math.prod(outer))


@dataclass(frozen=True)
class Reshaped:
    """A copy of one array to another, in which its elements have the same order.

    Where neither can be seen with the other's dims, there is a packed copy between them: of one part after
    the other, or in memory that NumPy allocates.

    Parameters
    ----------
    outer
        The first dims, as far as both have the same: parts are cut along these.
    most
        How many of their elements a part has at most.
    between
        Bytes of a packed copy of the whole; 0 if none is needed.
    """

    outer: tuple[int, ...]
    most: int
    between: int

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: 0 if a part of one element is too large."""
        del lanes
        if self.between <= MOST_SCRATCH:
            return footprint((self.between,), itemsize=1)
        nbytes = self.between // math.prod(self.outer) * min(self.most, math.prod(self.outer))
        return footprint((nbytes,), itemsize=1) if nbytes <= MOST_SCRATCH else 0

    def bind(
        self, operands: Mapping[str, Array], results: Mapping[str, Array], lanes: Sequence[Scratch]
    ) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, y = operands["x"], results["y"]
        if (found := _reshaped_view(y, x.shape)) is not None:
            return [copied_blocks([(x, found)], lanes)]
        if (found := _reshaped_view(x, y.shape)) is not None:
            return [copied_blocks([(found, y)], lanes)]
        if self.between and not self.footprint(len(lanes)):
            return [(partial(_copy_reshaped, x, y),)]
        if self.between <= MOST_SCRATCH:
            packed = lanes[0].take(x.shape, x.dtype)
            pairs = ((x, packed), (packed.reshape(y.shape), y))
            return [copied_blocks([pair], lanes) for pair in pairs]

        def call(box: Any, lane: int) -> Call:
            of, into = x[box], y[box]
            packed = lanes[lane].fork().take(of.shape, of.dtype)
            pairs = (_blocks(of, packed), _blocks(packed.reshape(into.shape), into))
            return in_turn([partial(np.copyto, target, source) for each in pairs for source, target in each])

        return [deal(boxes_of_elements(self.outer, self.most), len(lanes), call)]


def _copy_reshaped(x: Array, y: Array) -> None:
    np.copyto(y, x.reshape(y.shape))


def _reshaped_view(array: Array, dims: tuple[int, ...]) -> Array | None:
    """An array with other dims; None if that needs a copy."""
    strides = _strides_with_dims(array.shape, array.strides, dims)
    return None if strides is None else as_strided(array, dims, strides, writeable=array.flags.writeable)


def _strides_with_dims(
    dims: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]
) -> tuple[int, ...] | None:
    placed = Reshape(x=0, y=1, dims=wanted).view(dims, strides)
    return None if placed is None else placed.strides
