"""The tables of docs/semantics.md ("the page") as data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["PAGE", "ROOT", "Table", "figures", "table", "tables", "words"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "semantics.md"


class Table(NamedTuple):
    """One table: the names of its columns, and its rows, each with a cell for every column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def column(self, name: str) -> list[str]:
        """The cells of a column."""
        index = self.columns.index(name)
        return [row[index] for row in self.rows]


def tables(heading: str, page: Path = PAGE) -> list[Table]:
    """The tables between a heading and the next one, of any level. Raises `KeyError` for no such heading."""
    sections = re.split(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    section = dict(zip(sections[1::2], sections[2::2], strict=True))[heading]
    blocks = re.findall(r"(?:^\|.*\n?)+", section, flags=re.MULTILINE)
    return [_parsed(block.splitlines()) for block in blocks]


def table(heading: str, first_column: str, page: Path = PAGE) -> Table:
    """The only table under a heading whose first column's name begins like this."""
    (found,) = [one for one in tables(heading, page) if one.columns[0].startswith(first_column)]
    return found


def _parsed(lines: list[str]) -> Table:
    columns, separator, *rows = [_cells(line) for line in lines]
    assert all(set(cell) <= set("-: ") for cell in separator), f"no separator row under {columns}"
    for row in rows:
        assert len(row) == len(columns), f"{len(row)} cells, not {len(columns)}: {row}"
    return Table(columns, tuple(rows))


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|"))


def words(cell: str) -> list[str]:
    """The words of a cell that are in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def figures(cell: str) -> list[float]:
    """The numbers in a cell."""
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)]
