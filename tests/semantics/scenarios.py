"""Tests made of a table's rows: for each cell the scenario that brings it about, or a failure.

A scenario answers with the page's own words, so that a cell which says something else fails. A cell with a
dash must have none: what does not occur cannot be brought about.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import pytest
from structlog.typing import EventDict

from cudnn_actor import Fault

from .page import PAGE, table
from .places import COLUMNS, Place, TooLate

__all__ = ["ANYWHERE", "IN_PROCESS", "ON_THREAD", "REPLACED", "Case", "Logs", "Scenarios"]

NEVER = "—"
ANYWHERE = tuple(COLUMNS)
ON_THREAD = ("thread, CPU", "thread, CUDA")
IN_PROCESS = ("process, CPU", "process, CUDA")
REPLACED = ("thread, CPU", *IN_PROCESS)
"""Where a successor goes on."""

Logs = list[EventDict]
_ATTEMPTS = 20
Run = Callable[[Place, Fault, Logs], Awaitable[str]]


class Scenario(NamedTuple):
    """How a row is brought about, in which columns, and by which crashes, where those have the fault."""

    run: Run
    columns: tuple[str, ...]
    crashes: tuple[Fault, ...]
    stands_in: bool = True
    """Whether an engine that stands in for another shows anything."""


async def _missing(*_: object) -> str:
    raise AssertionError("the page has this row, and no scenario brings it about")


_NO_SCENARIO = Scenario(_missing, (), (Fault.STICKY,))


class Case(NamedTuple):
    """One test: a row at a place."""

    says: str
    run: Run
    place: Place
    crash: Fault

    async def holds(self, logs: Logs) -> None:
        """Bring the row about; fail where something else comes of it than the page says."""
        self.place.require()
        for _ in range(_ATTEMPTS):
            try:
                assert await self.run(self.place, self.crash, logs) == self.says
            except TooLate:
                logs.clear()
            else:
                return
        raise AssertionError(f"the crash was ahead of the scenario {_ATTEMPTS} times")


class Scenarios:
    """The scenarios of one table.

    Parameters
    ----------
    heading
        What it stands under.
    first
        The name of its first column.
    key
        How many columns name a row.
    """

    def __init__(self, heading: str, first: str, key: int = 1) -> None:
        self.table = table(heading, first)
        self._key = key
        self._known: dict[str, Scenario] = {}

    def of(
        self,
        *row: str,
        columns: Sequence[str] = ANYWHERE,
        crashes: Sequence[Fault] = (Fault.STICKY,),
        stands_in: bool = True,
    ) -> Callable[[Run], Run]:
        """Have a function bring about the row that begins with these cells."""

        def note(run: Run) -> Run:
            key = ", ".join(row)
            assert key not in self._known, f"two scenarios for {key!r}"
            self._known[key] = Scenario(run, tuple(columns), tuple(crashes), stands_in)
            return run

        return note

    def cases(self) -> list[Any]:
        """A parameter for each cell that says something, each place and each crash."""
        return [
            self._parameter(row, place, crash, says, scenario)
            for (row, column), says in self._cells().items()
            if says != NEVER
            for scenario in [self._known.get(row, _NO_SCENARIO)]
            for place in COLUMNS[column]
            for crash in scenario.crashes
            if crash in place.crashes and (scenario.stands_in or not place.stands_in)
        ]

    @staticmethod
    def _parameter(row: str, place: Place, crash: Fault, says: str, scenario: Scenario) -> Any:
        name = f"{row} - {place.name}" + (f" - {crash.value}" if len(scenario.crashes) > 1 else "")
        marks = [pytest.mark.gpu] if place.device != "cpu" else []
        return pytest.param(Case(says, scenario.run, place, crash), id=name, marks=marks)

    def check(self) -> None:
        """Fail unless the cells that say something are those that scenarios bring about."""
        said = {cell for cell, says in self._cells().items() if says != NEVER}
        known = {(row, column) for row, scenario in self._known.items() for column in scenario.columns}
        assert said - known == set(), f"without a scenario, in {PAGE.name}"
        assert known - said == set(), f"without a cell in {PAGE.name}"

    def _cells(self) -> dict[tuple[str, str], str]:
        columns = self.table.columns
        return {
            (", ".join(row[: self._key]), column): row[columns.index(column)]
            for row in self.table.rows
            for column in COLUMNS
        }
