"""Turns the rows of a table of the page into tests: each cell is compared with what its scenario returns.

A scenario causes what its row describes, and returns what happened, in the words of the page. A test fails
for a cell without a scenario, and for a scenario whose cell has a dash: a dash marks what does not occur.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import pytest
from structlog.typing import EventDict

from cudnn_actor import Fault

from .page import table
from .setups import COLUMNS, CrashTooEarly, Setup

__all__ = ["EVERYWHERE", "IN_PROCESS", "ON_THREAD", "REPLACED", "Case", "Logs", "Scenarios"]

DOES_NOT_OCCUR = "—"
EVERYWHERE = tuple(COLUMNS)
ON_THREAD = ("thread, CPU", "thread, CUDA")
IN_PROCESS = ("process, CPU", "process, CUDA")
REPLACED = ("thread, CPU", *IN_PROCESS)
"""The columns in which the service goes on with another incarnation."""

Logs = list[EventDict]
_ATTEMPTS = 20
Run = Callable[[Setup, Fault, Logs], Awaitable[str]]


class Scenario(NamedTuple):
    """A function that causes what a row describes, the columns it is for, and the crashes to run it with.

    A crash is left out in setups that do not have it.
    """

    run: Run
    columns: tuple[str, ...]
    crashes: tuple[Fault, ...]
    replaces_cuda: bool = True
    """Whether it also runs in the setups where a CPU engine replaces CUDA."""


async def _missing(*_: object) -> str:
    raise AssertionError("the page has this row, but no scenario is for it")


_NO_SCENARIO = Scenario(_missing, (), (Fault.STICKY,))


class Case(NamedTuple):
    """One test: what a cell of the page says, and the scenario to compare it with, in one setup."""

    says: str
    run: Run
    setup: Setup
    crash: Fault

    async def check(self, logs: Logs) -> None:
        """Run the scenario, and fail if it returns something else than the page says."""
        self.setup.require()
        for _ in range(_ATTEMPTS):
            try:
                assert await self.run(self.setup, self.crash, logs) == self.says
            except CrashTooEarly:
                logs.clear()
            else:
                return
        raise AssertionError(f"the crash came too early {_ATTEMPTS} times")


class Scenarios:
    """The scenarios of one table.

    Parameters
    ----------
    heading
        The heading above the table.
    first
        The name of its first column.
    key
        How many columns, from the left, identify a row.
    """

    def __init__(self, heading: str, first: str, key: int = 1) -> None:
        self.table = table(heading, first)
        self._key = key
        self._known: dict[str, Scenario] = {}

    def row(
        self,
        *cells: str,
        columns: Sequence[str] = EVERYWHERE,
        crashes: Sequence[Fault] = (Fault.STICKY,),
        replaces_cuda: bool = True,
    ) -> Callable[[Run], Run]:
        """Decorate the scenario for the row that begins with these cells."""

        def note(run: Run) -> Run:
            key = ", ".join(cells)
            assert key not in self._known, f"two scenarios for {key!r}"
            self._known[key] = Scenario(run, tuple(columns), tuple(crashes), replaces_cuda)
            return run

        return note

    def cases(self) -> list[Any]:
        """A test parameter for each cell without a dash, each setup of its column, and each crash."""
        return [
            self._parameter(row, setup, crash, says, scenario)
            for (row, column), says in self._cells().items()
            if says != DOES_NOT_OCCUR
            for scenario in [self._known.get(row, _NO_SCENARIO)]
            for setup in COLUMNS[column]
            for crash in scenario.crashes
            if crash in setup.crashes and (scenario.replaces_cuda or not setup.replaces_cuda)
        ]

    @staticmethod
    def _parameter(row: str, setup: Setup, crash: Fault, says: str, scenario: Scenario) -> Any:
        name = f"{row} - {setup.name}" + (f" - {crash.value}" if len(scenario.crashes) > 1 else "")
        marks = [pytest.mark.gpu] if setup.device != "cpu" else []
        return pytest.param(Case(says, scenario.run, setup, crash), id=name, marks=marks)

    def check(self) -> None:
        """Fail unless the cells without a dash are exactly those that have a scenario."""
        said = {cell for cell, says in self._cells().items() if says != DOES_NOT_OCCUR}
        known = {(row, column) for row, scenario in self._known.items() for column in scenario.columns}
        assert said - known == set(), "cells of the page without a scenario"
        assert known - said == set(), "scenarios without a cell on the page"

    def _cells(self) -> dict[tuple[str, str], str]:
        columns = self.table.columns
        return {
            (", ".join(row[: self._key]), column): row[columns.index(column)]
            for row in self.table.rows
            for column in COLUMNS
        }
