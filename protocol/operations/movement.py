"""Operations that move elements and compute nothing: reshape, transpose, slice, pad, concatenate, bit cast.

The results of reshapes, transposes and slices may lie in their operand's memory: `view` says how.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.operations.base import (
    ALLOCATED,
    Array,
    Operation,
    Region,
    Specs,
    T,
    axis_of,
    is_all,
    require,
)
from cudnn_actor.protocol.operations.example import Example
from cudnn_actor.protocol.types.checks import is_finite
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec, packed_strides

__all__ = ["BitCast", "BorderPad", "Concat", "Pad", "PadMode", "Reshape", "Slice", "Transpose"]


class Placed(NamedTuple):
    """How a result lies in its operand's memory: its strides, perhaps negative, and its first element."""

    strides: tuple[int, ...]
    offset: int = 0


class Movement(Operation[T], tag=True):
    """The base of the operations that move elements: one operand x, one result y of its dtype."""

    inputs = ("x",)
    outputs = ("y",)
    takes_empty = True
    x: T
    y: T = ALLOCATED

    def compute(self, dtypes: tuple[Any, ...]) -> Any:
        """The operand's own type: nothing is computed."""
        return dtypes[0]

    def view(self, dims: tuple[int, ...], strides: tuple[int, ...]) -> Placed | None:
        """The place of the result in an operand of these dims and strides; None if it must be copied."""
        del dims, strides
        return None

    def _check_axes(self, x: TensorSpec, *names: str) -> None:
        """Raise `InvalidRequest` unless these fields have a number for each axis of x."""
        for name in names:
            if len(getattr(self, name)) != x.rank:
                raise InvalidRequest(
                    field=name,
                    value=getattr(self, name),
                    problem=f"do not have a number for each of the {x.rank} axes of x",
                    fix="give one for each axis",
                )


class Reshape(Movement[T], tag=True):
    """x with other dims, its elements in the order of their indices, the last fastest. As NumPy's `reshape`.

    Parameters
    ----------
    dims
        The result's, of as many elements as x has. None is -1.
    """

    kind = "reshape"
    dims: tuple[int, ...]

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        x = specs["x"]
        if math.prod(self.dims) != math.prod(x.dims) or any(dim < 0 for dim in self.dims):
            raise InvalidRequest(
                field="dims",
                value=self.dims,
                problem=f"do not have the {math.prod(x.dims):,} elements of x, of dims {x.dims}",
                fix="choose dims with the same product",
            )
        return {"y": TensorSpec.packed(self.dims, x.dtype)}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        x: Any = self.x
        return {"x": g.reshape(d["y"], x.dims)}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        return {"y": xp.reshape(values["x"], self.dims)}

    def view(self, dims: tuple[int, ...], strides: tuple[int, ...]) -> Placed | None:
        """Possible where each dim of the result is part of one run of x's dims that lie behind each other."""
        if 0 in dims:
            return Placed(packed_strides(self.dims))
        old = [(dim, stride) for dim, stride in zip(dims, strides, strict=True) if dim != 1]
        runs: list[tuple[int, int]] = []
        for dim, stride in old:
            if runs and runs[-1][1] == dim * stride:
                runs[-1] = (runs[-1][0] * dim, stride)
            else:
                runs.append((dim, stride))
        found: list[int] = []
        for dim in reversed(self.dims):
            if dim == 1:
                found.append(found[-1] if found else 1)
                continue
            if not runs or runs[-1][0] % dim:
                return None
            size, stride = runs.pop()
            found.append(stride)
            if size != dim:
                runs.append((size // dim, stride * dim))
        return Placed(tuple(reversed(found)))


class Transpose(Movement[T], tag=True):
    """x with its axes in another order. As NumPy's `transpose`.

    Parameters
    ----------
    axes
        For each dim of the result, which dim of x it is.
    """

    kind = "transpose"
    axes: tuple[int, ...]

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        x = specs["x"]
        if sorted(self.axes) != list(range(x.rank)):
            raise InvalidRequest(
                field="axes",
                value=self.axes,
                problem=f"are not the {x.rank} axes of x in some order",
                fix=f"use each number from 0 to {x.rank - 1} once",
            )
        return {"y": TensorSpec.packed(tuple(x.dims[axis] for axis in self.axes), x.dtype)}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        return {"x": g.transpose(d["y"], [self.axes.index(axis) for axis in range(len(self.axes))])}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        return {"y": xp.transpose(values["x"], self.axes)}

    def view(self, dims: tuple[int, ...], strides: tuple[int, ...]) -> Placed:
        del dims
        return Placed(tuple(strides[axis] for axis in self.axes))


class Slice(Movement[T], tag=True):
    """Evenly spaced elements of x, `x[start::step]` along each axis, as many as the result has.

    Parameters
    ----------
    starts, steps, sizes
        For each axis: the first index, from 0, if there is one; the distance of two, not 0; how many.
    """

    kind = "slice"
    starts: tuple[int, ...]
    steps: tuple[int, ...]
    sizes: tuple[int, ...]

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        x = specs["x"]
        self._check_axes(x, "starts", "steps", "sizes")
        for axis, (start, step, size) in enumerate(zip(self.starts, self.steps, self.sizes, strict=True)):
            last = start + (size - 1) * step
            inside = size == 0 or (0 <= start < x.dims[axis] and 0 <= last < x.dims[axis])
            if size < 0 or step == 0 or not inside:
                raise InvalidRequest(
                    field="starts",
                    value=start,
                    problem=f"with {size} elements in steps of {step} leaves axis {axis} of dims {x.dims}",
                    fix=f"stay from 0 to {x.dims[axis] - 1}",
                )
        return {"y": TensorSpec.packed(self.sizes, x.dtype)}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        x: Any = self.x
        if 0 in self.sizes:
            return {}
        along = zip(self.starts, self.steps, self.sizes, strict=True)
        last = [start + (size - 1) * step for start, step, size in along]
        before = tuple(map(min, self.starts, last))
        after = tuple(dim - 1 - max(ends) for dim, *ends in zip(x.dims, self.starts, last, strict=True))
        return {"x": g.apply(Pad(x=d["y"], before=before, after=after, steps=self.steps))}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        x = values["x"]
        for axis, (start, step, size) in enumerate(zip(self.starts, self.steps, self.sizes, strict=True)):
            x = xp.take(x, xp.arange(size) * step + start, axis=axis)  # also of none
        return {"y": x}

    def view(self, dims: tuple[int, ...], strides: tuple[int, ...]) -> Placed | None:
        del dims
        if 0 in self.sizes:
            return Placed(packed_strides(self.sizes))
        offset = sum(start * stride for start, stride in zip(self.starts, strides, strict=True))
        return Placed(tuple(step * stride for step, stride in zip(self.steps, strides, strict=True)), offset)


class Pad(Movement[T], tag=True):
    """x with a number around its elements, and between them. As NumPy's `pad`, and the reverse of `Slice`.

    Parameters
    ----------
    before, after
        For each axis: how many elements lie before those of x, and behind them; at least 0.
    steps
        For each axis: the distance of two of x's elements in y, not 0; negative: they are in reverse.
    value
        What the other elements are: finite; a whole number in the dtype's range if that is of integers.
    """

    kind = "pad"
    before: tuple[int, ...]
    after: tuple[int, ...]
    steps: tuple[int, ...]
    value: float = 0.0

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        x = specs["x"]
        self._check_axes(x, "before", "after", "steps")
        _check_widths(self)
        if 0 in self.steps:
            raise InvalidRequest(
                field="steps", value=self.steps, problem="must not be 0", fix="use 1 for neighbours"
            )
        if not (is_finite(self.value) and x.dtype.holds(self.value)):
            raise InvalidRequest(
                field="value",
                value=self.value,
                problem=f"must be a finite number of {x.dtype}",
                fix="choose one that x could have",
            )
        along = zip(self.before, x.dims, self.steps, self.after, strict=True)
        dims = (b + ((size - 1) * abs(step) + 1 if size else 0) + a for b, size, step, a in along)
        return {"y": TensorSpec.packed(tuple(dims), x.dtype)}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        x: Any = self.x
        along = list(zip(self.before, self.steps, x.dims, strict=True))
        starts = tuple(before + (size - 1) * max(-step, 0) for before, step, size in along)
        return {"x": g.apply(Slice(x=d["y"], starts=starts, steps=self.steps, sizes=x.dims))}

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region] | None:
        """Not a part along an axis that has a number around or between x's elements."""
        axes = zip(specs["y"].dims, wanted["y"], self.before, self.after, self.steps, strict=True)
        found = []
        for size, cut, before, after, step in axes:
            is_kept = (before, after, step) == (0, 0, 1)
            if not is_kept and not is_all(size, cut):
                return None
            found.append(cut if is_kept else slice(None))
        return {"x": tuple(found)}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        x = values["x"]
        y = xp.full(specs["y"].dims, self.value, x.dtype)
        along = zip(self.before, self.after, self.steps, strict=True)
        inside = tuple(slice(before, -after or None, abs(step)) for before, after, step in along)
        y[inside] = x[tuple(slice(None, None, -1 if step < 0 else 1) for step in self.steps)]
        return {"y": y}


class PadMode(enum.StrEnum):
    """The elements of x that are placed around it, by NumPy's names. Of an axis with elements a b c:"""

    EDGE = "edge"
    """a a | a b c | c c: the outermost one."""
    REFLECT = "reflect"
    """c b | a b c | b a: mirrored at the outermost one, which is not repeated."""
    SYMMETRIC = "symmetric"
    """b a | a b c | c b: mirrored, with the outermost one repeated."""
    WRAP = "wrap"
    """b c | a b c | a b: those of the other end."""

    def places(self, xp: Any, size: int, before: int, after: int) -> Array:
        """The place among `size` elements of each element of an axis that has any number of them more."""
        places = xp.arange(-before, size + after)
        match self:
            case PadMode.EDGE:
                return xp.clip(places, 0, size - 1)
            case PadMode.WRAP:
                return places % size
            case PadMode.SYMMETRIC:
                places = places % (2 * size)
                return xp.minimum(places, 2 * size - 1 - places)
            case PadMode.REFLECT:
                places = places % max(2 * size - 2, 1)
                return xp.minimum(places, 2 * size - 2 - places)


class BorderPad(Movement[T], tag=True):
    """x with elements of its own around it. As NumPy's `pad`.

    Parameters
    ----------
    before, after
        For each axis: how many elements lie before those of x, and behind them; at least 0, and 0 where x has
        no elements.
    mode
        Which.
    """

    kind = "border_pad"
    before: tuple[int, ...]
    after: tuple[int, ...]
    mode: PadMode

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        x = specs["x"]
        self._check_axes(x, "before", "after")
        _check_widths(self)
        for before, size, after in zip(self.before, x.dims, self.after, strict=True):
            if size == 0 < before + after:
                raise InvalidRequest(
                    field="x",
                    value=x.dims,
                    problem="has no elements to put around it",
                    fix="leave that axis as it is, or pad it with a number",
                )
        along = zip(self.before, x.dims, self.after, strict=True)
        return {"y": TensorSpec.packed(tuple(map(sum, along)), x.dtype)}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        dx, x = d["y"], cast("Any", self.x)
        for axis, (before, size, after) in enumerate(zip(self.before, x.dims, self.after, strict=True)):
            if before + after:
                dx = self._gather_sums(g, dx, axis, before, size)
        return {"x": dx}

    def _gather_sums(self, g: Any, dy: Any, axis: int, before: int, size: int) -> Any:
        """The sums, along an axis, over all that each of x's elements became."""

        def part(x: Any, start: int, stop: int) -> Any:
            return g.slice(x, (*(slice(None),) * axis, slice(start, stop)))

        total = dy.dims[axis]
        if size == 1:
            return g.sum(dy, axis, keepdims=True)
        if self.mode is PadMode.EDGE:
            first, last = part(dy, 0, before + 1), part(dy, before + size - 1, total)
            inner = part(dy, before + 1, before + size - 1)
            return g.concatenate(
                (g.sum(first, axis, keepdims=True), inner, g.sum(last, axis, keepdims=True)), axis
            )
        period = {PadMode.WRAP: size, PadMode.SYMMETRIC: 2 * size, PadMode.REFLECT: 2 * size - 2}[self.mode]
        lead = -before % period
        widths = [(0, 0)] * len(dy.dims)
        widths[axis] = (lead, -(lead + total) % period)
        periods = g.pad(dy, widths)  # of whole periods, the first of which begins with x's first element
        count = periods.dims[axis] // period
        parts = g.reshape(periods, (*dy.dims[:axis], count, period, *dy.dims[axis + 1 :]))
        sums = g.sum(parts, axis)
        if self.mode is PadMode.WRAP:
            return sums
        mirrored = g.flip(part(sums, size, period), axis)
        if self.mode is PadMode.REFLECT:
            widths[axis] = (1, 1)
            mirrored = g.pad(mirrored, widths)
        return part(sums, 0, size) + mirrored

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        x = values["x"]
        for axis, (before, after) in enumerate(zip(self.before, self.after, strict=True)):
            if before + after:
                x = xp.take(x, self.mode.places(xp, x.shape[axis], before, after), axis=axis)
        return {"y": x}


class Concat(Operation[T], tag=True):
    """The operands, one behind the other along a dim. As NumPy's `concatenate`.

    Parameters
    ----------
    operands
        At least one, of the same dtype, and of the same dims but for that one, which may be 0.
    axis
        The dim, from 0.
    """

    kind = "concat"
    inputs = ("operands",)
    outputs = ("y",)
    takes_empty = True
    operands: tuple[T, ...]
    axis: int
    y: T = ALLOCATED

    def compute(self, dtypes: tuple[Any, ...]) -> Any:
        """The operands' own type: nothing is computed."""
        return dtypes[0]

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        if not specs:
            raise InvalidRequest(
                field="operands", value=(), problem="are none", fix="give at least one to concatenate"
            )
        first = specs["operands[0]"]
        axis = axis_of("axis", self.axis, first.rank)
        for name, spec in specs.items():
            if spec.dtype is not first.dtype:
                raise InvalidRequest(
                    field=name,
                    value=Words(spec.dtype),
                    problem=f"differs from the dtype of the first, {first.dtype}",
                    fix="convert one of them",
                )
            if spec.rank != first.rank or _without(spec.dims, axis) != _without(first.dims, axis):
                raise InvalidRequest(
                    field=name,
                    value=spec.dims,
                    problem=f"differs from dims {first.dims} in more than dim {axis}",
                    fix="give them all the same other dims",
                )
        size = sum(spec.dims[axis] for spec in specs.values())
        dims = (*first.dims[:axis], size, *first.dims[axis + 1 :])
        return {"y": TensorSpec.packed(dims, first.dtype)}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        operands: dict[str, Any] = dict(self.named(self.inputs))
        starts = self.starts([x.dims for x in operands.values()])
        axis = self.axis % len(d["y"].dims)
        before = (slice(None),) * axis
        return {
            name: g.slice(d["y"], (*before, slice(start, start + x.dims[axis])))
            for (name, x), start in zip(operands.items(), starts, strict=True)
        }

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        return {"y": xp.concatenate(list(values.values()), self.axis)}

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region]:
        (region,) = wanted.values()
        operands = dict(self.named(self.inputs))
        axis = self.axis % len(region)
        if region[axis] == slice(None):
            return dict.fromkeys(operands, region)
        first, step = region[axis].start or 0, region[axis].step or 1
        starts = self.starts([specs[name].dims for name in operands])
        firsts = (max((first - start) % step, first - start) for start in starts)
        return {
            name: (*region[:axis], slice(own, None, step), *region[axis + 1 :])
            for name, own in zip(operands, firsts, strict=True)
        }

    def starts(self, dims: Sequence[tuple[int, ...]]) -> list[int]:
        """The start of each operand's part along the dim. `dims`: of the operands."""
        sizes = [each[self.axis] for each in dims]
        return list(itertools.accumulate(sizes, initial=0))[:-1]


def _without(dims: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return dims[:axis] + dims[axis + 1 :]


def _check_widths(operation: Pad[Any] | BorderPad[Any]) -> None:
    for name in ("before", "after"):
        if min(getattr(operation, name), default=0) < 0:
            raise InvalidRequest(
                field=name,
                value=getattr(operation, name),
                problem="must not be negative",
                fix="to take elements away, use Slice; in a graph, x[1:-1]",
            )


class BitCast(Operation[T], tag=True):
    """y = the bits of x, read as another dtype of the same size. Answered by a `Receipt`.

    As NumPy's `view`; but NaN may become another NaN.

    Parameters
    ----------
    x
        Input, of any dims.
    y
        Result, of x's dims.
    source, dtype
        The dtypes of x and y, of the same size. y is not bool, which not all bits are.
    """

    kind = "bit_cast"
    inputs = ("x",)
    outputs = ("y",)
    takes_empty = True
    x: T
    y: T = ALLOCATED
    source: DType
    dtype: DType

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        x = specs["x"]
        require(specs, "x", x.dims, self.source)
        if self.dtype.itemsize != self.source.itemsize or self.dtype is DType.BOOL:
            fitting = [d for d in DType if d.itemsize == self.source.itemsize and d is not DType.BOOL]
            raise InvalidRequest(
                field="dtype",
                value=self.dtype,
                problem=f"is no dtype that the bits of {self.source} can be read as",
                fix=f"use {' or '.join(fitting)}",
            )
        return {"y": TensorSpec.packed(x.dims, self.dtype)}

    def compute(self, dtypes: tuple[DType, ...]) -> DType:
        """The result's: nothing is computed."""
        del dtypes
        return self.dtype

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region]:
        del specs
        return {"x": wanted["y"]}

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        """Bits of small numbers of y's dtype if that is of floats, which most integers' bits are not."""
        if not self.dtype.is_floating:
            return {}
        drawn = draw(specs["x"])
        bits = _bits(xp, abs(drawn) if self.source is DType.UINT64 else drawn, self.dtype)
        return {"x": _values(xp, bits, DType.INT64 if self.source is DType.UINT64 else self.source)}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        return {"y": _values(xp, _bits(xp, values["x"], self.source), self.dtype)}


def _bits(xp: Any, x: Array, dtype: DType) -> Array:
    """The bits of values of a dtype, as unsigned integers."""
    if dtype is DType.BFLOAT16:  # not a type of all libraries: the upper half of float32
        return (xp.ascontiguousarray(x.astype(xp.float32)).view(xp.uint32) >> 16).astype(xp.uint16)
    return xp.ascontiguousarray(x.astype(dtype.numpy)).view(f"u{dtype.itemsize}").reshape(x.shape)


def _values(xp: Any, bits: Array, dtype: DType) -> Array:
    """The values that bits mean, of the types that `evaluate` gives."""
    if dtype is DType.BFLOAT16:
        found = (bits.astype(xp.uint32) << 16).view(xp.float32)
    else:
        found = bits.view(dtype.value)
    return found.astype(xp.float64 if dtype.is_floating else found.dtype).reshape(bits.shape)


def examples() -> tuple[Example, ...]:
    """All of one tensor."""
    x, ones = (4, 6, 8), (1, 1, 1)
    operations = (
        Reshape(x="x", y="reshaped", dims=(24, 8)),
        Transpose(x="x", y="transposed", axes=(2, 0, 1)),
        Slice(x="x", y="sliced", starts=(0, 0, 0), steps=(2, 2, 2), sizes=(2, 3, 4)),
        Pad(x="x", y="padded", before=ones, after=(2, 2, 2), steps=(-1, -1, -1), value=5.0),
        BorderPad(x="x", y="bordered", before=(3, 3, 3), after=ones, mode=PadMode.REFLECT),
        Concat(operands=("x", "x"), y="joined", axis=1),
        BitCast(x="x", y="bits", source=DType.FLOAT32, dtype=DType.INT32),
    )
    return (Example(dims={"x": x}, operations=operations),)
