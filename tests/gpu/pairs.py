"""All-pairs combinations: few rows in which every pair of values of two columns stands together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["all_pairs"]

Pair = tuple[int, Any, int, Any]


def all_pairs(*columns: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Rows of one value a column, the same in every process.

    Greedy: each row begins with a pair that has not occurred yet, and goes on with the values that bring the
    most new pairs. K.-C. Tai, Y. Lei, "A test generation strategy for pairwise testing", IEEE Trans. Softw.
    Eng. 28 (2002), has better ones; this one stays within some rows of them.
    """
    missing = {
        (a, left, b, right): None
        for a, b in itertools.combinations(range(len(columns)), 2)
        for left, right in itertools.product(columns[a], columns[b])
    }
    while missing:
        a, left, b, right = next(iter(missing))
        row = {a: left, b: right}
        for place, column in enumerate(columns):
            if place not in row:
                row[place] = max(column, key=lambda value: len(_new(row | {place: value}, missing)))
        for pair in _new(row, missing):
            del missing[pair]
        yield tuple(row[place] for place in range(len(columns)))


def _new(row: dict[int, Any], missing: dict[Pair, None]) -> list[Pair]:
    """The pairs of a row that have not occurred yet."""
    pairs = ((a, row[a], b, row[b]) for a, b in itertools.combinations(sorted(row), 2))
    return [pair for pair in pairs if pair in missing]
