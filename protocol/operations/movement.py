"""Operations that move elements and compute nothing: reshape, transpose, slice, pad.

Each result but a padded one may lie in its operand's memory: `view` says how.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from cudnn_actor.protocol.checks import is_finite
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import ALLOCATED, Array, Operation, Specs, T
from cudnn_actor.protocol.tensor import TensorSpec

__all__ = ["Movement", "Pad", "Placed", "Reshape", "Slice", "Transpose"]


class Placed(NamedTuple):
    """How a result lies in its operand's memory: its strides, perhaps negative, and its first element."""

    strides: tuple[int, ...]
    offset: int = 0


class Movement(Operation[T], frozen=True, kw_only=True, tag=True):
    """The base of the operations that move elements: one operand x, one result y of its dtype."""

    inputs = ("x",)
    outputs = ("y",)
    x: T
    y: T = ALLOCATED

    def compute(self, dtypes: tuple[Any, ...]) -> Any:
        """The operand's own type: nothing is computed."""
        return dtypes[0]

    def view(self, dims: tuple[int, ...], strides: tuple[int, ...]) -> Placed | None:
        """Where the result lies in an operand of these dims and strides; None if it must be copied."""
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


class Reshape(Movement[T], frozen=True, kw_only=True, tag=True):
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


class Transpose(Movement[T], frozen=True, kw_only=True, tag=True):
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


class Slice(Movement[T], frozen=True, kw_only=True, tag=True):
    """Evenly spaced elements of x, `x[start::step]` along each axis, as many as the result has.

    Parameters
    ----------
    starts, steps, sizes
        For each axis: the first index, from 0; the distance of two, not 0; how many, at least 1.
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
            if size < 1 or step == 0 or not (0 <= start < x.dims[axis] and 0 <= last < x.dims[axis]):
                raise InvalidRequest(
                    field="starts",
                    value=start,
                    problem=f"with {size} elements in steps of {step} leaves axis {axis} of dims {x.dims}",
                    fix=f"stay from 0 to {x.dims[axis] - 1}",
                )
        return {"y": TensorSpec.packed(self.sizes, x.dtype)}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        x: Any = self.x
        along = zip(self.starts, self.steps, self.sizes, strict=True)
        last = [start + (size - 1) * step for start, step, size in along]
        before = tuple(map(min, self.starts, last))
        after = tuple(dim - 1 - max(ends) for dim, *ends in zip(x.dims, self.starts, last, strict=True))
        return {"x": g.apply(Pad(x=d["y"], before=before, after=after, steps=self.steps))}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        x = values["x"]
        for axis, (start, step, size) in enumerate(zip(self.starts, self.steps, self.sizes, strict=True)):
            x = xp.take(x, xp.arange(size) * step + start, axis=axis)
        return {"y": x}

    def view(self, dims: tuple[int, ...], strides: tuple[int, ...]) -> Placed | None:
        del dims
        offset = sum(start * stride for start, stride in zip(self.starts, strides, strict=True))
        return Placed(tuple(step * stride for step, stride in zip(self.steps, strides, strict=True)), offset)


class Pad(Movement[T], frozen=True, kw_only=True, tag=True):
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
        for name in ("before", "after"):
            if min(getattr(self, name), default=0) < 0:
                raise InvalidRequest(
                    field=name,
                    value=getattr(self, name),
                    problem="must not be negative",
                    fix="take elements away with Slice",
                )
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
        dims = (before + (size - 1) * abs(step) + 1 + after for before, size, step, after in along)
        return {"y": TensorSpec.packed(tuple(dims), x.dtype)}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        x: Any = self.x
        along = list(zip(self.before, self.steps, x.dims, strict=True))
        starts = tuple(before + (size - 1) * max(-step, 0) for before, step, size in along)
        return {"x": g.apply(Slice(x=d["y"], starts=starts, steps=self.steps, sizes=x.dims))}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        x = values["x"]
        y = xp.full(specs["y"].dims, self.value, x.dtype)
        along = zip(self.before, self.after, self.steps, strict=True)
        inside = tuple(slice(before, -after or None, abs(step)) for before, after, step in along)
        y[inside] = x[tuple(slice(None, None, -1 if step < 0 else 1) for step in self.steps)]
        return {"y": y}

    def inside(self, strides: tuple[int, ...]) -> Placed:
        """Where x lies in a result of these strides, from its first element in the result's order."""
        offset = sum(before * stride for before, stride in zip(self.before, strides, strict=True))
        return Placed(tuple(abs(step) * s for step, s in zip(self.steps, strides, strict=True)), offset)

    def turned(self, dims: tuple[int, ...], strides: tuple[int, ...]) -> Placed:
        """How x's elements lie in its memory, of these dims and strides, in the result's order."""
        along = list(zip(self.steps, dims, strides, strict=True))
        offset = sum((size - 1) * stride for step, size, stride in along if step < 0)
        return Placed(tuple(-stride if step < 0 else stride for step, _, stride in along), offset)
