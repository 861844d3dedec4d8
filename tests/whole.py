"""What `make test` runs a part of, and `make test-all` all of: products of parameters, lists of like cases.

A test's parameters are often a product, in which each value stands with each other one many times. A mistake
that needs three certain values at once is rare (D. R. Kuhn, D. R. Wallace, A. M. Gallo, "Software fault
interactions and implications for software testing", IEEE Trans. Softw. Eng. 30 (2004)). So of a test with
the marker `pairwise`, `make test` runs a part of the cases, which has each pair of values of two parameters,
for each engine. Of the engine that computes in float64, this part has each value of a parameter: that engine
evaluates an operation's definition, whatever the dtypes and layouts are, and rounds the result. The code of
the fast plans depends on them: of these, each pair is run. So it is of convolutions and chains of pointwise
operations, which the engine in float64 computes tile by tile, and of how it rounds: the marker of these tests
is `pairwise(of_exact=True)`. So it is also where one test runs all cases (`tests.in_one_test`).

Of a product of two parameters, each pair is each case. Of a test with the marker `each_value`, `make test`
runs cases that have each value of each parameter, with any engine. It is for products of forms and of dtypes
or layouts whose combinations random problems of the same operation draw, and for those of which one parameter
cannot change what another one does.

Of lists of like cases, `few` gives the first ones: of hash seeds, of a driver's errors, of random networks.

Of random problems of engines, and of rounds of a race, it runs a third; and of the random problems that must
show a mistake, a third have to. Other examples of hypothesis are six times as many in `make test-all`, and
three times as many where a test says how many it needs (`more`): a state machine with a third of them missed
what it is there to find.

In `make test-all`, a new interpreter runs each forkserver. In `make test`, the server of test programs forks
those of pytest's processes (`tests.forked_programs.forking_forkservers`), and the first forkserver of many
programs (`tests.spare_process`).

`make test-gpu` runs all cases, too. `TEST_ALL=1 pytest tests/memory` runs all of one folder.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

__all__ = ["PRODUCTS", "WHOLE", "covering", "few", "more", "pairwise", "some", "together_for"]

T = TypeVar("T")

WHOLE = bool(os.environ.get("TEST_ALL"))
"""Whether all is run. A variable of the environment: the processes of pytest-xdist have it, too."""
PRODUCTS = ("pairwise", "each_value")
"""The markers of tests of whose cases `make test` runs a part. A test has one of them."""
_PART = 3
"""Of so many random problems or rounds of `make test-all`, one is run."""


def some(count: int) -> int:
    """How many of `count` random problems or rounds are run: a third of them, or all."""
    return count if WHOLE else -(-count // _PART)


def few(cases: Sequence[T], count: int) -> Sequence[T]:
    """The cases that are run of a list that checks one rule in one way: the first `count` of them, or all."""
    return cases if WHOLE else cases[:count]


def more(count: int) -> int:
    """How many of hypothesis' examples are run, where a third would find too little: `count`, or thrice."""
    return count * _PART if WHOLE else count


def pairwise(rows: Iterable[T], values: Callable[[T], Sequence[Any]], *, together: int = 2) -> list[T]:
    """The rows that are run: all of them with `WHOLE`, else those that `covering` gives, in order.

    `values`: the values of a row, one for each column.
    """
    every = [*rows]
    return every if WHOLE else [every[place] for place in covering([*map(values, every)], together=together)]


def together_for(case: pytest.Function, marker: pytest.Mark) -> int:
    """How many values together are run of a test's product, which has this marker of `PRODUCTS`.

    Of what the engine in float64 evaluates, one. What is wrong in one engine alone, for two certain values,
    would need a combination of three.
    """
    if marker.name == "each_value":
        return 1
    engine = case.callspec.params.get("new_engine") if hasattr(case, "callspec") else None
    return 1 if engine == "exact" and not marker.kwargs.get("of_exact", False) else 2


def covering(rows: Sequence[Sequence[Any]], *, together: int = 2) -> list[int]:
    """The places of rows in which every combination of values stands that stands in any of the rows.

    `together` is the number of values in a combination: 2 for pairs. The places are in order, and the same in
    every process. Greedy: the next row is the one with the most combinations that have not occurred yet. That
    number only falls, so a row is the next one if its number, counted anew, is still the largest.

    Of values one by one, few rows have new ones of several columns: of equal rows, the next is the one whose
    values stand in the fewest chosen rows, so that each value of a short column stands beside many others.
    """
    if together == 1:
        return _one_by_one([_combinations(row, 1) for row in rows])
    combinations = [_combinations(row, together) for row in rows]
    missing = set(itertools.chain.from_iterable(combinations))
    waiting = [(-len(found), place) for place, found in enumerate(combinations)]
    heapq.heapify(waiting)
    chosen = []
    while missing:
        _, place = heapq.heappop(waiting)
        counted = (-len(missing.intersection(combinations[place])), place)
        if waiting and counted > waiting[0]:
            heapq.heappush(waiting, counted)
            continue
        missing.difference_update(combinations[place])
        chosen.append(place)
    return sorted(chosen)


def _one_by_one(rows: Sequence[frozenset[Hashable]]) -> list[int]:
    missing, left, chosen = set(itertools.chain.from_iterable(rows)), dict(enumerate(rows)), list[int]()
    times: collections.Counter[Hashable] = collections.Counter()

    def gain(place: int) -> tuple[int, int, int]:
        return len(missing & left[place]), -sum(times[value] for value in left[place]), -place

    while missing:
        place = max(left, key=gain)
        values = left.pop(place)
        missing -= values
        times.update(values)
        chosen.append(place)
    return sorted(chosen)


def _combinations(row: Sequence[Any], together: int) -> frozenset[tuple[tuple[int, Hashable], ...]]:
    """Of a row with fewer values than `together`: all of them."""
    values = [(column, _key(value)) for column, value in enumerate(row)]
    return frozenset(itertools.combinations(values, min(together, len(values))))


def _key(value: Any) -> Hashable:
    """What tells a value from others: 1 is not True, and a value without a hash is equal to itself alone."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
