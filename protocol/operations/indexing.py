"""Reads and writes at places that indices name: gathers, and scatters, which are their reverse.

The definitions are ONNX's, of `Gather`, `GatherElements` and `GatherND`, and of `ScatterElements` and
`ScatterND`. `Scatter` is the reverse of `Gather`, which ONNX does not have.
https://onnx.ai/onnx/operators/onnx__GatherND.html
https://onnx.ai/onnx/operators/onnx__ScatterND.html

An index below 0 counts from the end. One that is still out of range counts as the nearest that is in range:
nothing is ever read or written outside of a tensor. ONNX and NumPy have an error there instead, which a
device could only raise after waiting for it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cudnn_actor.protocol.errors import InvalidRequest
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
from cudnn_actor.protocol.types.checks import is_whole, require_member
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Gather", "GatherElements", "GatherND", "Scatter", "ScatterElements", "ScatterND"]
__all__ += ["ScatterReduction"]

_SPREAD = 7919
"""A prime: its multiples, modulo a dim, are places all over it."""


class Places(NamedTuple):
    """The elements of x that indices select: for each place of the array that is read from x, or written to
    it.

    Parameters
    ----------
    dims
        The dims of the array that is read or written.
    own
        For each axis of x, the corresponding axis of these dims. None if an index selects it.
    of_indices
        For each axis of the indices, the corresponding axis of these dims; except for the axis along which
        the indices of several axes lie.
    stacked
        Whether the indices have such an axis, which is the last.
    """

    dims: tuple[int, ...]
    own: tuple[int | None, ...]
    of_indices: tuple[int, ...]
    stacked: bool = False

    @property
    def selected_axes(self) -> tuple[int, ...]:
        """The axes of x that indices select."""
        return tuple(axis for axis, own in enumerate(self.own) if own is None)

    def at(self, xp: Any, indices: Array, x: tuple[int, ...]) -> tuple[Any, ...]:
        """The index of an array of dims `x` that gives an array of `dims`."""
        arrays = [axis for axis, own in enumerate(self.own) if own is None or own in self.of_indices]
        first, last = min(arrays), max(arrays) + 1
        block = [own for own in self.own[first:last] if own is not None]
        axes = sorted({*block, *self.of_indices})

        def along(values: Array, of: Sequence[int], sizes: Sequence[int]) -> Array:
            known = dict(zip(of, sizes, strict=True))
            return values.reshape([known.get(axis, 1) for axis in axes])

        parts = [indices[..., n] for n in range(len(self.selected_axes))] if self.stacked else [indices]
        found: list[Any] = [slice(None)] * first
        for axis in range(first, last):
            own, size = self.own[axis], x[axis]
            if own is None:
                place = parts.pop(0)
                place = xp.clip(xp.where(place < 0, place + size, place), 0, size - 1)
                found.append(along(place, self.of_indices, place.shape))
            else:
                found.append(along(xp.arange(self.dims[own]), [own], [self.dims[own]]))
        return tuple(found)


class _Indexed(Operation[T]):
    takes_empty = True
    _places: ClassVar[Callable[[Any, tuple[int, ...], tuple[int, ...]], Places]]
    """How indices select: along an axis, element by element, or as lists."""

    def places(self, x: tuple[int, ...], indices: tuple[int, ...]) -> Places:
        """The elements of a tensor of dims `x` that indices of these dims select. Raises `InvalidRequest`."""
        return self._places(x, indices)

    def _attributes(self) -> dict[str, Any]:
        """The fields that say where."""
        return {n: getattr(self, n) for n in ("axis", "batch_dims") if hasattr(self, n)}

    def _check_places(self, specs: Specs) -> Places:
        """The places. Raises `InvalidRequest` if there are none."""
        x, indices = specs["x"], specs["indices"]
        require(specs, "indices", indices.dims, DType.INT32, DType.INT64)
        places = self.places(x.dims, indices.dims)
        if 0 not in places.dims and 0 in (x.dims[axis] for axis in places.selected_axes):
            raise InvalidRequest(
                field="x",
                value=x.dims,
                problem="has no element that an index could select",
                fix="give the dims that are selected from at least 1 element",
            )
        return places

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        """Indices all over x; some of them are equal."""
        x, indices = specs["x"].dims, specs["indices"]
        places = self.places(x, indices.dims)
        sizes = xp.asarray([max(x[axis], 1) for axis in places.selected_axes], dtype=xp.int64)
        count = math.prod(indices.dims)
        steps = (xp.arange(count, dtype=xp.int64) // 2 * _SPREAD).reshape(indices.dims)
        return {
            "indices": (steps + draw(indices).astype(xp.int64) + 3) % (sizes if places.stacked else sizes[0])
        }


def _along_axis(operation: Any, x: tuple[int, ...], indices: tuple[int, ...]) -> Places:
    axis = axis_of("axis", operation.axis, len(x))
    batch = _batch_dims(operation.batch_dims, x, indices, axis, len(indices))
    inner = len(indices) - batch
    own = (None if n == axis else n + (inner - 1) * (n > axis) for n in range(len(x)))
    of_indices = (*range(batch), *range(axis, axis + inner))
    return Places((*x[:axis], *indices[batch:], *x[axis + 1 :]), tuple(own), of_indices)


def _of_elements(operation: Any, x: tuple[int, ...], indices: tuple[int, ...]) -> Places:
    axis = axis_of("axis", operation.axis, len(x))
    fits = len(indices) == len(x) and all(
        size <= of_x or n == axis for n, (size, of_x) in enumerate(zip(indices, x, strict=True))
    )
    if not fits:
        raise InvalidRequest(
            field="indices",
            value=indices,
            problem=f"do not fit x, of dims {x}",
            fix=f"give them as many dims, none larger than x's but that along axis {axis}",
        )
    return Places(indices, tuple(None if n == axis else n for n in range(len(x))), tuple(range(len(x))))


def _of_lists(operation: Any, x: tuple[int, ...], indices: tuple[int, ...]) -> Places:
    batch = _batch_dims(operation.batch_dims, x, indices, len(x) - 1, len(indices) - 1)
    outer, count = len(indices) - 1, indices[-1] if indices else 0
    if not 1 <= count <= len(x) - batch:
        raise InvalidRequest(
            field="indices",
            value=indices,
            problem=f"do not have 1 to {len(x) - batch} elements along the last dim, for those of x",
            fix="give an index for each of the first dims of x behind batch_dims",
        )
    behind = batch + count
    own = (n if n < batch else None if n < behind else n - behind + outer for n in range(len(x)))
    return Places((*indices[:-1], *x[behind:]), tuple(own), tuple(range(outer)), stacked=True)


def _batch_dims(batch: int, x: tuple[int, ...], indices: tuple[int, ...], *most: int) -> int:
    if not is_whole(batch) or not 0 <= batch <= max(min(most), 0):
        raise InvalidRequest(
            field="batch_dims",
            value=batch,
            problem="is no number of first dims that both have before those with indices",
            fix=f"use one from 0 to {max(min(most), 0)}",
        )
    if x[:batch] != indices[:batch]:
        raise InvalidRequest(
            field="indices",
            value=indices,
            problem=f"do not begin with the first {batch} dims of x, {x[:batch]}",
            fix="give them, or use fewer batch_dims",
        )
    return batch


class Gathering(_Indexed[T]):
    """The base of the gathers: x, indices, and a result of x's dtype."""

    inputs = ("x", "indices")
    outputs = ("y",)
    x: T
    indices: T
    y: T = ALLOCATED

    def compute(self, dtypes: tuple[DType, ...]) -> DType:
        """The type of x: elements are moved as they are."""
        return dtypes[0]

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        return {"y": TensorSpec.packed(self._check_places(specs).dims, specs["x"].dtype)}

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region]:
        (region,) = wanted.values()
        places = self.places(specs["x"].dims, specs["indices"].dims)
        of_indices = tuple(region[own] for own in places.of_indices)
        return {
            "x": tuple(slice(None) if own is None else region[own] for own in places.own),
            "indices": (*of_indices, slice(None)) if places.stacked else of_indices,
        }

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        x: Any = self.x
        adding: Any = {"reduction": ScatterReduction.ADD, **self._attributes()}
        zeros = g.full(x.dims, 0.0, x.dtype)
        scatter = _REVERSE[type(self)](x=zeros, indices=self.indices, updates=d["y"], **adding)
        return {"x": g.apply(scatter)}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        x, indices = values["x"], values["indices"]
        if 0 in specs["y"].dims:
            return {"y": xp.zeros(specs["y"].dims, x.dtype)}
        return {"y": x[self.places(x.shape, indices.shape).at(xp, indices, x.shape)]}


class Gather(Gathering[T], tag=True):
    """y = slices of x along an axis, those that indices name. As NumPy's `take`. Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, of any dtype.
    indices
        Places along `axis`: int32 or int64, of any dims. Those below 0 count from the end; those out of range
        count as the nearest in range.
    y
        Result, of x's dtype: x's dims, with those of the indices, but for the first `batch_dims`, in the
        place of `axis`.
    axis
        The dim that is selected from; negative: from the end.
    batch_dims
        How many of the first dims x and the indices have in common: each sample has indices of its own.
    """

    kind = "gather"
    axis: int = 0
    batch_dims: int = 0
    _places = _along_axis


class GatherElements(Gathering[T], tag=True):
    """y = for each index, the element of x in its place, with it as the coordinate along an axis.

    As NumPy's `take_along_axis`, without broadcasting. Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, of any dtype.
    indices
        Places along `axis`, as in `Gather`: of x's rank, and of dims that are no larger than x's but for that
        along `axis`.
    y
        Result, of x's dtype and of the indices' dims.
    axis
        The dim that is selected from; negative: from the end.
    """

    kind = "gather_elements"
    axis: int = 0
    _places = _of_elements


class GatherND(Gathering[T], tag=True):
    """y = the parts of x that lists of indices name, one for each of its first dims. Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, of any dtype.
    indices
        Places, as in `Gather`: the last dim has those along the first dims of x behind `batch_dims`, as many
        as it is large.
    y
        Result, of x's dtype: the dims of the indices without the last, and those of x that have no index.
    batch_dims
        How many of the first dims x and the indices have in common.
    """

    kind = "gather_nd"
    batch_dims: int = 0
    _places = _of_lists


class ScatterReduction(enum.StrEnum):
    """How an element of x and the updates to it are combined."""

    NONE = "none"
    """It is the update. Of several, the last, in the order of the updates' indices."""
    ADD = "add"
    MUL = "mul"
    MIN = "min"
    """NaN if one of them is NaN, as for the largest."""
    MAX = "max"


_FUNCTIONS = {
    ScatterReduction.ADD: np.add,
    ScatterReduction.MUL: np.multiply,
    ScatterReduction.MIN: np.minimum,
    ScatterReduction.MAX: np.maximum,
}


class Scattering(_Indexed[T]):
    """The base of the scatters: x, indices, updates like what a gather with them gives, and a result."""

    inputs = ("x", "indices", "updates")
    outputs = ("y",)
    x: T
    indices: T
    updates: T
    y: T = ALLOCATED
    reduction: ScatterReduction = ScatterReduction.NONE

    def compute(self, dtypes: tuple[DType, ...]) -> DType:
        """The type of x where that is not computed with."""
        exact = self.reduction not in (ScatterReduction.ADD, ScatterReduction.MUL)
        return dtypes[0] if exact or not dtypes[0].is_floating else super().compute(dtypes[:1])

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        x = specs["x"]
        require_member("reduction", self.reduction, ScatterReduction)
        require(specs, "updates", self._check_places(specs).dims, x.dtype)
        return {"y": TensorSpec.packed(x.dims, x.dtype)}

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region] | None:
        x, region = specs["x"].dims, wanted["y"]
        places = self.places(x, specs["indices"].dims)
        if not all(is_all(x[axis], region[axis]) for axis in places.selected_axes):
            return None
        updates = [slice(None)] * len(places.dims)
        for part, own in zip(region, places.own, strict=True):
            if own is not None:  # there may be fewer updates than elements along it
                updates[own] = part
        indices = [updates[own] for own in places.of_indices]
        return {
            "x": region,
            "indices": (*indices, slice(None)) if places.stacked else tuple(indices),
            "updates": tuple(updates),
        }

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        if hasattr(
            xp, "asnumpy"
        ):  # CuPy: what it writes to one place is in no order, and it multiplies at none
            found = self.evaluate(np, {name: xp.asnumpy(value) for name, value in values.items()}, specs)
            return {"y": xp.asarray(found["y"])}
        y = np.array(values["x"], order="C")
        self.write(y, values["indices"], values["updates"])
        return {"y": y}

    def write(self, y: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> None:
        """Change what has x's values into the result. Arrays are NumPy's."""
        if not updates.size:
            return
        # The last of several updates wins only where NumPy goes through them in this order.
        indices, updates = (np.asarray(values, order="C") for values in (indices, updates))
        self.write_at(y, self.places(y.shape, indices.shape).at(np, indices, y.shape), updates)

    def write_at(self, y: np.ndarray, at: Any, updates: np.ndarray) -> None:
        """Change the elements of `y[at]`, one after the other in C order, which `at` and the updates have."""
        if self.reduction is ScatterReduction.NONE:
            y[at] = updates
        else:
            _FUNCTIONS[self.reduction].at(y, at, updates)

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        """Equal elements of a smallest or largest one have equal shares."""
        x: Any = self.x
        updates: Any = self.updates
        dy, wide = d["y"], super().compute((x.dtype,))

        def scatter(to: Any, of: Any, reduction: ScatterReduction) -> Any:
            where: Any = {"indices": self.indices, "reduction": reduction, **self._attributes()}
            return g.apply(type(self)(x=to, updates=of, **where))

        def gather(of: Any) -> Any:
            where: Any = {"indices": self.indices, **self._attributes()}
            return g.apply(_GATHERS[type(self)](x=of, **where))

        match self.reduction:
            case ScatterReduction.ADD:
                return {"x": dy, "updates": gather(dy)}
            case ScatterReduction.NONE:
                numbers = g.cumsum(g.full((math.prod(updates.dims),), 1, DType.INT64), 0)
                numbers = numbers.reshape(updates.dims)
                last = scatter(g.full(x.dims, 0, DType.INT64), numbers, ScatterReduction.NONE)
                of_updates = g.where(g.equal(gather(last), numbers), gather(dy), 0.0)
                return {"x": g.where(g.equal(last, 0), dy, 0.0), "updates": of_updates}
            case ScatterReduction.MUL:
                own, each = (_Factors(g, of, wide) for of in (x, updates))
                zeros, rest = (
                    scatter(getattr(own, name), getattr(each, name), ScatterReduction.ADD)
                    for name in ("zeros", "small")
                )
                others = dy * scatter(own.large, each.large, ScatterReduction.MUL)
                of_updates = each.gradient(gather(zeros), gather(rest), gather(others))
                return {"x": own.gradient(zeros, rest, others), "updates": of_updates}
        y: Any = self.y
        best_x, best = g.equal(x, y), g.equal(updates, gather(y))
        share = dy / scatter(best_x.astype(wide), best.astype(wide), ScatterReduction.ADD)
        return {"x": g.where(best_x, share, 0.0), "updates": g.where(best, gather(share), 0.0)}


class _Factors:
    """The factors of products, and their gradients, which have gradients where factors are 0, too.

    `large` are the factors with 1 in place of those that are 0; `small` are those, with 0 in place of the
    rest; `zeros` is 1 where a factor is 0. All are of a wide type.
    """

    def __init__(self, g: Any, factors: Any, wide: DType) -> None:
        self._g = g
        self._zero = g.equal(factors, 0.0)
        self.large = g.where(self._zero, 1.0, factors).astype(wide)
        self.small = g.where(self._zero, factors, 0.0).astype(wide)
        self.zeros = self._zero.astype(wide)

    def gradient(self, zeros: Any, rest: Any, others: Any) -> Any:
        """The gradients, for each factor from what its product has.

        Where one other factor is 0, the product of all others has that as a factor: its value is 0, and its
        derivative is not.

        Parameters
        ----------
        zeros, rest
            The sums of `zeros` and of `small` over the product's factors.
        others
            The product's gradient times the product of `large`.
        """
        g, product = self._g, others / self.large
        of_one = g.where(g.equal(zeros - self.zeros, 1.0), product * (rest - self.small), 0.0)
        return g.where(g.equal(zeros, self.zeros), product, of_one)


class Scatter(Scattering[T], tag=True):
    """y = x with slices along an axis changed, those that indices name. Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, of any dtype.
    indices, axis, batch_dims
        As in `Gather`.
    updates
        What is written: of x's dtype, and of the dims of a `Gather` from x.
    y
        Result, of x's dims and dtype.
    reduction
        What becomes of an element that is written to: see `ScatterReduction`.
    """

    kind = "scatter"
    axis: int = 0
    batch_dims: int = 0
    _places = _along_axis


class ScatterElements(Scattering[T], tag=True):
    """y = x with elements changed, those with an index as the coordinate along an axis.

    As NumPy's `put_along_axis`. Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, of any dtype.
    indices, axis
        As in `GatherElements`.
    updates
        What is written: of x's dtype and the indices' dims.
    y
        Result, of x's dims and dtype.
    reduction
        What becomes of an element that is written to: see `ScatterReduction`.
    """

    kind = "scatter_elements"
    axis: int = 0
    _places = _of_elements


class ScatterND(Scattering[T], tag=True):
    """y = x with parts changed, those that lists of indices name. Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, of any dtype.
    indices, batch_dims
        As in `GatherND`.
    updates
        What is written: of x's dtype, and of the dims of a `GatherND` from x.
    y
        Result, of x's dims and dtype.
    reduction
        What becomes of an element that is written to: see `ScatterReduction`.
    """

    kind = "scatter_nd"
    batch_dims: int = 0
    _places = _of_lists


_REVERSE: dict[type, Any] = {Gather: Scatter, GatherElements: ScatterElements, GatherND: ScatterND}
_GATHERS = {scatter: gather for gather, scatter in _REVERSE.items()}


def examples() -> tuple[Example, ...]:
    """Rows, elements and parts of rows, read and written at the indices of one tensor."""
    sums, largest = ScatterReduction.ADD, ScatterReduction.MAX
    operations = (
        Gather(x="x", indices="indices", y="rows"),
        GatherElements(x="x", indices="indices", y="elements"),
        GatherND(x="x", indices="indices", y="parts"),
        Scatter(x="x", indices="indices", updates="rows", y="written"),
        ScatterElements(x="x", indices="indices", updates="elements", y="sums", reduction=sums),
        ScatterND(x="x", indices="indices", updates="parts", y="largest", reduction=largest),
    )
    dims = {"x": (20, 24, 6), "indices": (9, 2, 2)}
    return (Example(dims=dims, dtypes={"indices": DType.INT32}, operations=operations),)
