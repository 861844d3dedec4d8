"""Operations that move elements and compute nothing: reshape, transpose, slice.

Each result may lie in its operand's memory: `view` says how.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import ALLOCATED, Array, Operation, Specs, T
from cudnn_actor.protocol.tensor import TensorSpec

__all__ = ["Movement", "Placed", "Reshape", "Slice", "Transpose"]


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
        raise NotImplementedError


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

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        return {"y": xp.transpose(values["x"], self.axes)}

    def view(self, dims: tuple[int, ...], strides: tuple[int, ...]) -> Placed | None:
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
        for name in ("starts", "steps", "sizes"):
            if len(getattr(self, name)) != x.rank:
                raise InvalidRequest(
                    field=name,
                    value=getattr(self, name),
                    problem=f"do not have a number for each of the {x.rank} axes of x",
                    fix="give one for each axis",
                )
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
