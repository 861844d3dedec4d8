"""Random numbers of every distribution and dtype."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.rounding import integer_range
from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import (
    RandomBernoulli,
    RandomIntegers,
    RandomNormal,
    RandomUniform,
    Specs,
)

from .rows import FLOATS, Asked, Exact, Made, Row, Sizes

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
All random numbers are exact: they have the bits of the definition, on every engine.
"""

PLAIN, PARAMETERS = "plain", "parameters"


def _dims(asked: Asked) -> tuple[int, ...]:
    """Of the result: its rank is asked for."""
    choose, rank = asked.choose, asked.rank
    match asked.sizes:
        case Sizes.ONE:
            return (1,) * rank
        case Sizes.LONG:
            return (*(1,) * (rank - 1), 10_000 + choose.size(9_000)) if rank else ()
        case Sizes.VECTOR:
            return tuple(4 * choose.size(3) for _ in range(rank))
        case _:
            return tuple(choose.size(max(3, int(20_000 ** (1 / rank)))) for _ in range(rank))


def _made(asked: Asked, **parameters: Any) -> Made:
    dims = _dims(asked)
    given = parameters if asked.has(PARAMETERS, 0.7) else {}
    return Made({"state": (2,)}, {"dims": dims, "dtype": asked.dtype, **given}, {"state": DType.INT64})


def _uniform(asked: Asked) -> Made:
    low = asked.choose.one((-3.0, 0.1, -0.25, 17.0))
    return _made(asked, low=low, high=low + asked.choose.one((0.3, 1.0, 40.0)))


def _normal(asked: Asked) -> Made:
    return _made(
        asked, mean=asked.choose.one((-3.0, 0.1, 100.0)), deviation=asked.choose.one((0.0, 0.3, 20.0))
    )


def _bernoulli(asked: Asked) -> Made:
    return _made(asked, probability=asked.choose.one((0.0, 0.01, 0.3, 0.9, 1.0)))


def _integers(asked: Asked) -> Made:
    least, most = integer_range(asked.dtype.numpy)
    low, high = asked.choose.one(((0, 2), (least, most), (most - 9, most), (least, least + 100), (3, 90)))
    made = _made(asked, low=low, high=high)
    return made._replace(attributes={"high": 100, **made.attributes})


def _arrange(operation: Any, rng: np.random.Generator, values: Exact, specs: Specs) -> None:
    """States of all kinds, in the place of that of the check."""
    del operation
    count = math.prod(specs["y"].dims)
    seed, block = rng.integers(-(1 << 63), 1 << 63, 2)
    near = (1 << 34) - 4 * int(rng.integers(0, count // 4 + 2)) + int(rng.integers(0, 4))
    values["state"] = np.array([seed, rng.choice([0, 1, near, block, -1, 4 * (block // 4)])], np.int64)


def _none(operation: Any, values: Exact, specs: Specs) -> Exact:
    del operation, values, specs
    return {}


_INTEGERS = tuple(dtype for dtype in DType if dtype.numpy.kind in "iu")


def _row(operation: Any, dtypes: tuple[DType, ...], make: Any) -> Row:
    return Row(
        operation,
        dtypes,
        ranks=(1, 4),
        forms=(PLAIN, PARAMETERS),
        make=make,
        bounds=_none,
        arrange=_arrange,
        more_ranks=(0, 2, 3, 5, 8),
        first="y",
    )


ROWS = (
    _row(RandomUniform, FLOATS, _uniform),
    _row(RandomNormal, FLOATS, _normal),
    _row(RandomBernoulli, tuple(DType), _bernoulli),
    _row(RandomIntegers, _INTEGERS, _integers),
)
