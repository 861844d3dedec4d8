"""Definitions of operations as lists of NumPy calls that write to memory that is given to them.

`Operation.evaluate` defines an operation by expressions of arrays. Here it is called with arrays that have no
elements (`Recorded`). Each NumPy call on them is noted down as an instruction, with the place of its result.
The calls can then be made on real memory again and again. So a run allocates nothing, and evaluates no
expressions.

The calls of the definition must depend on dims and dtypes alone, not on elements, and it may use only
functions that are listed here. Any other definition raises `NotRecordable`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call
from cudnn_actor.engines.cpu.scratch import Bytes, Dims, footprint
from cudnn_actor.engines.scratch_places import Held, places

__all__ = ["NotRecordable", "Recorded", "Recording", "full"]

Array = npt.NDArray[Any]
_MOST_INSTRUCTIONS = 5000
"""The most instructions of a recording. An instruction has about 1 kB, takes 40 µs to be recorded, and 2 µs
to be bound."""


class NotRecordable(Exception):
    """Raised when a definition makes a call that cannot be recorded."""


@dataclass(frozen=True, eq=False)
class _Memory:
    """The memory of an input of the definition, or of an instruction's result."""

    number: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class _View:
    """An array in some memory. `offset` and `strides` are in bytes."""

    memory: _Memory
    offset: int
    dims: Dims
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    def on(self, memory: Bytes, places: Mapping[int, int]) -> Array:
        """The array in real memory. `places`: where each memory of the recording lies in `memory`."""
        offset = places[self.memory.number] + self.offset
        array: Array = np.ndarray(self.dims, self.dtype, memory, offset, self.strides)
        return array

    @property
    def fills_memory(self) -> bool:
        """Whether it has each byte of its memory once."""
        return math.prod(self.dims) * self.dtype.itemsize == self.memory.nbytes


Maker = Callable[..., Call]
"""Makes a call from the arrays that it reads and the array that it writes."""


@dataclass(frozen=True, eq=False)
class _Instruction:
    """A call.

    `inputs`: views, constants, and names of objects that exist only when the recording is bound.
    `elementwise`: whether the output may lie in the place of an input.
    """

    make: Maker
    inputs: tuple[_View | Array | str, ...]
    output: _View
    elementwise: bool = False

    @property
    def read(self) -> list[_View]:
        return [one for one in self.inputs if isinstance(one, _View)]


def _ufunc(ufunc: np.ufunc) -> Maker:
    return lambda *arrays: partial(ufunc, *arrays[:-1], out=arrays[-1])


def _copy(source: Array, into: Array) -> Call:
    return partial(np.copyto, into, source, "unsafe")


def _take(axis: int | None) -> Maker:
    return lambda source, indices, into: partial(source.take, indices, axis, into, "clip")


def _accumulate(ufunc: np.ufunc, axis: int) -> Maker:
    return lambda source, into: partial(ufunc.accumulate, source, axis, None, into)


def _reduce(ufunc: np.ufunc, axis: int) -> Maker:
    return lambda source, into: partial(ufunc.reduce, source, axis, out=into, keepdims=True)


def _sums(axis: int) -> Maker:
    return lambda source, starts, into: partial(np.add.reduceat, source, starts, axis, None, into)


def _fill(value: Any) -> Maker:
    return lambda into: partial(into.fill, value)


class Recording:
    """The recorded steps of a definition: instructions, and the memory between them.

    Inputs are in the memory before the first instruction, and results behind the last one.
    """

    def __init__(self) -> None:
        self._instructions: list[_Instruction] = []
        self._count = 0
        self._offsets: dict[int, int] | None = None
        self._nbytes = 0

    def new(self, dims: Dims, dtype: npt.DTypeLike, order: Sequence[int] | None = None) -> Recorded:
        """An array of undefined elements. `order`: its axes, those that lie farthest apart first."""
        dtype = np.dtype(dtype)
        strides, step = [0] * len(dims), dtype.itemsize
        for axis in reversed(range(len(dims)) if order is None else order):
            strides[axis] = step
            step *= dims[axis]
        memory = _Memory(self._count, math.prod(dims) * dtype.itemsize)
        self._count += 1
        return Recorded(self, _View(memory, 0, tuple(dims), tuple(strides), dtype))

    def note(
        self, make: Maker, inputs: Sequence[Any], output: Recorded, *, elementwise: bool = False
    ) -> None:
        """Add an instruction on arrays of this recording and constants."""
        if len(self._instructions) >= _MOST_INSTRUCTIONS:
            raise NotRecordable("too many instructions")
        views = tuple(one.view_ if isinstance(one, Recorded) else one for one in inputs)
        self._instructions.append(_Instruction(make, views, output.view_, elementwise))

    def finish(self, inputs: Sequence[Recorded], results: Sequence[Recorded]) -> None:
        """Give all arrays their places.

        `inputs` are written before the first instruction, and `results` read behind the last one.
        """
        first = {one.view_.memory.number: 0 for one in inputs}
        last: dict[int, int] = dict(first)
        sizes = {one.view_.memory.number: one.view_.memory.nbytes for one in inputs}
        for number, one in enumerate(self._instructions):
            for view in (*one.read, one.output):
                first.setdefault(view.memory.number, number)
                last[view.memory.number] = number
                sizes[view.memory.number] = view.memory.nbytes
        for result in results:
            last[result.view_.memory.number] = len(self._instructions)
        roots = self._memory_to_reuse(first, last)
        held: dict[int, Held] = {}
        for number, nbytes in sizes.items():
            root = roots.get(number, number)
            before = held.get(root)
            begin, end = first[number], last[number]
            if before is not None:
                begin, end = min(begin, before.first), max(end, before.last)
            held[root] = Held(root, footprint((max(nbytes, 1),), itemsize=1), begin, end)
        found, self._nbytes = places(list(held.values()))
        self._offsets = {number: found[roots.get(number, number)] for number in sizes}

    def _memory_to_reuse(self, first: Mapping[int, int], last: Mapping[int, int]) -> dict[int, int]:
        """The number of each result that is written over an input that nothing reads any more → the number of
        that input.

        An elementwise function may write to what it reads, element by element.
        """
        roots: dict[int, int] = {}
        for number, one in enumerate(self._instructions):
            into = one.output
            if not one.elementwise or first[into.memory.number] != number or not into.fills_memory:
                continue
            for view in one.read:
                same = view.dims == into.dims and view.strides == into.strides and view.fills_memory
                size = view.dtype.itemsize == into.dtype.itemsize
                ends = last[view.memory.number] == number
                alone = all(other.memory is not view.memory or other is view for other in one.read)
                if same and size and ends and alone:
                    roots[into.memory.number] = roots.get(view.memory.number, view.memory.number)
                    break
        return roots

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it needs."""
        return self._nbytes

    def on(
        self, memory: Bytes, named: Mapping[str, object]
    ) -> tuple[list[Call], Callable[[Recorded], Array]]:
        """The calls on this memory, which has at least `nbytes`, and a function that returns a recorded array
        as an array in it.

        `named`: the objects that instructions have only the names of.
        """
        offsets = self._offsets
        assert offsets is not None, "`finish` comes first"

        def in_memory(one: _View | Array | str) -> object:
            if isinstance(one, _View):
                return one.on(memory, offsets)
            return named[one] if isinstance(one, str) else one

        calls = [one.make(*map(in_memory, one.inputs), in_memory(one.output)) for one in self._instructions]
        return calls, lambda recorded: recorded.view_.on(memory, offsets)

    # Functions.

    def apply(self, ufunc: np.ufunc, inputs: Sequence[Any], out: Recorded | None = None) -> Recorded:
        """The result of an elementwise function."""
        if ufunc.nout != 1:
            raise NotRecordable(ufunc.__name__)
        kinds: Any = [type(x) if type(x) in (int, float) else x.dtype for x in map(_known_operand, inputs)]
        *wanted, result = ufunc.resolve_dtypes((*kinds, None))
        operands = [self._operand(x, dtype) for x, dtype in zip(inputs, wanted, strict=True)]
        dims = np.broadcast_shapes(*(operand.shape for operand in operands))
        if out is not None and (out.dtype != result or out.shape != dims):
            out[...] = self.apply(ufunc, operands)
            return out
        output = self.new(dims, result, _order(operands, dims)) if out is None else out
        self.note(_ufunc(ufunc), operands, output, elementwise=True)
        return output

    def _operand(self, x: Any, dtype: np.dtype[Any]) -> Any:
        """An operand in the dtype in which a function computes: NumPy would allocate memory for a
        conversion."""
        if isinstance(x, Recorded):
            return x if x.dtype == dtype else x.astype(dtype)
        return np.asarray(x, dtype)

    def where(self, condition: Any, a: Any, b: Any) -> Recorded:
        """The elements of a where the condition is true, else those of b, bit by bit."""
        dtype = np.result_type(
            *(x if type(x) in (int, float) else x.dtype for x in map(_known_operand, (a, b)))
        )
        first, second = (self._operand(x, dtype) for x in (a, b))
        bits = np.dtype(f"i{dtype.itemsize}")
        chosen = self._operand(condition, np.dtype(bool)).view(np.int8).astype(bits)
        dims = np.broadcast_shapes(chosen.shape, first.shape, second.shape)
        if _is_zero(second):
            found = first.view(bits) & np.negative(chosen)
        elif _is_zero(first):
            found = second.view(bits) & (chosen - 1)
        else:
            other = second.view(bits)
            found = ((first.view(bits) ^ other) & np.negative(chosen)) ^ other
        if found.shape != dims:
            raise NotRecordable("a choice of what is repeated")
        view: Recorded = found.view(dtype)
        return view

    def pad(self, x: Recorded, widths: Any, constant_values: Any = 0) -> Recorded:
        """An array with a constant around it."""
        widths = [*np.broadcast_to(np.asarray(widths), (x.ndim, 2)).tolist()]
        dims = tuple(before + size + after for size, (before, after) in zip(x.shape, widths, strict=True))
        if dims == x.shape:
            return x
        padded = self.new(dims, x.dtype, _order([x], x.shape))
        inside: list[slice] = []
        for (before, after), size in zip(widths, x.shape, strict=True):
            for part in (slice(0, before), slice(before + size, before + size + after)):
                if part.start < part.stop:
                    self.note(_fill(constant_values), (), padded[(*inside, part)])
            inside.append(slice(before, before + size))
        padded[tuple(inside)] = x
        return padded

    def take(self, x: Any, indices: Any, axis: int | None = None) -> Recorded:
        """Elements by their places, which must all exist. Places that are computed from operands must not be
        below 0."""
        if axis is None:
            x, axis = x.reshape(-1), 0
        axis %= x.ndim
        source = self.pack(x)
        places = self._operand(indices, np.dtype(np.intp))
        if isinstance(places, np.ndarray):
            places = _from_the_start(places, x.shape[axis])
        found = self.new((*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]), x.dtype)
        self.note(_take(axis), (source, self.pack(places)), found)
        return found

    def pack(self, x: Any) -> Any:
        """An array as it is if it lies in C order without gaps, else a copy that does."""
        if not isinstance(x, Recorded):
            return np.ascontiguousarray(x)
        if x.is_packed:
            return x
        copied = self.new(x.shape, x.dtype)
        copied[...] = x
        return copied

    def accumulate(self, ufunc: np.ufunc, x: Recorded, axis: int) -> Recorded:
        """Running sums or products, of the dtype that NumPy gives them."""
        x = self._operand(x, ufunc.accumulate(np.empty(0, x.dtype)).dtype)
        found = self.new(x.shape, x.dtype, _order([x], x.shape))
        self.note(_accumulate(ufunc, axis), (x,), found)
        return found

    def add_at(self, total: Recorded, at: Any, terms: Recorded) -> None:
        """Add terms to elements at constant places along the last dim that `at` names. Terms for the same
        place are added up first."""
        whole = at if isinstance(at, tuple) else (at,)
        *others, places = whole
        if not isinstance(places, np.ndarray) or places.ndim != 1 or others != [slice(None)] * len(others):
            raise NotRecordable("sums at arrays of places")
        axis, size = len(others), total.shape[len(others)]
        places = _from_the_start(places, size)
        order = np.argsort(places, kind="stable")
        if (order[1:] < order[:-1]).any():
            terms = self.take(terms, order, axis)
        found, starts = np.unique(places[order], return_index=True)
        dims = [*terms.shape]
        dims[axis] = len(found) + 1
        sums = self.new(tuple(dims), total.dtype)
        before = (slice(None),) * axis
        self.note(_sums(axis), (self.pack(terms), starts), sums[(*before, slice(0, -1))])
        sums[(*before, slice(-1, None))] = 0  # what is added where there are no terms
        of = np.full(size, len(found))
        of[found] = np.arange(len(found))
        total += self.take(sums, of, axis)

    def join(self, parts: Sequence[Any], axis: int) -> Recorded:
        """Arrays of one dtype side by side."""
        dtype = np.result_type(*(part.dtype for part in parts))
        dims = [*parts[0].shape]
        dims[axis] = sum(part.shape[axis] for part in parts)
        found, start = self.new(tuple(dims), dtype), 0
        for part in parts:
            end = start + part.shape[axis]
            at = [slice(None)] * len(dims)
            at[axis] = slice(start, end)
            found[tuple(at)] = part
            start = end
        return found


def _known_operand(x: Any) -> Any:
    """An operand of a known type: an array, or a number of Python's, bool as NumPy's."""
    if isinstance(x, bool):
        return np.bool_(x)
    if isinstance(x, (Recorded, np.ndarray, np.generic)) or type(x) in (int, float):
        return x
    raise NotRecordable(type(x).__name__)


def _from_the_start(places: Array, size: int) -> Array:
    """Constant places along a dim, of which NumPy counts those below 0 from its end."""
    if ((places < -size) | (places >= size)).any():
        raise NotRecordable("places that do not exist")
    found: Array = np.where(places < 0, places + size, places)
    return found


def _is_zero(x: Any) -> bool:
    """Whether all bits of a constant are 0."""
    return isinstance(x, np.ndarray) and x.ndim == 0 and not any(x.tobytes())


def _order(operands: Sequence[Any], dims: Dims) -> list[int]:
    """The axes of the first operand of these dims, those that lie farthest apart first, as NumPy chooses."""
    strides = next((x.view_.strides for x in operands if isinstance(x, Recorded) and x.shape == dims), None)
    if strides is None:
        return list(range(len(dims)))
    return sorted(range(len(dims)), key=lambda axis: -abs(strides[axis]))


class Recorded(np.lib.mixins.NDArrayOperatorsMixin):
    """An array without elements. Operations on it are noted in a recording."""

    __slots__ = ("_recording", "view_")
    __hash__ = object.__hash__

    def __init__(self, recording: Recording, view: _View) -> None:
        self._recording = recording
        self.view_ = view

    @property
    def shape(self) -> Dims:
        """The array's dims."""
        return self.view_.dims

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its elements."""
        return self.view_.dtype

    @property
    def ndim(self) -> int:
        """The number of its dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def is_packed(self) -> bool:
        """Whether it lies in C order, without gaps."""
        return self._empty().flags.c_contiguous

    def _empty(self) -> Array:
        """An array of its dims and strides whose elements are not to be used."""
        base = np.empty(0, np.uint8)
        return np.lib.stride_tricks.as_strided(base.view(self.dtype), self.shape, self.view_.strides)

    def _view_through(self, change: Callable[[Array], Array]) -> Recorded:
        """The view that `change` makes of this array. Raises `NotRecordable` if it makes a copy."""
        own = self._empty()
        seen = change(own)
        if seen is not own and not _shares(seen, own):
            raise NotRecordable("a copy")
        apart = seen.__array_interface__["data"][0] - own.__array_interface__["data"][0]
        view = _View(self.view_.memory, self.view_.offset + apart, seen.shape, seen.strides, seen.dtype)
        return Recorded(self._recording, view)

    def __getitem__(self, at: Any) -> Recorded:
        whole = at if isinstance(at, tuple) else (at,)
        if any(isinstance(one, np.ndarray) for one in whole):
            return self._take_at(whole)
        if any(isinstance(one, (Recorded, list)) for one in whole):
            raise NotRecordable("elements by arrays of places")
        return self._view_through(lambda array: array[(*whole, *(() if Ellipsis in whole else (Ellipsis,)))])

    def _take_at(self, at: Sequence[Any]) -> Recorded:
        """Elements by constant places along the last dims, each of which is like an axis of `numpy.ix_`."""
        first = next(axis for axis, one in enumerate(at) if isinstance(one, np.ndarray))
        found, along = self, at[first:]
        for axis, one in enumerate(along):
            dims = tuple(one.size if other == axis else 1 for other in range(len(along)))
            if not isinstance(one, np.ndarray) or one.shape != dims or len(at) != self.ndim:
                raise NotRecordable("elements by arrays of places")
            found = self._recording.take(found, one.reshape(-1), first + axis)
        return found[tuple(at[:first])]

    def __setitem__(self, at: Any, value: Any) -> None:
        into = self[at]
        if isinstance(value, Recorded):
            one, own = value.view_, into.view_
            if one.memory is own.memory and (one.offset, one.dims, one.strides) == (
                own.offset,
                own.dims,
                own.strides,
            ):
                return  # as in `x[at] += y`
            self._recording.note(_copy, (value,), into)
        elif isinstance(value, np.ndarray) and value.ndim:
            self._recording.note(_copy, (value,), into)
        else:
            self._recording.note(_fill(value), (), into)

    def astype(self, dtype: npt.DTypeLike, order: str = "K", *, copy: bool = True) -> Recorded:
        """A copy of another dtype."""
        del copy
        found = self._recording.new(self.shape, dtype, None if order == "C" else _order([self], self.shape))
        self._recording.note(_copy, (self,), found)
        return found

    def view(self, dtype: npt.DTypeLike) -> Recorded:
        """A view of the same bits as another dtype of the same size."""
        if np.dtype(dtype).itemsize != self.dtype.itemsize:
            raise NotRecordable("bits of another size")
        own = self.view_
        return Recorded(
            self._recording, _View(own.memory, own.offset, own.dims, own.strides, np.dtype(dtype))
        )

    def reshape(self, *dims: Any) -> Recorded:
        """An array of the same elements with other dims: a view, or a copy if there is no view."""
        wanted = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
        packed: Recorded = self._recording.pack(self)
        return packed._view_through(lambda array: array.reshape(wanted))

    def transpose(self, *axes: Any) -> Recorded:
        """A view with its axes in another order."""
        return self._view_through(lambda array: array.transpose(*axes))

    def copy(self) -> Recorded:
        """A copy."""
        return self.astype(self.dtype)

    def sum(self, axis: int, *, keepdims: bool) -> Recorded:
        """Sums of its own dtype along a dim that stays, with one place."""
        if not keepdims or self.dtype.kind != "f":
            raise NotRecordable("sums without a dim, or of numbers that NumPy adds in another dtype")
        dims = tuple(1 if number == axis else size for number, size in enumerate(self.shape))
        found = self._recording.new(dims, self.dtype, _order([self], self.shape))
        self._recording.note(_reduce(np.add, axis), (self,), found)
        return found

    def __pow__(self, power: Any) -> Any:
        """A power, with the shortcuts of NumPy's arrays."""
        if type(power) in (int, float) and self.dtype.kind == "f":
            short = {2: np.square, 0.5: np.sqrt, -1: np.reciprocal, 1: np.positive}.get(power)
            if short is not None:
                return self._recording.apply(short, [self])
        return super().__pow__(power)

    def __bool__(self) -> bool:
        raise NotRecordable("a question about elements")

    __int__ = __float__ = __index__ = __len__ = __iter__ = __bool__

    def __array__(self, *given: Any, **options: Any) -> Any:
        raise NotRecordable("an array of elements")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if (ufunc, method) == (np.add, "at"):
            return self._recording.add_at(*inputs)
        (out,) = options.pop("out", None) or (None,)
        if method != "__call__" or options or not isinstance(out, Recorded | None):
            raise NotRecordable(f"{ufunc.__name__}.{method}")
        return self._recording.apply(ufunc, inputs, out)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        del types
        known = _FUNCTIONS.get(function)
        if known is None:
            raise NotRecordable(function.__name__)
        return known(self._recording, *args, **options)


def _shares(seen: Array, own: Array) -> bool:
    """Whether an array is a view of another one, which has no memory, and no copy of it."""
    base: Any = seen
    while base is not None:
        if base is own:
            return True
        base = base.base
    return False


def _clip(recording: Recording, x: Any, low: Any, high: Any, out: Any = None) -> Recorded:
    return recording.apply(np.minimum, [np.maximum(x, low), high], out)


def _copyto(recording: Recording, into: Any, source: Any, casting: Any = None, where: Any = True) -> None:
    del casting
    into[...] = source if where is True else recording.where(where, source, into)


def _moveaxis(recording: Recording, x: Recorded, source: int, target: int) -> Recorded:
    del recording
    return x._view_through(lambda array: np.moveaxis(array, source, target))


def _stack(recording: Recording, parts: Sequence[Any], axis: int = 0) -> Recorded:
    axis %= parts[0].ndim + 1
    at = (*[slice(None)] * axis, None)
    return recording.join([part[at] for part in parts], axis)


def full(recording: Recording, dims: Any, value: Any, dtype: npt.DTypeLike) -> Recorded:
    """An array of one number."""
    found = recording.new((dims,) if isinstance(dims, int) else tuple(dims), dtype)
    found[...] = value
    return found


def _like(recording: Recording, x: Recorded, value: Any) -> Recorded:
    found = recording.new(x.shape, x.dtype, _order([x], x.shape))
    found[...] = value
    return found


_FUNCTIONS: Mapping[Hashable, Callable[..., Any]] = {
    np.where: Recording.where,
    np.pad: Recording.pad,
    np.take: Recording.take,
    np.clip: _clip,
    np.copyto: _copyto,
    np.moveaxis: _moveaxis,
    np.stack: _stack,
    np.concatenate: lambda recording, parts, axis=0: recording.join(parts, axis % parts[0].ndim),
    np.cumsum: lambda recording, x, axis: recording.accumulate(np.add, x, axis),
    np.cumprod: lambda recording, x, axis: recording.accumulate(np.multiply, x, axis),
    np.flip: lambda _, x, axis: x._view_through(lambda array: np.flip(array, axis)),
    np.zeros_like: lambda recording, x: _like(recording, x, 0),
    np.ones_like: lambda recording, x: _like(recording, x, 1),
    np.full_like: _like,
    np.broadcast_to: lambda _, x, dims: x._view_through(lambda array: np.broadcast_to(array, dims)),
}
