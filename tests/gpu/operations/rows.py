"""What the table of operations says of each: how problems are drawn, and how wrong results may be.

The criterion is the same for all of them. A result is right if it is a correct
rounding, to its dtype, of some value within a bound of the truth: so rounding
the result itself is never part of the bound, and a bound of 0 means that every
bit is checked. A row gives the bound of what is computed before, element by
element, in terms of the unit roundoff u of the type that is computed in:
2**-53 for float64, 2**-24 for all other floats.

A sum of L terms may be off by `walk(L)` * u times the sum of their magnitudes.
That is 4 * sqrt(L), for the reasons that `tests.gpu.bounds` gives; for up to 16
terms it is no less than the bound of any order of summation, L * u.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import Operation, Specs
from cudnn_actor.protocol.operations.base import Array

from ..choices import Choices

__all__ = ["BARE", "FLOATS", "Asked", "Dims", "Exact", "Made", "Row", "Sizes", "Values", "walk", "walk_of"]

Dims = tuple[int, ...]
Exact = dict[str, Array]
"""Values by the names of operands: float64 or int64."""

FLOATS = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
BARE = "without optional operands"
"""The form of any operation that has some; in all other cells all of them are given."""


def walk(terms: float) -> float:
    """The error of a sum, in terms of u and of the sum of magnitudes."""
    return 4 * math.sqrt(terms)


def walk_of_products(terms: int, result: DType) -> float:
    """The same for sums of products of floats. Tensor cores cut off after each eight of them, which adds up
    where these have one sign; float32 results may be theirs: those of half types."""
    return max(walk(terms), 0.0 if result is DType.FLOAT64 else terms / 8)


def walk_of(x: Array, terms: int) -> float:
    """The same for sums over x: more where few values differ, whose roundings do not cancel."""
    few = x.size > 64 * np.unique(x).size
    return max(walk(terms), terms / 2 if few else 0.0)


class Sizes(enum.StrEnum):
    """What is special about the sizes of a random problem."""

    ONE = "one element"
    TINY = "tiny"
    ODD = "odd"
    VECTOR = "vector-friendly"
    LONG = "long"


class Values(enum.StrEnum):
    """What inputs are made of."""

    NORMAL = "normal"
    """Normally distributed; integers uniformly, over their whole range."""
    WHOLE = "whole"
    """Whole numbers from -3 to 4: many of them are equal, and their sums are exact."""
    FAR = "far from 0"
    """Normally distributed around 30: differences cancel."""
    EQUAL = "equal"
    """All values of a tensor are the same, in quarters; in some inputs, see `Row.varied`."""


class Asked(NamedTuple):
    """What a row is to make a problem of.

    Parameters
    ----------
    choose
        Decides what is left open.
    dtype
        The dtype of the operands that have no other.
    rank
        Of the first input.
    form
        What is special about the problem; None for a random one, with whatever occurs.
    sizes
        What is special about its sizes.
    values
        What its inputs will be made of.
    """

    choose: Choices
    dtype: DType
    rank: int
    form: str | None
    sizes: Sizes
    values: Values

    def has(self, form: str, share: float) -> bool:
        """Whether the problem is of that form; a random one in this share of the draws."""
        return self.form == form or (self.form is None and self.choose.chance(share))


class Made(NamedTuple):
    """What a row makes: everything that does not follow from it is drawn by `drawing`.

    Parameters
    ----------
    dims
        Of the inputs, and of those outputs whose dims do not follow from them.
    attributes
        The operation's fields that are no operands.
    dtypes
        Of the operands that have another dtype than was asked for, and than `infer` gives.
    orders
        Of operands whose dims are in a certain order in memory, the slowest first, without gaps, where their
        layout is STRIDED.
    """

    dims: Mapping[str, Dims]
    attributes: Mapping[str, Any]
    dtypes: Mapping[str, DType] = {}
    orders: Mapping[str, Dims] = {}


class Row(NamedTuple):
    """One operation.

    Parameters
    ----------
    operation
        Its class.
    dtypes, ranks, forms
        Those of the support matrix: a cell for each of their combinations, in each layout. Random problems
        have these dtypes, too.
    make
        Makes a problem.
    bounds
        From the operation, its inputs' values and the specs of its outputs: the bound of each output in terms
        of u. An output that is left out is exact.
    arrange
        Given the operation too: changes the inputs' values before they are rounded to their dtypes.
    specials
        Values that floating-point inputs may have, and that the definition is precise about.
    largest
        Of integers.
    more_ranks
        Those that random problems have besides.
    varied
        Inputs whose values differ even where those of the others are all the same: sums of equal terms would
        be off by more than `walk`, because their roundings do not cancel.
    given
        (form, operands) of forms that have these of the optional operands only.
    needs
        (operand, other) of optional operands that are valid only with another one.
    belongs
        (attribute, operand) of attributes that are left out where an optional operand is.
    first
        The operand whose dtype, rank and layout are asked for; by default the first input.
    sampled
        Whether the operation's own samples take the place of the values drawn for those inputs.
    settle
        From the operands drawn and what was made: those that the operation is given.
    """

    operation: type[Operation[Any]]
    dtypes: tuple[DType, ...]
    ranks: tuple[int, ...]
    forms: tuple[str, ...]
    make: Callable[[Asked], Made]
    bounds: Callable[[Any, Exact, Specs], Exact]
    arrange: Callable[[Any, np.random.Generator, Exact, Specs], None] | None = None
    specials: tuple[float, ...] = ()
    largest: int = 1 << 62
    more_ranks: tuple[int, ...] = ()
    varied: tuple[str, ...] = ()
    given: tuple[tuple[str, tuple[str, ...]], ...] = ()
    needs: tuple[tuple[str, str], ...] = ()
    belongs: tuple[tuple[str, str], ...] = ()
    first: str = ""
    sampled: bool = True
    settle: Callable[[set[str], Made], set[str]] | None = None

    @property
    def family(self) -> str:
        """The file that defines the operation: `pooling`."""
        return self.operation.__module__.rpartition(".")[2]
