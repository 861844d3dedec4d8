"""Resampling on CUDA: a kernel of our own, in which a thread computes up to 8 neighbours of the result in a
row.

An element of the result is a sum of weighted elements of x. Their places and weights
along each resized dim come from tables, which the host computes once. If the innermost
dim is not resized, neighbours are read at once. If it is resized, its table mostly has
a repeating pattern, as for images twice as large: then places and weights are constants
in the source, and a thread reads each element of x once. If the resized dim before it has
a pattern, too, a thread computes neighbours in up to 4 rows. Sums have the same order in
all cases. The gradient has the transposed tables.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.engines.cuda.kernels.axes import Axis, extent
from cudnn_actor.engines.cuda.kernels.element_types import ACCESS_BYTES, C_TYPES
from cudnn_actor.engines.cuda.kernels.index_code import is_wide
from cudnn_actor.engines.cuda.kernels.kernel import ROUNDING, Launch, arguments_of, grid_over
from cudnn_actor.engines.cuda.kernels.lines import beginning, value_of
from cudnn_actor.engines.cuda.kernels.lines import stored_value as stored
from cudnn_actor.engines.cuda.kernels.walks import Walk
from cudnn_actor.engines.cuda.operations.implementation import implement, kernels
from cudnn_actor.protocol.operations import GraphTensor, Resample, ResampleBackward, ResampleMode
from cudnn_actor.protocol.operations.resampling import Lists, Taps
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["describe_resampling", "resample_launches"]

Resampling = Resample[int] | ResampleBackward[int]
_MOST_TOGETHER = 8
"""The most neighbours in a row that a thread computes."""
_ROWS = (4, 2)
"""The numbers of rows in which a thread computes neighbours: the first one that the tables allow."""
_MOST_WINDOW, _MOST_PRODUCTS = 48, 512
"""The most elements of x that a thread reads, and the most products in a source, if there are patterns."""
_MOST_UNROLLED = 128
"""The most steps of nested loops for which they are unrolled. The compiler takes minutes for thousands."""


class _Pattern(NamedTuple):
    """A repeating pattern along a dim: the elements of x and the weights of each group of neighbours.

    Parameters
    ----------
    groups
        The number of groups.
    step
        The distance in x of two neighbouring groups, in elements.
    first
        The first element of x that a group reads, counted from its number times the step.
    places
        The places of each neighbour's taps, counted from `first`.
    weights
        The weights of these taps.
    """

    groups: int
    step: int
    first: int
    places: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]

    @property
    def window(self) -> int:
        """The number of elements of x, from `first` on, that a group reads."""
        return 1 + max(max(places) for places in self.places)

    @property
    def taps(self) -> list[list[tuple[int, float]]]:
        """Each neighbour's places and weights."""
        return [[*zip(*of, strict=True)] for of in zip(self.places, self.weights, strict=True)]

    @property
    def products(self) -> int:
        """The number of products that a group adds up."""
        return sum(map(len, self.places))


_ALONE = _Pattern(groups=0, step=0, first=0, places=((0,),), weights=((1.0,),))
"""The pattern of groups of one neighbour that is one element of x, where there is no other pattern."""


@dataclass(frozen=True)
class ResamplingKernel:
    """The description of the kernel.

    Parameters
    ----------
    operation, x, y
        The operation, and its tensors.
    taps, lists
        For each resized dimension: the taps of its elements, and its table. The places of elements outside x
        are negative in tables.
    fastest
        The dimension along which the result's elements lie side by side; -1 if there is none.
    alike
        Whether neighbours in the result are neighbours in x, in the same order.
    together
        The number of neighbours in a row that a thread computes.
    columns, rows
        The repeating patterns along the innermost resized dimension and the second innermost one.
    piece
        The number of elements of a row of x that a thread reads at once, where there is a pattern.
    walk
        The walk over groups of neighbours: their offset in the result, the offset in x along the dimensions
        that are not resized, and a coordinate along each resized one: x's if that has a pattern.
    """

    operation: Resampling
    x: GraphTensor
    y: GraphTensor
    taps: Mapping[int, Taps]
    lists: Mapping[int, Lists]
    fastest: int
    alike: bool
    together: int
    columns: _Pattern | None
    rows: _Pattern
    piece: int
    walk: Walk

    @property
    def forward(self) -> bool:
        """Whether the operation is no gradient."""
        return isinstance(self.operation, Resample)

    @property
    def floats(self) -> Any:
        """NumPy's type of weights."""
        return _floats(self.x)

    @property
    def neighbours(self) -> int:
        """The number of elements of the result that a thread computes."""
        return self.together * len(self.rows.places)

    @property
    def wide(self) -> bool:
        """Whether places need 64 bits."""
        places = (len(of.places) for of in self.lists.values())
        return is_wide(self.walk.span, extent(self.x.dims, self.x.strides), *places, sums=True)

    @property
    def count(self) -> int:
        """The number of resized dimensions."""
        return len(self.taps)

    @property
    def steps(self) -> int:
        """The number of products that a thread adds up."""
        return self.neighbours * math.prod(int(of.places.shape[1]) for of in self.taps.values())

    @property
    def repeating(self) -> dict[int, _Pattern]:
        """The resized dimensions that have a repeating pattern, by number."""
        numbers = ((self.count - 2, self.rows), (self.count - 1, self.columns))
        return {n: of for n, of in numbers if of is not None and of is not _ALONE}

    def tables(self) -> list[np.ndarray]:
        """The tables of places and weights, for each resized dimension without a pattern."""
        found: list[np.ndarray] = []
        kind = np.int64 if self.wide else np.int32
        for n, (axis, of) in enumerate(self.lists.items()):
            if n not in self.repeating:
                places = np.where(of.places < 0, -1, of.places * self.x.strides[axis])
                found += [each.astype(kind) for each in (of.starts, places)]
                found.append(of.weights.astype(self.floats))
        return found


def describe_resampling(operation: Resampling, tensors: Sequence[GraphTensor]) -> ResamplingKernel:
    """Describe the kernel of an operation on these tensors."""
    x, y = tensors
    forward = isinstance(operation, Resample)
    taps = operation.taps((x if forward else y).dims)
    steps = enumerate(zip(y.strides, y.dims, strict=True))
    fastest = next((axis for axis, (step, size) in steps if step == 1 < size), -1)
    alike = fastest >= 0 and fastest not in taps and x.strides[fastest] == 1
    counts = _counts(x, y, fastest, alike=alike) if forward and (alike or fastest in taps) else []
    columns = _columns(x, taps, counts) if counts and fastest == max(taps, default=-1) else None
    rows = _ALONE if columns is None or len(taps) < 2 else _rows(x, taps, columns)
    together = next(iter(counts), 1) if columns is None else len(columns.places)
    return ResamplingKernel(
        operation=operation,
        x=x,
        y=y,
        taps=taps,
        lists={axis: _lists(of, None if forward else y.dims[axis]) for axis, of in taps.items()},
        fastest=fastest,
        alike=alike,
        together=together,
        columns=columns,
        rows=rows,
        piece=1 if columns is None else _piece(x, fastest, columns),
        walk=_walk(tensors, [*taps], together, columns, rows),
    )


def _floats(x: GraphTensor) -> Any:
    """NumPy's type of weights for elements of x."""
    return np.float64 if x.dtype is DType.FLOAT64 else np.float32


def _lists(taps: Taps, transposed: int | None) -> Lists:
    """A dimension's tables; `transposed`: the size of x's dimension, for a gradient."""
    if transposed is not None:
        return taps.transpose(transposed)
    return taps._replace(places=np.where(taps.outside[:, None], -1, taps.places)).lists()


def _fits(tensor: GraphTensor, fastest: int, count: int) -> bool:
    """Whether a thread can access `count` elements along the fastest dim at once, wherever they begin."""
    nbytes = min(count * tensor.dtype.itemsize, ACCESS_BYTES)
    of = enumerate(zip(tensor.dims, tensor.strides, strict=True))
    apart = (step for axis, (size, step) in of if axis != fastest and size > 1)
    return tensor.alignment % nbytes == 0 and not any(step % count for step in apart)


def _counts(x: GraphTensor, y: GraphTensor, fastest: int, *, alike: bool) -> list[int]:
    """The numbers of neighbours in a row that a thread can compute, the best first.

    Empty without a fastest dimension. A warp whose threads write 16 bytes each writes whole sectors of memory
    at once. Twice as many neighbours may have a pattern where these have none. Neighbours that are `alike`
    need no pattern; the more a thread has, the more arithmetic they share.
    """
    if fastest < 0:
        return []
    one = min(_MOST_TOGETHER, ACCESS_BYTES // y.dtype.itemsize)
    fewer = [one >> n for n in range(1, one.bit_length() - 1)]
    return [
        count
        for count in ([2 * one, one, *fewer] if alike else [one, 2 * one, *fewer])
        if 1 < count <= _MOST_TOGETHER
        and y.dims[fastest] % count == 0
        and all(_fits(tensor, fastest, count) for tensor in ((x, y) if alike else (y,)))
    ]


def _columns(x: GraphTensor, taps: Mapping[int, Taps], counts: Sequence[int]) -> _Pattern | None:
    """The repeating pattern along the innermost resized dimension, of groups of one of these sizes."""
    return next(_patterns(x, taps, -1, counts), None)


def _rows(x: GraphTensor, taps: Mapping[int, Taps], columns: _Pattern) -> _Pattern:
    """The repeating pattern along the second innermost resized dimension, if it is small enough."""
    window, products = _MOST_WINDOW // columns.window, _MOST_PRODUCTS // columns.products
    found = _patterns(x, taps, -2, _ROWS)
    return next((of for of in found if of.window <= window and of.products <= products), _ALONE)


def _patterns(
    x: GraphTensor, taps: Mapping[int, Taps], number: int, counts: Sequence[int]
) -> Iterator[_Pattern]:
    """Yields the patterns of groups of these sizes along a resized dimension, where there are any."""
    axis = [*taps][number]
    for count in counts:
        found = repeating_pattern(taps[axis], x.dims[axis], count, _floats(x))
        if found is not None:
            yield found


def _piece(x: GraphTensor, fastest: int, columns: _Pattern) -> int:
    """The number of elements of a row of x that a thread reads at once."""
    if x.strides[fastest] != 1 or columns.step * columns.groups > x.dims[fastest]:
        return 1
    counts = (ACCESS_BYTES // x.dtype.itemsize >> n for n in range(ACCESS_BYTES.bit_length()))
    return next(c for c in counts if c == 1 or (columns.step % c == 0 and _fits(x, fastest, c)))


def _walk(
    tensors: Sequence[GraphTensor],
    resized: Sequence[int],
    together: int,
    columns: _Pattern | None,
    rows: _Pattern,
) -> Walk:
    """The walk over groups of neighbours: see `ResamplingKernel`."""
    x, y = tensors
    own = [0 if axis in resized else step for axis, step in enumerate(x.strides)]
    places = {f"n{n}": [int(axis == of) for axis in range(len(y.dims))] for n, of in enumerate(resized)}
    walk = Walk.over("t", y.dims, y=y.strides, x=own, **places)
    axes = [*walk.axes]
    axes[-1] = _in_groups(axes[-1], together, columns, -1)
    if rows is not _ALONE:
        row = next(n for n, (_, steps) in enumerate(axes) if steps[-2])
        axes[row] = _in_groups(axes[row], len(rows.places), rows, -2)
    return walk._replace(axes=tuple(axes))


def _in_groups(axis: Axis, count: int, pattern: _Pattern | None, own: int) -> Axis:
    """An axis of the walk in groups of `count`. `own`: the index of the coordinate's among its steps."""
    size, steps = axis
    ahead = [step * count for step in steps]
    if pattern is not None:
        ahead[own] = pattern.step
    return size // count, tuple(ahead)


def repeating_pattern(taps: Taps, size: int, together: int, floats: Any) -> _Pattern | None:
    """The pattern of all groups of neighbours; None if they differ otherwise than at x's ends."""
    if len(taps.places) % together:
        return None
    places = taps.places.reshape(-1, together, taps.places.shape[1])
    weights = taps.weights.astype(floats).reshape(places.shape)
    groups, middle = len(places), len(places) // 2
    if taps.outside.any() or groups < 2 or (weights != weights[0]).any():
        return None
    step = int((places[middle] - places[middle - 1]).max())  # at x's ends, places are closer
    ahead = places[middle] - step * middle
    found = np.clip(step * np.arange(groups)[:, None, None] + ahead, 0, size - 1)
    first = int(ahead.min())
    if (found != places).any() or ahead.max() - first >= _MOST_WINDOW:
        return None
    return _Pattern(
        groups,
        step,
        first,
        tuple(map(tuple, (ahead - first).tolist())),
        tuple(map(tuple, weights[0].tolist())),
    )


def resample_launches(operation: Resampling, tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launch of a resampling."""
    made = describe_resampling(operation, tensors)
    arguments = arguments_of(2, *made.tables())
    for n in made.repeating:
        axis = [*made.taps][n]
        arguments += [made.x.dims[axis], made.x.strides[axis], made.y.strides[axis]]
    arguments += [made.floats(getattr(operation, "extrapolation", 0.0)), *made.walk.numbers.values()]
    return [Launch("resample", _source(made), *grid_over(made.walk.total), arguments, ROUNDING)]


def _source(made: ResamplingKernel) -> str:
    """The kernel in CUDA C++."""
    element = C_TYPES[made.x.dtype]
    number = DType.FLOAT64 if made.x.dtype is DType.FLOAT64 else DType.FLOAT32
    tables = "".join(
        f"const I* __restrict__ starts{n}, const I* __restrict__ places{n}, "
        f"const T* __restrict__ weights{n}, "
        for n in range(made.count)
        if n not in made.repeating
    )
    tables += "".join(f"long long size{n}, long long step{n}, long long ahead{n}, " for n in made.repeating)
    nearest = made.forward and made.operation.mode is ResampleMode.NEAREST
    body = _copy_body(made) if nearest else _sum_body(made)
    rows = range(len(made.rows.places))
    ahead = [f" + {row} * (I)ahead{made.count - 2}" if row else "" for row in rows]
    packed = " ".join(f"*(Packed*)(y + y_at{ahead[row]}) = packs[{row}];" for row in rows)
    return f"""{beginning(number, wide=made.wide)}
typedef {element} E;
typedef Pack<E, {made.together}> Packed;
extern "C" __global__ void resample(
    const {element}* __restrict__ x, {element}* __restrict__ y, {tables}T extrapolation,
    {made.walk.parameters}
) {{
    {made.walk.loop(f"Packed packs[{len(rows)}]; {body} {packed}")}
}}
"""


def _number(made: ResamplingKernel, n: int) -> str:
    """The C expression of the coordinate of the neighbour `v` along a dimension."""
    moved = made.together > 1 and [*made.taps][n] == made.fastest
    return f"(n{n}_at + v)" if moved else f"n{n}_at"


def _outside(made: ResamplingKernel) -> str:
    """The C expression of whether the neighbour `v` lies outside x."""
    numbers = [n for n, of in enumerate(made.taps.values()) if made.forward and of.outside.any()]
    found = [f"places{n}[starts{n}[{_number(made, n)}]] < 0" for n in numbers]
    return " || ".join(found) or "false"


def _each(made: ResamplingKernel, text: str) -> str:
    """A C loop over the neighbours `v` of a thread."""
    return f"""
    #pragma unroll
    for (int v = 0; v < {made.neighbours}; ++v) {{ {text} }}"""


def _pack(made: ResamplingKernel, v: int | str = "v") -> str:
    """The C expression of the element of the result that is neighbour `v`."""
    return f"packs[{v} / {made.together}].of[{v} % {made.together}]"


def _places(made: ResamplingKernel) -> str:
    """The statements that define where a thread's window begins in x."""
    return "".join(
        f"""I places{n}[{pattern.window}];
    #pragma unroll
    for (int t = 0; t < {pattern.window}; ++t) {{
        const I place = n{n}_at + t + ({pattern.first});
        places{n}[t] = min(max(place, (I)0), (I)size{n} - 1) * (I)step{n};
    }} """
        for n, pattern in made.repeating.items()
    )


def _window(made: ResamplingKernel, columns: _Pattern, start: str) -> str:
    """The statements that read the window: in pieces where it is sure to lie inside x, else one by one."""
    last, piece = made.count - 1, made.piece
    inside = {t: t + columns.first for t in range(columns.window) if 0 <= t + columns.first < columns.step}
    pieces = {at // piece for at in inside.values()} if piece > 1 else ()
    read = "".join(
        f"const Piece piece{n} = *(const Piece*)(x + (row + n{last}_at + {n * piece})); "
        for n in sorted(pieces)
    )
    read += "".join(
        f"window[r][{t}] = piece{inside[t] // piece}.of[{inside[t] % piece}]; "
        if piece > 1 and t in inside
        else f"window[r][{t}] = x[row + places{last}[{t}]]; "
        for t in range(columns.window)
    )
    start += f" + places{last - 1}[r]" if last - 1 in made.repeating else ""
    return f"""typedef Pack<E, {piece}> Piece;
    E window[{made.rows.window}][{columns.window}];
    #pragma unroll
    for (int r = 0; r < {made.rows.window}; ++r) {{ const I row = {start}; {read} }}"""


def _copy_body(made: ResamplingKernel) -> str:
    """The C body of a resampling to the nearest, which moves bits."""
    places = [f"places{n}[{_number(made, n)}]" for n in range(made.count) if n not in made.repeating]
    at, outside, pack = " + ".join(["x_at", *places]), _outside(made), _pack(made)
    filled = f"if ({outside}) {pack} = {stored(made.y, 'extrapolation')}; else"
    if made.columns is not None:
        products = enumerate(_products(made, made.columns))
        read = "".join(f"{_pack(made, v)} = {element}; " for v, ((element, _),) in products)
        text = f"{_places(made)} {_window(made, made.columns, at)} {read}"
        if outside == "false":
            return text
        return f"if ({outside}) {{ {_each(made, filled + ' {}')} }} else {{ {text} }}"
    if made.together > 1 and made.alike:
        whole = f"packs[0] = *(const Packed*)(x + ({at}));"
        return (
            whole if outside == "false" else f"if ({outside}) {{ {_each(made, filled + ';')} }} else {whole}"
        )
    return _each(made, f"{filled} {pack} = x[{at}];")


def _sum_body(made: ResamplingKernel) -> str:
    """The C body of a resampling that adds up weighted elements: nested loops, the last dim innermost."""
    alike = made.together > 1 and made.alike
    weight, at = _before(made.count)
    if alike:
        value = value_of(made.x, "some.of[v]")
        inner = (
            f"const Packed some = *(const Packed*)(x + {at}); {_each(made, f'sums[v] += {weight}{value};')}"
        )
    elif made.columns is not None:
        inner = _pattern_source(made, made.columns)
    else:
        inner = f"sums[v] += {weight}{value_of(made.x, f'x[{at}]')};"
    for n in reversed(range(made.count)):
        if n not in made.repeating:
            inner = _loop_over_table(made, n, inner)
    outside, filled = _outside(made), f"{_pack(made)} = {stored(made.y, 'sums[v]')};"
    clear = _each(made, "sums[v] = 0;")
    if alike or made.columns is not None:
        if outside != "false":
            inner = f"if ({outside}) {{ {_each(made, 'sums[v] = extrapolation;')} }} else {{ {inner} }}"
        inner = f"{clear} {_places(made)} {inner}"
    else:
        inner = _each(made, f"sums[v] = 0; if ({outside}) sums[v] = extrapolation; else {{ {inner} }}")
    return f"T sums[{made.neighbours}]; {inner} {_each(made, filled)}"


def _before(n: int) -> tuple[str, str]:
    """The C expressions of the weight and the place that the loops around loop `n` have found.

    The weight's ends with "* ".
    """
    return (f"weight{n - 1} * ", f"at{n - 1}") if n else ("", "x_at")


def _loop_over_table(made: ResamplingKernel, n: int, inner: str) -> str:
    """A C loop over the taps along a dimension that has a table."""
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


def _products(made: ResamplingKernel, columns: _Pattern) -> Iterator[list[tuple[str, str]]]:
    """Yields, for each neighbour, the C expressions of the elements and the weights that it adds up."""
    kind = "" if made.floats is np.float64 else "f"
    for row, column in itertools.product(made.rows.taps, columns.taps):
        yield [
            (f"window[{at}][{along}]", f"{outer!r}{kind} * {inner!r}{kind}")
            for (at, outer), (along, inner) in itertools.product(row, column)
            if outer and inner
        ]


def _pattern_source(made: ResamplingKernel, columns: _Pattern) -> str:
    """The C++ of sums whose places and weights are constants in the source."""
    before, start = _before(made.count - len(made.repeating))
    sums = "".join(
        f"sums[{v}] += {before}{weight} * {value_of(made.x, element)}; "
        for v, products in enumerate(_products(made, columns))
        for element, weight in products
    )
    return f"{_window(made, columns, start)} {sums}"


implement(Resample, ResampleBackward, launchers=kernels(resample_launches))
