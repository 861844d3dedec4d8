"""Random numbers, from a seed and an offset: the same ones on every engine, bit for bit.

The generator is Philox4x32-10: a function of a counter and a key, without state
of its own. The key is the seed. Elements are numbered from the offset on, and
four neighbours share a counter: word n % 4 of the block n // 4 belongs to number
n. So the numbers of two operations are independent if their ranges of numbers do
not overlap, whatever their distributions, dtypes and dims.
J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.operations.base import (
    ALLOCATED,
    Array,
    Operation,
    Part,
    Region,
    Specs,
    T,
    is_all,
    require,
)
from cudnn_actor.protocol.operations.example import Example
from cudnn_actor.protocol.types.checks import is_finite, is_whole, require_fraction, require_member
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["RandomBernoulli", "RandomIntegers", "RandomNormal", "RandomUniform"]

ROUNDS, MULTIPLIERS, WEYL = 10, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
"""Philox4x32's constants."""
_LOW, _NUMBERS = (1 << 32) - 1, 1 << 64
STATE = TensorSpec.packed((2,), DType.INT64)
"""A state's spec: the seed, and the number of the first element; both modulo 2**64."""
_INTEGERS = frozenset(dtype for dtype in DType if not dtype.is_floating and dtype is not DType.BOOL)


def philox(counter: Sequence[Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Four random words of 32 bits, from a counter of four words and a key of two: Philox4x32-10.

    Words of the counter are ints or arrays of uint64; so are the results.
    """
    first, second = key
    keys = [((first + n * WEYL[0]) & _LOW, (second + n * WEYL[1]) & _LOW) for n in range(ROUNDS)]
    return _mix(counter, keys)


def _mix(counter: Sequence[Any], keys: Sequence[tuple[Any, Any]]) -> tuple[Any, Any, Any, Any]:
    """Four random words, from a counter and the two words of the key for each round."""
    a, b, c, d = counter
    for first, second in keys:
        of_a, of_c = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = of_c >> 32 ^ b ^ first, of_c & _LOW, of_a >> 32 ^ d ^ second, of_a & _LOW
    return a, b, c, d


def words(xp: Any, state: Array, start: int, count: int, draw: int = 0) -> Array:
    """The random words of `count` elements from the `start`th one on, as uint64.

    An element that needs more than 32 bits takes its word of `draw` 0 and that of `draw` 1, which is the
    counter's third word.
    """
    starts = xp.asarray([[start % _NUMBERS]], dtype=xp.uint64)
    return words_of_runs(xp, state, starts, count, draw)[0]


def words_of_runs(xp: Any, state: Array, starts: Array, count: int, draw: int = 0) -> Array:
    """The words of several runs of elements, dims (runs, count). `starts`: their first, uint64 (runs, 1)."""
    number = state.astype(xp.uint64)  # modulo 2**64
    seed, first = number[:1], number[1:] + starts
    size = (count + 6) // 4
    blocks = (first >> 2) + xp.arange(size, dtype=xp.uint64) & _NUMBERS // 4 - 1
    none, rounds = xp.zeros_like(blocks), xp.arange(ROUNDS, dtype=xp.uint64)
    low, high = (
        word + rounds * weyl & _LOW for word, weyl in zip((seed & _LOW, seed >> 32), WEYL, strict=True)
    )
    keys = [(low[n], high[n]) for n in range(ROUNDS)]
    found = _mix((blocks & _LOW, blocks >> 32, none + draw, none), keys)
    places = xp.arange(starts.shape[0])[:, None] * (4 * size) + xp.arange(count)
    return xp.take(xp.stack(found, axis=2).reshape(-1), (first & 3).astype(xp.int64) + places)


def keeping(probability: float) -> int:
    """The number below which words are that are drawn with a probability: to within 2**-33."""
    return round(probability * (1 << 32))


def state_sample(xp: Any) -> Array:
    """A state for checks: its numbers begin inside a block, and the blocks soon need more than 32 bits."""
    return xp.asarray([0x0123456789ABCDEF, (1 << 34) - 5], dtype=xp.int64)


class Randomness(Operation[T]):
    """The base of all random numbers: the `state`, and the dims and the dtype of the result.

    Attributes
    ----------
    dtypes
        Those that the result may have.
    """

    inputs = ("state",)
    outputs = ("y",)
    takes_empty = True
    dtypes: ClassVar[frozenset[DType]]
    state: T
    y: T = ALLOCATED
    dims: tuple[int, ...]
    dtype: DType = DType.FLOAT32

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        require(specs, "state", STATE.dims, STATE.dtype)
        require_member("dtype", self.dtype, DType)
        if self.dtype not in self.dtypes:
            raise InvalidRequest(
                field="dtype",
                value=Words(self.dtype),
                problem=f"is not a dtype that {type(self).__name__} gives",
                fix=f"use {', '.join(dtype for dtype in DType if dtype in self.dtypes)}",
            )
        self._check_parameters()
        return {"y": TensorSpec.packed(self.dims, self.dtype)}

    def _check_parameters(self) -> None:
        """Raise `InvalidRequest` for parameters of no distribution."""
        raise NotImplementedError

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        """None: numbers do not change with a state by degrees."""
        del g, d
        return {}

    def compute(self, dtypes: tuple[DType, ...]) -> DType:
        """Float64, whatever the dtype: it is rounded once."""
        del dtypes
        return DType.FLOAT64

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        del specs, draw
        return {"state": state_sample(xp)}

    def part(self, specs: Specs, wanted: Mapping[str, Region]) -> Part | None:
        """A part of numbers that follow one another: its state begins with the first of them."""
        dims, region = specs["y"].dims, wanted["y"]
        cut = next((n for n, part in enumerate(region) if part.stop - part.start > 1), len(dims))
        if not all(map(is_all, dims[cut + 1 :], region[cut + 1 :])):
            return None
        first = 0
        for size, of in zip(dims, region, strict=True):
            first = first * size + of.start
        return Part(self, {"state": (slice(None),)}, wanted, {"state": np.array([0, first])})

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        dims = specs["y"].dims
        count = math.prod(dims)
        drawn = self._numbers_of(xp, lambda draw=0: words(xp, values["state"], 0, count, draw))
        return {"y": drawn.reshape(dims)}

    def _numbers_of(self, xp: Any, word: Callable[..., Array]) -> Array:
        """The numbers, from the elements' words: `word()`, and `word(1)` where these have too few bits."""
        raise NotImplementedError

    def _require_finite(self, *names: str) -> None:
        for name in names:
            if not is_finite(value := getattr(self, name)):
                raise InvalidRequest(
                    field=name, value=value, problem="is not a finite number", fix="use one, as in 0.5"
                )


class _Floats(Randomness[T]):
    dtypes = frozenset(dtype for dtype in DType if dtype.is_floating)


class RandomUniform(_Floats[T], tag=True):
    """Numbers from `low` on and below `high`, all equally likely. Answered by a `Receipt`.

    y = low + (high - low) * u, in float64, where u has 32 random bits, or 53 of float64. It is rounded to the
    nearest number of the dtype that is in the range.

    Parameters
    ----------
    state
        int64, dims (2,): the seed, and the number of the first element; see the module.
    y
        Result, of these dims and of this dtype.
    dims
        The result's.
    dtype
        The result's: a floating-point one.
    low, high
        The range.
    """

    kind = "random_uniform"
    low: float = 0.0
    high: float = 1.0

    def limits(self) -> tuple[float, float]:
        """The least and the largest number of the dtype in the range; infinite beyond those of the dtype."""
        kind = self.dtype.numpy
        found = []
        for bound, beyond, sign in ((self.low, math.inf, 1), (self.high, -math.inf, -1)):
            with np.errstate(over="ignore"):
                nearest = np.asarray(bound, np.float64).astype(kind)
            outside = sign * (float(nearest) - bound)
            if np.isfinite(nearest) and (outside < 0 or (sign < 0 and outside == 0)):
                nearest = np.nextafter(nearest, np.asarray(beyond).astype(kind))
            found.append(float(nearest) + 0.0)
        return found[0], found[1]

    def _check_parameters(self) -> None:
        self._require_finite("low", "high")
        if self.low > self.high:
            raise InvalidRequest(
                field="high", value=self.high, problem=f"is below low, {self.low}", fix="exchange them"
            )
        least, largest = self.limits()
        widths = largest - least, float(self.high) - float(self.low)
        if least > largest or not all(map(math.isfinite, widths)):
            raise InvalidRequest(
                field="high",
                value=self.high,
                problem=f"and {self.low} have no {self.dtype} between them that could be drawn",
                fix="use a larger range, within that of the dtype",
            )

    def _numbers_of(self, xp: Any, word: Callable[..., Array]) -> Array:
        if self.dtype is DType.FLOAT64:
            unit = (word() << 21 | word(1) >> 11).astype(xp.float64) * 2.0**-53
        else:
            unit = word().astype(xp.float64) * 2.0**-32
        least, largest = self.limits()
        numbers = unit * (float(self.high) - float(self.low)) + float(self.low)
        return xp.minimum(xp.maximum(numbers, least), largest)


class RandomNormal(_Floats[T], tag=True):
    """Normally distributed numbers. Answered by a `Receipt`.

    y = mean + deviation * z, in float64, where z is the quantile of a number with 32 random bits, or 52 of
    float64: at most 6.4, or 8.3, in magnitude. `quantile` is exact to about 1e-15.

    Parameters
    ----------
    state, y, dims, dtype
        As of `RandomUniform`.
    mean, deviation
        The distribution's: its standard deviation is at least 0.
    """

    kind = "random_normal"
    mean: float = 0.0
    deviation: float = 1.0

    def _check_parameters(self) -> None:
        self._require_finite("mean", "deviation")
        if self.deviation < 0:
            raise InvalidRequest(
                field="deviation", value=self.deviation, problem="is below 0", fix="use its magnitude"
            )

    def _numbers_of(self, xp: Any, word: Callable[..., Array]) -> Array:
        if self.dtype is DType.FLOAT64:
            unit = ((word() << 20 | word(1) >> 12).astype(xp.float64) + 0.5) * 2.0**-52
        else:
            unit = (word().astype(xp.float64) + 0.5) * 2.0**-32
        return quantile(xp, unit) * float(self.deviation) + float(self.mean)


def require_dropout(field: str, probability: object, *, of: str) -> None:
    """Raise `InvalidRequest` unless a probability is from 0 to below 1. `of`: what is dropped."""
    if not is_finite(probability) or not 0 <= probability < 1:
        raise InvalidRequest(
            field=field,
            value=probability,
            problem="must be a number from 0 to below 1",
            fix=f"use 0.1 to drop one {of} in ten",
        )


def check_dropout(probability: float, state: object, *, of: str) -> None:
    """Raise `InvalidRequest` unless a probability is from 0 to below 1, with a state only if it is above 0.

    Above 0 there must be a state. `state`: None, or what an error shows of it. `of`: what is dropped.
    """
    require_dropout("dropout", probability, of=of)
    if (state is None) == (probability > 0):
        raise InvalidRequest(
            field="state",
            value=state,
            problem="is what dropout draws from: both are given, or none",
            fix="give a state, int64 of dims (2,), exactly if dropout is above 0",
        )


class RandomBernoulli(Randomness[T], tag=True):
    """1 with a probability, else 0. Answered by a `Receipt`.

    Parameters
    ----------
    state, y, dims
        As of `RandomUniform`.
    dtype
        The result's: any.
    probability
        That of 1: from 0 to 1. It is rounded to a multiple of 2**-32.
    """

    kind = "random_bernoulli"
    dtypes = frozenset(DType)
    probability: float = 0.5

    def _check_parameters(self) -> None:
        require_fraction("probability", self.probability)

    def _numbers_of(self, xp: Any, word: Callable[..., Array]) -> Array:
        return (word() < keeping(self.probability)).astype(xp.int64)


class RandomIntegers(Randomness[T], tag=True):
    """Whole numbers from `low` on and below `high`, all equally likely. Answered by a `Receipt`.

    y = low + floor((high - low) * r / 2**64), where r has 64 random bits: no number is likelier than another
    by more than 2**-64.

    Parameters
    ----------
    state, y, dims
        As of `RandomUniform`.
    dtype
        The result's: an integer one.
    low, high
        The range, within that of the dtype.
    """

    kind = "random_integers"
    dtypes = _INTEGERS
    dtype: DType = DType.INT64
    low: int = 0
    high: int

    def _check_parameters(self) -> None:
        limits = np.iinfo(self.dtype.value)
        least, largest = int(limits.min), int(limits.max)
        for name, value, highest in (
            ("low", self.low, largest),
            ("high", self.high, min(largest + 1, _NUMBERS - 1)),
        ):
            if not is_whole(value) or not least <= value <= highest:
                raise InvalidRequest(
                    field=name,
                    value=value,
                    problem=f"must be a whole number from {least} to {highest}",
                    fix="use a number in that range",
                )
        if self.low >= self.high:
            raise InvalidRequest(
                field="high",
                value=self.high,
                problem=f"is not above low, {self.low}",
                fix="use a larger one",
            )

    def _numbers_of(self, xp: Any, word: Callable[..., Array]) -> Array:
        upper, lower = word(), word(1)
        high, low = divmod(self.high - self.low, 1 << 32)
        carried = upper * low + (lower * low >> 32)
        found = upper * high + (carried >> 32) + (lower * high + (carried & _LOW) >> 32)
        found += self.low % _NUMBERS
        return found if self.dtype is DType.UINT64 else found.astype(xp.int64)


QUANTILE = (
    (
        (
            3.3871328727963666080e0,
            1.3314166789178437745e2,
            1.9715909503065514427e3,
            1.3731693765509461125e4,
            4.5921953931549871457e4,
            6.7265770927008700853e4,
            3.3430575583588128105e4,
            2.5090809287301226727e3,
        ),
        (
            1.0,
            4.2313330701600911252e1,
            6.8718700749205790830e2,
            5.3941960214247511077e3,
            2.1213794301586595867e4,
            3.9307895800092710610e4,
            2.8729085735721942674e4,
            5.2264952788528545610e3,
        ),
    ),
    (
        (
            1.42343711074968357734e0,
            4.63033784615654529590e0,
            5.76949722146069140550e0,
            3.64784832476320460504e0,
            1.27045825245236838258e0,
            2.41780725177450611770e-1,
            2.27238449892691845833e-2,
            7.74545014278341407640e-4,
        ),
        (
            1.0,
            2.05319162663775882187e0,
            1.67638483018380384940e0,
            6.89767334985100004550e-1,
            1.48103976427480074590e-1,
            1.51986665636164571966e-2,
            5.47593808499534494600e-4,
            1.05075007164441684324e-9,
        ),
    ),
    (
        (
            6.65790464350110377720e0,
            5.46378491116411436990e0,
            1.78482653991729133580e0,
            2.96560571828504891230e-1,
            2.65321895265761230930e-2,
            1.24266094738807843860e-3,
            2.71155556874348757815e-5,
            2.01033439929228813265e-7,
        ),
        (
            1.0,
            5.99832206555887937690e-1,
            1.36929880922735805310e-1,
            1.48753612908506148525e-2,
            7.86869131145613259100e-4,
            1.84631831751005468180e-5,
            1.42151175831644588870e-7,
            2.04426310338993978564e-15,
        ),
    ),
)
"""Coefficients of quotients of polynomials, lowest power first: near the middle, and of both tails."""
LOGARITHM = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
"""Coefficients of the logarithm's series."""
LN2 = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""ln(2) as a sum: multiples of the first part are exact."""
_MIDDLE, _OUTER = 0.425, 5.0


def quantile(xp: Any, unit: Array) -> Array:
    """The numbers at which the normal distribution's function has these values, between 0 and 1.

    It uses only operations that are rounded exactly, so that every engine gets the same bits. M. Wichura,
    "Algorithm AS 241: the percentage points of the normal distribution", Appl. Stat. 37 (1988).
    """
    centred = unit - 0.5
    tail = xp.sqrt(-_logarithm(xp, xp.minimum(unit, 1.0 - unit)))
    middle, inner, outer = QUANTILE
    found = xp.where(tail <= _OUTER, _quotient(tail - 1.6, inner), _quotient(tail - _OUTER, outer))
    near = xp.abs(centred) <= _MIDDLE
    close = centred * _quotient(_MIDDLE * _MIDDLE - centred * centred, middle)
    return xp.where(near, close, xp.where(centred < 0, -found, found))


def _quotient(x: Array, coefficients: Sequence[Sequence[float]]) -> Array:
    above, below = (_polynomial(x, of) for of in coefficients)
    return above / below


def _polynomial(x: Array, coefficients: Sequence[float]) -> Array:
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * x + coefficient
    return total


def _logarithm(xp: Any, x: Array) -> Array:
    """The natural logarithm of normal numbers, exact to 1 ulp, as in fdlibm.

    https://www.netlib.org/fdlibm/e_log.c
    """
    # x = 2**power * (1 + f), where 1 + f is from sqrt(1/2) to sqrt(2).
    bits = x.view(xp.int64) + (0x3FF00000 - 0x3FE6A09E << 32)
    power = ((bits >> 52) - 1023).astype(xp.float64)
    f = ((bits & (1 << 52) - 1) + (0x3FE6A09E << 32)).view(xp.float64) - 1.0
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    even, odd = LOGARITHM[1::2], LOGARITHM[::2]
    series = z * _polynomial(w, odd) + w * _polynomial(w, even)
    half = 0.5 * f * f
    return power * LN2[0] - ((half - (s * (half + series) + power * LN2[1])) - f)


def examples() -> tuple[Example, ...]:
    """Every kind of random number, of one state. All of them are exact."""
    given: dict[str, Any] = {"state": "state", "dims": (6, 5, 40)}
    operations = (
        RandomUniform(**given, y="uniform", low=-1.0),
        RandomNormal(**given, y="normal", deviation=0.5),
        RandomBernoulli(**given, y="coins", dtype=DType.INT8, probability=0.3),
        RandomIntegers(**given, y="whole", dtype=DType.INT32, low=-7, high=100),
    )
    return (Example(dims={"state": (2,)}, dtypes={"state": DType.INT64}, operations=operations),)
