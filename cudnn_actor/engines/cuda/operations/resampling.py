"""Resampling on CUDA: a kernel of our own, whose threads have up to 8 neighbours of the result each.

What an element is made of along each dim comes from tables, which the host computes
once. Neighbours that are the same along all dims that change are read at once. Where
the dim whose elements lie side by side changes, the tables mostly repeat themselves,
as for images twice as large: then a thread knows what its neighbours are made of
from its source, and reads each element of x once. Sums have the same order in all
cases. The gradient has the transposed lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.indexing import Walk, launcher
from cudnn_actor.engines.cuda.operations.lines import beginning, compiled, value_of
from cudnn_actor.engines.cuda.operations.lines import rounded as stored
from cudnn_actor.engines.cuda.plans.kernels import C_TYPES
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.operations import GraphTensor, Resample, ResampleBackward, ResampleMode
from cudnn_actor.protocol.operations.resampling import Lists, Taps

__all__ = ["resample_kernel", "resample_source"]

Resampling = Resample[int] | ResampleBackward[int]
_FEW = 1 << 30
"""Numbers below this, and sums of two of them, fit into 32 bits."""
_PACK_BYTES, _MOST_TOGETHER = 16, 8
_MOST_WINDOW = 32
"""The most elements of x that a thread reads for its neighbours' sake."""
_MOST_UNROLLED = 128
"""Loops of so many steps, one in another, are unrolled. The compiler takes minutes for thousands."""


class _Pattern(NamedTuple):
    """What neighbours are made of along a dim, if it is the same for all groups of so many.

    `step`: how many elements of x groups are apart. `places`: of each neighbour's taps, after the group's
    first one. `weights`: theirs.
    """

    step: int
    first: int
    places: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]

    @property
    def window(self) -> int:
        """How many elements of x, from `first` on, a group is made of."""
        return 1 + max(max(places) for places in self.places)


class _Kernel:
    """What the kernel is made of."""

    def __init__(self, operation: Resampling, tensors: Sequence[GraphTensor]) -> None:
        self.operation = operation
        self.x, self.y = tensors
        self.forward = isinstance(operation, Resample)
        self.floats: Any = np.float64 if self.x.dtype is DType.FLOAT64 else np.float32
        self.taps = operation.taps((self.x if self.forward else self.y).dims)
        """Of each dim that changes."""

    @cached_property
    def lists(self) -> Mapping[int, Lists]:
        """For each dim that changes. The places of elements outside are negative."""
        if not self.forward:
            return {axis: of.transposed(self.y.dims[axis]) for axis, of in self.taps.items()}
        inside = {
            axis: of._replace(places=np.where(of.outside[:, None], -1, of.places))
            for axis, of in self.taps.items()
        }
        return {axis: of.lists() for axis, of in inside.items()}

    @cached_property
    def fastest(self) -> int:
        """The dim along which the result's elements lie side by side; -1 if there is none."""
        steps = zip(self.y.strides, self.y.dims, strict=True)
        return next((axis for axis, (step, size) in enumerate(steps) if step == 1 < size), -1)

    @cached_property
    def together(self) -> int:
        """How many neighbours a thread has."""
        x, y, axis = self.x, self.y, self.fastest
        if not self.forward or axis < 0:
            return 1
        alike = axis not in self.taps
        if alike and x.strides[axis] != 1:
            return 1
        apart = [step for n, step in enumerate(y.strides) if n != axis and y.dims[n] > 1]
        if alike:
            apart += [step for n, step in enumerate(x.strides) if n != axis and x.dims[n] > 1]
        count = min(_MOST_TOGETHER, 2 * _PACK_BYTES // y.dtype.itemsize)
        while count > 1:
            nbytes = min(count * y.dtype.itemsize, _PACK_BYTES)
            aligned = y.alignment % nbytes == 0 and (not alike or x.alignment % nbytes == 0)
            if aligned and not any(step % count for step in (*apart, y.dims[axis])):
                return count
            count //= 2
        return 1

    @cached_property
    def pattern(self) -> _Pattern | None:
        """Of the neighbours of a thread, along the innermost of the dims that change."""
        if not self.forward or self.together == 1 or self.fastest != max(self.taps, default=-1):
            return None
        return _pattern(self.taps[self.fastest], self.x.dims[self.fastest], self.together, self.floats)

    @cached_property
    def walk(self) -> Walk:
        """Over groups of neighbours: where they are, and x but for the dims that change, and coordinates.

        The coordinate along a dim with a pattern is x's.
        """
        x, y = self.x, self.y
        own = [0 if axis in self.taps else step for axis, step in enumerate(x.strides)]
        places = {f"n{n}": [int(axis == of) for axis in range(len(y.dims))] for n, of in enumerate(self.taps)}
        walk = Walk.over("t", y.dims, y=y.strides, x=own, **places)
        if self.together == 1:
            return walk
        *slow, (size, steps) = walk.axes
        ahead = tuple(step * self.together for step in steps)
        if self.pattern is not None:
            ahead = (*ahead[:-1], self.pattern.step)
        return walk._replace(axes=(*slow, (size // self.together, ahead)))

    @cached_property
    def wide(self) -> bool:
        """Whether places need 64 bits."""
        span = sum((size - 1) * step for size, step in zip(self.x.dims, self.x.strides, strict=True))
        return max(self.walk.span, span, *(len(of.places) for of in self.lists.values())) >= _FEW

    @property
    def count(self) -> int:
        """How many dims change."""
        return len(self.taps)

    @property
    def steps(self) -> int:
        """How many products a thread adds up."""
        return self.together * math.prod(int(of.places.shape[1]) for of in self.taps.values())

    def tables(self) -> list[np.ndarray]:
        """The kernel's, for each dim that changes but one with a pattern."""
        found: list[np.ndarray] = []
        kind = np.int64 if self.wide else np.int32
        for n, (axis, of) in enumerate(self.lists.items()):
            if not self.is_known(n):
                # Negative ones are outside.
                places = np.where(of.places < 0, -1, of.places * self.x.strides[axis])
                found += [each.astype(kind) for each in (of.starts, places)]
                found.append(of.weights.astype(self.floats))
        return found

    def is_known(self, n: int) -> bool:
        """Whether there is a pattern along this one of the dims that change."""
        return self.pattern is not None and n == self.count - 1


def _pattern(taps: Taps, size: int, together: int, floats: Any) -> _Pattern | None:
    """What each group of neighbours is made of, if that is the same but where places end at x's ends."""
    places = taps.places.reshape(-1, together, taps.places.shape[1])
    weights = taps.weights.astype(floats).reshape(places.shape)
    groups, middle = len(places), len(places) // 2
    if taps.outside.any() or groups < 2 or (weights != weights[0]).any():
        return None
    step = int(places[middle, 0, 0] - places[middle - 1, 0, 0])
    ahead = places[middle] - step * middle
    found = np.clip(step * np.arange(groups)[:, None, None] + ahead, 0, size - 1)
    first = int(ahead.min())
    if (found != places).any() or ahead.max() - first >= _MOST_WINDOW:
        return None
    return _Pattern(
        step,
        first,
        tuple(map(tuple, (ahead - first).tolist())),
        tuple(map(tuple, weights[0].tolist())),
    )


def resample_kernel(
    operation: Resampling, tensors: Sequence[GraphTensor], handle: Any
) -> Callable[[Sequence[int]], None]:
    """The launch of a resampling; see `operations.Launcher`."""
    del handle
    cupy = libraries().cupy
    made = _Kernel(operation, tensors)
    kernel = compiled(resample_source(operation, tensors), "resample", cupy, "--fmad=false")
    arguments: list[Any] = [cupy.asarray(each) for each in made.tables()]
    cupy.cuda.get_current_stream().synchronize()  # other streams read them, too
    if made.pattern is not None:
        arguments += [made.x.dims[made.fastest], made.x.strides[made.fastest]]
    arguments.append(made.floats(getattr(operation, "extrapolation", 0.0)))
    return launcher(kernel, made.walk.total, (*arguments, *made.walk.numbers))


def resample_source(operation: Resampling, tensors: Sequence[GraphTensor]) -> str:
    """The kernel in CUDA C++."""
    made = _Kernel(operation, tensors)
    element = C_TYPES[made.x.dtype]
    number = DType.FLOAT64 if made.x.dtype is DType.FLOAT64 else DType.FLOAT32
    tables = "".join(
        f"const I* __restrict__ starts{n}, const I* __restrict__ places{n}, "
        f"const T* __restrict__ weights{n}, "
        for n in range(made.count)
        if not made.is_known(n)
    )
    window = "long long size, long long step, " if made.pattern is not None else ""
    nearest = made.forward and made.operation.mode is ResampleMode.NEAREST
    body = _copied(made) if nearest else _summed(made)
    return f"""{beginning(number, wide=made.wide)}
typedef {element} E;
struct alignas({min(made.together * made.y.dtype.itemsize, _PACK_BYTES)}) Packed {{ E of[{made.together}]; }};
extern "C" __global__ void resample(
    const {element}* __restrict__ x, {element}* __restrict__ y, {tables}{window}T extrapolation,
    {made.walk.parameters}
) {{
    {made.walk.loop(f"Packed pack; {body} *(Packed*)(y + y_at) = pack;")}
}}
"""


def _number(made: _Kernel, n: int) -> str:
    """The C expression of the coordinate of the neighbour `v` along the dim of this number."""
    moved = made.together > 1 and [*made.taps][n] == made.fastest
    return f"(n{n}_at + v)" if moved else f"n{n}_at"


def _outside(made: _Kernel) -> str:
    """The C expression of whether the neighbour `v` has the other value."""
    numbers = [n for n, of in enumerate(made.taps.values()) if made.forward and of.outside.any()]
    found = [f"places{n}[starts{n}[{_number(made, n)}]] < 0" for n in numbers]
    return " || ".join(found) or "false"


def _each(made: _Kernel, text: str) -> str:
    """Statements for each neighbour `v`."""
    return f"""
    #pragma unroll
    for (int v = 0; v < {made.together}; ++v) {{ {text} }}"""


def _places(made: _Kernel, pattern: _Pattern) -> str:
    """Statements that say where what a thread's neighbours are made of lies along their dim."""
    return f"""I places[{pattern.window}];
    #pragma unroll
    for (int t = 0; t < {pattern.window}; ++t) {{
        const I place = n{made.count - 1}_at + t + ({pattern.first});
        places[t] = min(max(place, (I)0), (I)size - 1) * (I)step;
    }}"""


def _window(pattern: _Pattern, start: str) -> str:
    """Statements that read it."""
    return f"""E window[{pattern.window}];
    #pragma unroll
    for (int t = 0; t < {pattern.window}; ++t) window[t] = x[{start} + places[t]];"""


def _copied(made: _Kernel) -> str:
    """The statements of a resampling to the nearest, which moves bits."""
    numbers = range(made.count)
    places = [f"places{n}[{_number(made, n)}]" for n in numbers if not made.is_known(n)]
    at, outside = " + ".join(["x_at", *places]), _outside(made)
    filled = f"if ({outside}) pack.of[v] = {stored(made.y, 'extrapolation')}; else"
    if made.pattern is not None:
        read = "".join(f"pack.of[{v}] = window[{of[0]}]; " for v, of in enumerate(made.pattern.places))
        text = f"{_places(made, made.pattern)} {_window(made.pattern, 'at')} {read}"
        if outside == "false":
            return f"const I at = {at}; {text}"
        return f"if ({outside}) {{ {_each(made, filled + ' {}')} }} else {{ const I at = {at}; {text} }}"
    if made.together > 1 and made.fastest not in made.taps:
        whole = f"pack = *(const Packed*)(x + ({at}));"
        return (
            whole if outside == "false" else f"if ({outside}) {{ {_each(made, filled + ';')} }} else {whole}"
        )
    return _each(made, f"{filled} pack.of[v] = x[{at}];")


def _summed(made: _Kernel) -> str:
    """The statements of a resampling that adds up: the dims one in another, the last one innermost."""
    alike = made.together > 1 and made.fastest not in made.taps
    weight, at = (f"weight{made.count - 1} * ", f"at{made.count - 1}") if made.count else ("", "x_at")
    if alike:
        value = value_of(made.x, "some.of[v]")
        inner = (
            f"const Packed some = *(const Packed*)(x + {at}); {_each(made, f'sums[v] += {weight}{value};')}"
        )
    elif made.pattern is not None:
        inner = _patterned(made, made.pattern)
    else:
        inner = f"sums[v] += {weight}{value_of(made.x, f'x[{at}]')};"
    for n in reversed(range(made.count)):
        if not made.is_known(n):
            inner = _tabled(made, n, inner)
    outside, filled = _outside(made), "pack.of[v] = {};".format(stored(made.y, "sums[v]"))
    clear = _each(made, "sums[v] = 0;")
    if alike or made.pattern is not None:
        if outside != "false":
            inner = f"if ({outside}) {{ {_each(made, 'sums[v] = extrapolation;')} }} else {{ {inner} }}"
        known = "" if made.pattern is None else _places(made, made.pattern)
        inner = f"{clear} {known} {inner}"
    else:
        inner = _each(made, f"sums[v] = 0; if ({outside}) sums[v] = extrapolation; else {{ {inner} }}")
    return f"T sums[{made.together}]; {inner} {_each(made, filled)}"


def _before(n: int) -> tuple[str, str]:
    """The C expressions of the weight, times, and the place of what is around a dim."""
    return (f"weight{n - 1} * ", f"at{n - 1}") if n else ("", "x_at")


def _tabled(made: _Kernel, n: int, inner: str) -> str:
    """A loop over what an element is made of along a dim."""
    before, start = _before(n)
    number = _number(made, n)
    count = [*made.taps.values()][n].places.shape[1] if made.forward else 0
    first, last = f"starts{n}[{number}]", f"starts{n}[{number} + 1]"
    if count:  # of each element
        first, last = f"{number} * {count}", f"({number} + 1) * {count}"
    unrolled = "#pragma unroll" if count and made.steps <= _MOST_UNROLLED else "#pragma unroll 1"
    return f"""const I first{n} = {first}, last{n} = {last};
    {unrolled}
    for (I k{n} = first{n}; k{n} < last{n}; ++k{n}) {{
        if (weights{n}[k{n}] == 0) continue;
        const T weight{n} = {before}weights{n}[k{n}];
        const I at{n} = {start} + places{n}[k{n}];
        {inner}
    }}"""


def _patterned(made: _Kernel, pattern: _Pattern) -> str:
    """The sums of neighbours from what the source says."""
    before, start = _before(made.count - 1)
    kind = "" if made.floats is np.float64 else "f"
    sums = "".join(
        f"sums[{v}] += {before}{weight!r}{kind} * {value_of(made.x, f'window[{place}]')}; "
        for v, (places, weights) in enumerate(zip(pattern.places, pattern.weights, strict=True))
        for place, weight in zip(places, weights, strict=True)
        if weight
    )
    return f"{_window(pattern, start)} {sums}"
