"""The tables of docs/semantics.md and of the pages that it names ("the pages") as data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["PAGES", "PROMISES", "ROOT", "TEXT", "Table", "figures", "table", "tables", "words"]

ROOT = Path(__file__).parents[2]
PROMISES = ROOT / "docs" / "semantics.md"


def _named_pages() -> list[Path]:
    """The pages in the first column of the table "How it is done", the last of the page of promises."""
    section = PROMISES.read_text().rpartition("\n## How it is done\n")[2]
    cells = re.findall(r"^\| (.*?) \|", section, flags=re.MULTILINE)
    return [PROMISES.parent / name for cell in cells for name in re.findall(r"\(([a-z-]+\.md)\)", cell)]


PAGES = [PROMISES, *_named_pages()]
TEXT = " ".join(" ".join(page.read_text() for page in PAGES).split())


class Table(NamedTuple):
    """One table: the names of its columns, and its rows, each with a cell for every column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def column(self, name: str) -> list[str]:
        """The cells of a column."""
        index = self.columns.index(name)
        return [row[index] for row in self.rows]


def tables(heading: str) -> list[Table]:
    """The tables between a heading and the next one, of any level.

    Raises `ValueError` unless exactly one page has the heading.
    """
    parts = [re.split(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE) for page in PAGES]
    (section,) = [
        body for part in parts for name, body in zip(part[1::2], part[2::2], strict=True) if name == heading
    ]
    blocks = re.findall(r"(?:^\|.*\n?)+", section, flags=re.MULTILINE)
    return [_parsed(block.splitlines()) for block in blocks]


def table(heading: str, first_column: str) -> Table:
    """The only table under a heading whose first column's name begins like this."""
    (found,) = [one for one in tables(heading) if one.columns[0].startswith(first_column)]
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
