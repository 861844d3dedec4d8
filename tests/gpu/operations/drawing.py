"""Draws operations: the random problems of the fuzzer, and the cells of the support matrix."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from cudnn_actor.protocol import DType, Layout, Numerics, TensorSpec
from cudnn_actor.protocol.operations import Operation

from ...engines.refusals import may_refuse, refuses_some
from ..choices import Choices
from . import ROWS
from .cases import OperationCase
from .rows import BARE, Asked, Made, Row, Sizes, Values

__all__ = ["MOST_VALUES", "OperationCell", "case_of", "cells", "draw"]

MOST_VALUES, MOST_BYTES = 60_000, 12 << 20
"""Of each operand, and of all with their gaps: they share an arena."""


def draw(family: str, seed: int, number: int) -> OperationCase:
    """Case `number` of a seed and a family: the same in every process, whatever was drawn before it."""
    choose = Choices(np.random.default_rng([seed, number, *family.encode()]))
    rows = _rows_of(family)
    while (case := _attempt(choose, choose.one(rows), (seed, number, 1))) is None:
        pass
    return case


@functools.cache
def _rows_of(family: str) -> tuple[Row, ...]:
    return tuple(row for row in ROWS if row.family == family)


def _attempt(choose: Choices, row: Row, seed: tuple[int, ...]) -> OperationCase | None:
    """A case, unless it has turned out too large."""
    asked = Asked(
        choose=choose,
        dtype=choose.one(row.dtypes),
        rank=choose.one((*row.ranks, *row.more_ranks)),
        form=None,
        sizes=choose.one(Sizes),
        values=choose.one(Values),
    )
    case = case_of(row, asked, choose.one(Layout) if choose.chance(0.6) else None, seed)
    specs = case.specs.values()
    fits = max(s.size for s in specs) <= MOST_VALUES and sum(s.nbytes for s in specs) <= MOST_BYTES
    return case if fits else None


def case_of(row: Row, asked: Asked, layout: Layout | None, seed: tuple[int, ...]) -> OperationCase:
    """A case of what a row makes. `layout`: of all operands; None for any of each."""
    choose, made = asked.choose, row.make(asked)
    deterministic = asked.form is None and choose.chance(0.1)
    given = {name: name for name in _present(row, asked, made)}
    belongs = dict(row.belongs)
    kept = [name for name in made.attributes if name not in belongs or belongs[name] in given]
    operation = row.operation(
        **{**given, **{name: made.attributes[name] for name in kept}},
        numerics=Numerics(deterministic=True) if deterministic else None,
    )
    specs = _specs(operation, made, asked, layout)
    operation.check(specs)
    some = asked.form is None and bool(row.specials) and choose.chance(0.25)
    special = some and next(iter(specs.values())).size > 2
    return OperationCase(
        row=row, operation=operation, specs=specs, values=asked.values, special=special, seed=seed
    )


def _present(row: Row, asked: Asked, made: Made) -> list[str]:
    """The operands that are given. One optional operand in two, or all, or none of them."""
    share = asked.choose.one((0.0, 0.5, 1.0)) if asked.form is None else float(asked.form != BARE)
    operands, optional = (*row.operation.inputs, *row.operation.outputs), row.operation.optional
    some = {n for n in operands if n in optional and asked.choose.chance(share)}
    some &= {*dict(row.given).get(asked.form or "", operands)}
    some -= {name for name, other in row.needs if other not in some}
    some = some if row.settle is None else row.settle(some, made)
    return [n for n in operands if n not in optional or n in some]


def _specs(
    operation: Operation[str], made: Made, asked: Asked, layout: Layout | None
) -> dict[str, TensorSpec]:
    def spec(name: str, inferred: TensorSpec | None = None) -> TensorSpec:
        dims = inferred.dims if inferred is not None else made.dims[name]
        dtype = made.dtypes.get(name, asked.dtype if inferred is None else inferred.dtype)
        return asked.choose.spec(dims, dtype, layout, made.orders.get(name))

    specs = {name: spec(name) for name, _ in operation.named(operation.inputs)}
    inferred = operation.infer(specs)
    return specs | {name: spec(name, inferred.get(name)) for name, _ in operation.named(operation.outputs)}


@dataclass(frozen=True)
class OperationCell:
    """One combination that an engine is asked for. `rank`: of the first input."""

    row: Row
    dtype: DType
    rank: int
    layout: Layout
    form: str

    @property
    def name(self) -> str:
        """As pytest shows it, and as it stands in records."""
        parts = [self.row.operation.kind, self.dtype, f"rank_{self.rank}", self.layout, self.form]
        return "-".join(map(str, parts)).replace(" ", "_").replace(",", "").lower()

    @property
    def refused(self) -> str | None:
        """Why the CUDA engine may refuse it; None for what it must run."""
        return _refusal(self)

    def case(self, seed: int, sizes: Sizes = Sizes.ODD) -> OperationCase:
        """A problem of this cell."""
        entropy = (seed, *self.name.encode())
        choose = Choices(np.random.default_rng(entropy))
        asked = Asked(
            choose=choose,
            dtype=self.dtype,
            rank=self.rank,
            form=self.form,
            sizes=sizes,
            values=Values.NORMAL,
        )
        return case_of(self.row, asked, self.layout, entropy)


@functools.cache
def _refusal(cell: OperationCell) -> str | None:
    if not refuses_some("cuda", cell.row.operation):
        return None
    return may_refuse("cuda", cell.case(0).graph())


@functools.cache
def cells(family: str) -> tuple[OperationCell, ...]:
    """The cells of a family: the full product."""
    return tuple(
        OperationCell(row, *values)
        for row in _rows_of(family)
        for values in itertools.product(row.dtypes, row.ranks, Layout, row.forms)
        if values[2] is not Layout.NHWC or 3 <= values[1] <= 5
    )
