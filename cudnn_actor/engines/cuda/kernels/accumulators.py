"""The accumulators of reductions, in CUDA C++: the numbers of a part of the elements, and how two parts join.

An accumulator is described once, by its numbers and the C statements that change them. The
struct `State` of a source follows from that, and so does the size of a part in bytes. T is
the type that a kernel computes in: float, double, or an integer of 64 bits (see
`lines.beginning`).
"""

from __future__ import annotations

from typing import NamedTuple

from cudnn_actor.engines.cuda.kernels.element_types import value_dtype
from cudnn_actor.engines.cuda.kernels.reduction_code import (
    ELEMENT_MAX,
    ELEMENT_MIN,
    ELEMENT_PRODUCT,
    ELEMENT_SUM,
    Join,
    shuffle,
)
from cudnn_actor.protocol.operations import ReductionMode
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["MOMENTS", "TWO_SUMS", "Accumulator", "accumulator_of", "accumulator_of_place"]

_Mode = ReductionMode
_LONG_BYTES = 8
"""The bytes of a long long."""


class Number(NamedTuple):
    """One number of an accumulator: its name, its value for a part without elements, and its C type."""

    name: str
    none: str
    kind: str = "T"


class Accumulator(NamedTuple):
    """An accumulator: the numbers that elements are reduced to.

    Parameters
    ----------
    numbers
        The numbers of a part of the elements.
    join
        The body of the member function `with`: C statements that return this part joined with `other`.
    taken
        The C parameters of the member function `take`: the element, or the elements, to add.
    take
        The body of `take`: C statements that add them to this part.
    result
        The C expression of the reduction's result, from the accumulator `{state}` of all elements. Empty if
        a reduction has several results.
    more
        C++ of further member functions.
    """

    numbers: tuple[Number, ...]
    join: str
    taken: str
    take: str
    result: str = ""
    more: str = ""

    def nbytes(self, dtype: DType) -> int:
        """The size of a `State` in bytes, for elements of a dtype, as C++ lays it out in memory."""
        wide = value_dtype(dtype).itemsize
        sizes = [wide if number.kind == "T" else _LONG_BYTES for number in self.numbers]
        end = 0
        for size in sizes:
            end = -(-end // size) * size + size
        return -(-end // max(sizes)) * max(sizes)

    @property
    def struct(self) -> str:
        """The struct `State` in C++."""
        members = " ".join(f"{number.kind} {number.name};" for number in self.numbers)
        none = ", ".join(number.none for number in self.numbers)
        return f"""
struct State {{
    {members}
    static __device__ State none() {{ return {{{none}}}; }}{self.more}
    __device__ State with(const State& other) const {{
        {self.join}
    }}
    __device__ State from(int apart) const {{
        return {{{", ".join(shuffle(number.name) for number in self.numbers)}}};
    }}
    __device__ void take({self.taken}) {{
        {self.take}
    }}
}};
"""


_ELEMENT = "T x, long long j"
"""The C parameters of an accumulator of lines: an element's value, and its place in the line."""


def _one(join: Join, taken: str = "x", result: str = "{state}.value") -> Accumulator:
    """An accumulator of one number.

    `join`: how two numbers become one. `taken`: the C expression that is joined for an element `x`.
    `result`: see `Accumulator`.
    """
    both = f"const T a = value, b = other.value; return {{{join.of('a', 'b')}}};"
    take = f"*this = with({{{taken}}});"
    return Accumulator((Number("value", join.none),), both, _ELEMENT, take, result)


def accumulator_of(mode: ReductionMode, dtype: DType) -> Accumulator:
    """The accumulator of a reduction of elements of a dtype."""
    add, smaller, larger = ELEMENT_SUM, ELEMENT_MIN, ELEMENT_MAX
    if not dtype.is_floating:
        whole = dtype is DType.UINT64
        smaller = smaller._replace(none="~0ull" if whole else "0x7fffffffffffffffll")
        larger = larger._replace(none="0" if whole else "-0x7fffffffffffffffll - 1")
    return {
        _Mode.SUM: _one(add),
        _Mode.PRODUCT: _one(ELEMENT_PRODUCT),
        _Mode.MIN: _one(smaller),
        _Mode.MAX: _one(larger),
        _Mode.ABSOLUTE_MAX: _one(larger._replace(none="0"), "magnitude(x)"),
        _Mode.L1: _one(add, "magnitude(x)"),
        _Mode.SUM_OF_SQUARES: _one(add, "product(x, x)"),
        _Mode.L2: _one(add, "product(x, x)", "sqrt({state}.value)"),
        _Mode.MEAN: _one(add, result="{state}.value / (T)length"),
        _Mode.LOG_SUM: _one(add, result="log({state}.value)"),
        _Mode.LOG_SUM_EXP: _POWERS,
    }[mode]


_POWERS = Accumulator(
    (Number("top", "-INFINITE"), Number("total", "0")),
    # The sum of exponentials is exp(top) * total. What equals top counts as 1, infinity too.
    """if (top == other.top) return {top, total + other.total};
        const bool larger = other.top > top;
        const State &a = larger ? other : *this, &b = larger ? *this : other;
        return {a.top, a.total + b.total * exp(b.top - a.top)};""",
    _ELEMENT,
    """if (x <= top) total += x == top ? (T)1 : exp(x - top);
        else { total = total * exp(top - x) + 1; top = x; }""",
    "{state}.top + log({state}.total)",
)


def accumulator_of_place(mode: ReductionMode) -> Accumulator:
    """The accumulator of the place of the largest or smallest element: of several, the first one's.

    NaN counts as larger and as smaller than all numbers.
    """
    better = ">" if mode is _Mode.MAX else "<"
    before = f"""
    __device__ bool before(const State& other) const {{
        if (other.place < 0 || place < 0) return other.place < 0;
        const bool nan = value != value, other_nan = other.value != other.value;
        if (nan != other_nan) return nan;
        return nan || value == other.value ? place < other.place : value {better} other.value;
    }}"""
    numbers = Number("value", "0"), Number("place", "-1", "long long")
    join = "return before(other) ? *this : other;"
    return Accumulator(numbers, join, _ELEMENT, "*this = with({x, j});", "{state}.place", before)


MOMENTS = Accumulator(
    (Number("count", "0"), Number("mean", "0"), Number("squares", "0")),
    """State both = *this;
        const T share = other.count / (count + other.count);
        if (other.count > 0) both.take(other.mean, other.squares, other.count, share);
        return both;""",
    "T middle, T apart, T more, T share",
    """const T delta = middle - mean;
        squares = fma(delta * delta, count * share, squares + apart);
        mean = fma(delta, share, mean);
        count += more;""",
)
"""The mean of elements, and the sum of their squared distances from it. It takes several elements at a time:
their mean, their sum of squared distances from that, their number, and their share of all elements so far.
T. F. Chan, G. H. Golub, R. J. LeVeque, "Algorithms for computing the sample variance", The American
Statistician 37 (1983)."""
TWO_SUMS = Accumulator(
    (Number("first", "0"), Number("second", "0")),
    "return {first + other.first, second + other.second};",
    "T a, T b",
    "first += a; second += b;",
)
"""Two sums, of two values of each element."""
