"""The functions of a `GraphBuilder` that only move elements: NumPy's, and ONNX's for channels and space."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.graphs.movement_functions import MovementFunctions
from cudnn_actor.protocol.operations import Concat
from cudnn_actor.protocol.operations.base import axes_of, axis_of
from cudnn_actor.protocol.types.checks import as_plain, is_whole, require_choice
from cudnn_actor.protocol.types.tensor import whole_numbers

__all__ = ["ArrangementFunctions", "Blocks"]

Blocks = Literal["DCR", "CRD"]
"""The order of the parts of `depth_to_space`'s channels, the slowest first. DCR: the row in the block, the
column, the result's channel. CRD: the result's channel, the row, the column."""

_FEW = 8
"""Up to this many times, `tile` concatenates a tensor with itself; for more, it broadcasts the tensor."""


class ArrangementFunctions(MovementFunctions):
    """Each function adds operations to the graph, and raises `InvalidRequest` if its arguments do not fit."""

    # Several tensors.

    def concatenate(self, tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
        """The tensors, of the same dtype, joined along a dim: see `Concat`."""
        operands = self._several(tensors)
        if operands:
            axis = axis_of("axis", axis, operands[0].rank, "tensors[0]")
        return self._result(Concat(operands=operands, axis=axis), operands="tensors")

    def stack(self, tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
        """The tensors, of the same dtype and dims, joined along a new dim."""
        return self.concatenate([self.expand_dims(x, axis) for x in self._several(tensors)], axis)

    def _several(self, given: object) -> tuple[Tensor, ...]:
        """The tensors of a sequence, or those along the first dim of a tensor. Raises `InvalidRequest`."""
        if not isinstance(given, Sequence | Tensor) or isinstance(given, str):
            raise InvalidRequest(
                field="tensors", value=given, problem="is no sequence of tensors", fix="give them in a tuple"
            )
        if isinstance(given, Tensor) and not given.dims:
            raise InvalidRequest(
                field="tensors",
                value=given,
                problem="has no dims, so it is no sequence of tensors",
                fix="give several tensors in a tuple",
            )
        tensors = tuple(given)
        for number, tensor in enumerate(tensors):
            self._own(f"tensors[{number}]", tensor)
        return tensors

    def split(self, x: Tensor, sections: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
        """x cut along a dim: into `sections` parts of the same size, or into parts of these sizes."""
        self._own("x", x)
        axis = axis_of("axis", axis, x.rank)
        size, sections = x.dims[axis], as_plain(sections)
        if isinstance(sections, int):
            self._check_sections(sections)
            fits = sections >= 1 and size % sections == 0
            sizes = [size // sections] * sections if fits else []
            problem = f"does not divide dim {axis}, of size {size}"
        else:
            sizes = list(whole_numbers("sections", sections))
            fits = min(sizes, default=0) >= 0 and sum(sizes) == size
            problem = f"must be sizes ≥ 0 that add up to {size}, that of dim {axis}, not to {sum(sizes)}"
        if not fits:
            raise InvalidRequest(
                field="sections",
                value=sections,
                problem=problem,
                fix="give a number that divides it, or sizes that add up to it; array_split takes any number",
            )
        return self._parts(x, sizes, axis)

    def array_split(self, x: Tensor, sections: int, axis: int = 0) -> tuple[Tensor, ...]:
        """x cut along a dim into `sections` parts. If they cannot be equal, the first ones are one longer."""
        self._own("x", x)
        axis = axis_of("axis", axis, x.rank)
        sections = as_plain(sections)
        _check_count("sections", sections, 1)
        self._check_sections(sections)
        each, more = divmod(x.dims[axis], sections)
        return self._parts(x, [each + 1] * more + [each] * (sections - more), axis)

    def _check_sections(self, count: int) -> None:
        """Raise `InvalidRequest` if a graph may not have an operation for each of `count` parts."""
        try:
            self._limits.check_operations(count)
        except InvalidRequest as error:
            raise InvalidRequest(
                field="sections", value=count, problem=error.problem, fix=error.fix
            ) from None

    def _parts(self, x: Tensor, sizes: Sequence[int], axis: int) -> tuple[Tensor, ...]:
        before = (slice(None),) * axis
        ends = itertools.accumulate(sizes)
        return tuple(
            self.slice(x, (*before, slice(end - size, end))) for end, size in zip(ends, sizes, strict=True)
        )

    # Dims.

    def expand_dims(self, x: Tensor, axis: int | Sequence[int]) -> Tensor:
        """x with new dims of 1. `axis` counts the dims of the result."""
        self._own("x", x)
        axes = _each(axis)
        rank = x.rank + len(axes)
        places = axes_of("axis", axes, rank, "the result")
        old = iter(x.dims)
        return self.reshape(x, [1 if place in places else next(old) for place in range(rank)])

    def squeeze(self, x: Tensor, axis: int | Sequence[int] | None = None) -> Tensor:
        """x without these dims, which must be 1. None: without all dims of 1."""
        self._own("x", x)
        if axis is None:
            places = {place for place, size in enumerate(x.dims) if size == 1}
        else:
            places = {*axes_of("axis", _each(axis), x.rank)}
        for place in places:
            if x.dims[place] != 1:
                raise InvalidRequest(
                    field="axis",
                    value=place,
                    problem=f"is a dim of {x.dims[place]}",
                    fix="leave out dims of 1 only",
                )
        return self.reshape(x, [size for place, size in enumerate(x.dims) if place not in places])

    def swapaxes(self, x: Tensor, axis: int, other: int) -> Tensor:
        """x with two dims exchanged."""
        self._own("x", x)
        one, two = (axis_of(name, n, x.rank) for name, n in (("axis", axis), ("other", other)))
        order = list(range(x.rank))
        order[one], order[two] = two, one
        return self.transpose(x, order)

    def moveaxis(self, x: Tensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
        """x with the dims `source` moved to `destination`; the other dims keep their order."""
        self._own("x", x)
        given, wanted = (
            tuple(axes_of(name, _each(axes), x.rank))
            for name, axes in (("source", source), ("destination", destination))
        )
        if len(given) != len(wanted):
            raise InvalidRequest(
                field="destination",
                value=destination,
                problem=f"does not have a place for each of {len(given)} dims",
                fix="give as many",
            )
        others = (axis for axis in range(x.rank) if axis not in given)
        placed = dict(zip(wanted, given, strict=True))
        return self.transpose(x, [placed[n] if n in placed else next(others) for n in range(x.rank)])

    # Repeated and moved elements.

    def tile(self, x: Tensor, repeats: int | Sequence[int]) -> Tensor:
        """x repeated as a whole along each dim. The last of `repeats` is for the last dim, as in NumPy.

        Missing ones are 1. If there are more than dims, x gets leading dims of 1.
        """
        self._own("x", x)
        each = tuple(map(as_plain, _each(repeats)))
        for count in each:
            _check_count("repeats", count, 0)
        each = (1,) * (x.rank - len(each)) + each
        if len(each) > x.rank:
            x = self.reshape(x, (1,) * (len(each) - x.rank) + x.dims)
        for axis, count in enumerate(each):
            if 1 < count <= _FEW and x.dims[axis] > 1:  # this keeps the layout, and copies whole rows
                x = self.concatenate((x,) * count, axis)
                each = (*each[:axis], 1, *each[axis + 1 :])
        return self._repeat(x, each, inner=False)

    def repeat(self, x: Tensor, repeats: int, axis: int | None = None) -> Tensor:
        """x with each element repeated along a dim. Without an axis, x is reshaped to one dim first."""
        self._own("x", x)
        repeats = as_plain(repeats)
        _check_count("repeats", repeats, 0)
        if axis is None:
            x, axis = self.reshape(x, (-1,)) if x.rank != 1 else x, 0
        axis = axis_of("axis", axis, x.rank)
        return self._repeat(x, [repeats if n == axis else 1 for n in range(x.rank)], inner=True)

    def _repeat(self, x: Tensor, repeats: Sequence[int], *, inner: bool) -> Tensor:
        """x repeated along each dim: as a whole or, if `inner`, element by element."""
        axes = [axis for axis, count in enumerate(repeats) if count != 1]
        for start in range(0, len(axes), 3):  # each needs two dims, of at most eight
            now = axes[start : start + 3]
            narrow, wide, run = list[int](), list[int](), 1
            apart = x.rank + len(now) < 8  # so a layout whose dims cannot be merged is read in place
            for axis, size in enumerate(x.dims):
                run *= size if inner else 1
                if axis in now:
                    narrow += [run, 1]
                    wide += [run, repeats[axis]]
                    run = 1
                elif apart:
                    narrow.append(run)
                    wide.append(run)
                    run = 1
                run *= 1 if inner else size
            dims = [size * repeats[axis] if axis in now else size for axis, size in enumerate(x.dims)]
            try:
                repeated = self.broadcast_to(self.reshape(x, (*narrow, run)), (*wide, run))
            except InvalidRequest as error:
                raise InvalidRequest(
                    field="repeats", value=tuple(repeats), problem=error.problem, fix=error.fix
                ) from None
            x = self.reshape(repeated, dims)
        return x

    def flip(self, x: Tensor, axis: int | Sequence[int] | None = None) -> Tensor:
        """x with the order of elements reversed along these dims; None for all dims."""
        self._own("x", x)
        given = range(x.rank) if axis is None else _each(axis)
        axes = axes_of("axis", tuple(given), x.rank)
        return self.slice(x, tuple(slice(None, None, -1 if n in axes else 1) for n in range(x.rank)))

    def roll(self, x: Tensor, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Tensor:
        """x with its elements shifted along dims; those that leave at the end come in at the start.

        Without an axis, x is shifted as if it had one dim.
        """
        self._own("x", x)
        if axis is None:
            return self.reshape(self.roll(self.reshape(x, (-1,)), shift, 0), x.dims)
        axes = _each(axis)
        shifts = tuple(map(as_plain, shift if isinstance(shift, Sequence) else (shift,) * len(axes)))
        if len(shifts) != len(axes) or not all(map(is_whole, shifts)):
            raise InvalidRequest(
                field="shift",
                value=shift,
                problem=f"is not a whole number for each of {len(axes)} dims",
                fix="give one for each dim, or one for all",
            )
        for given, by in zip(axes, shifts, strict=True):
            place = axis_of("axis", given, x.rank)
            moved = by % max(x.dims[place], 1)
            if moved:
                first, last = self.split(x, (x.dims[place] - moved, moved), place)
                x = self.concatenate((last, first), place)
        return x

    # Channels and space.

    def depth_to_space(self, x: Tensor, block: int, mode: Blocks = "DCR") -> Tensor:
        """x, dims N, C, H, W, with channels as squares of `block` * `block` elements: ONNX's DepthToSpace."""
        self._own("x", x)
        _check_image(x, mode)
        block = as_plain(block)
        _check_count("block", block, 1)
        n, c, h, w = x.dims
        _check_divides(block, block * block, c)
        if mode == "DCR":
            parts = self.reshape(x, (n, block, block, c // block**2, h, w))
            moved = self.transpose(parts, (0, 3, 4, 1, 5, 2))
        else:
            parts = self.reshape(x, (n, c // block**2, block, block, h, w))
            moved = self.transpose(parts, (0, 1, 4, 2, 5, 3))
        return self.reshape(moved, (n, c // block**2, h * block, w * block))

    def space_to_depth(self, x: Tensor, block: int, mode: Blocks = "DCR") -> Tensor:
        """The reverse of `depth_to_space`: squares of elements as channels. With DCR, ONNX's SpaceToDepth."""
        self._own("x", x)
        _check_image(x, mode)
        block = as_plain(block)
        _check_count("block", block, 1)
        n, c, h, w = x.dims
        for size in (h, w):
            _check_divides(block, block, size)
        parts = self.reshape(x, (n, c, h // block, block, w // block, block))
        moved = self.transpose(parts, (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4))
        return self.reshape(moved, (n, c * block**2, h // block, w // block))


def _each(given: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(given) if isinstance(given, Sequence) else (given,)


def _check_count(field: str, value: object, least: int) -> None:
    if not is_whole(value) or value < least:
        raise InvalidRequest(
            field=field,
            value=value,
            problem=f"must be a whole number ≥ {least}",
            fix=f"use {max(least, 2)}, for example",
        )


def _check_divides(block: int, divisor: int, size: int) -> None:
    if size % divisor:
        raise InvalidRequest(
            field="block",
            value=block,
            problem=f"needs a multiple of {divisor} where x has a dim of {size}",
            fix="choose another, or pad x first",
        )


def _check_image(x: Tensor, mode: str) -> None:
    require_choice("mode", mode, ("DCR", "CRD"))
    if x.rank != 4:
        raise InvalidRequest(
            field="x", value=x.dims, problem="is not of 4 dims", fix="give it dims N, C, H, W"
        )
