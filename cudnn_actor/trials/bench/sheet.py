"""A table as data, for output on a terminal or on a page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

__all__ = ["Sheet", "as_text", "median", "number", "ratio", "verdict"]

MISSING = "–"


class Sheet(NamedTuple):
    """A titled table of text.

    Parameters
    ----------
    title
        What it shows.
    columns
        The headings; the first column has names, the others have figures.
    rows
        The rows, with one cell for each heading.
    note
        What a reader must know, in a sentence or two.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def as_text(sheet: Sheet) -> Group:
    """The sheet for a terminal of 100 columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(sheet.columns):
        table.add_column(name, justify="right" if place else "left", vertical="bottom", no_wrap=not place)
    for cells in sheet.rows:
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells))
    note = [Text(sheet.note, style="dim")] if sheet.note else []
    return Group(Text(sheet.title, style="bold"), table, *note, Text())


def median(values: Iterable[float]) -> float | None:
    """The median; None without values."""
    known = list(values)
    return statistics.median(known) if known else None


def ratio(values: list[float], others: list[float]) -> float | None:
    """The median of the rounds' ratios; None if either was not measured."""
    return median(value / other for value, other in zip(values, others, strict=False) if other)


def number(value: float | None, digits: int = 1) -> str:
    """A figure, or a dash if there is none."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def verdict(value: float | None, aim: float, *, at_least: bool = True) -> str:
    """A ratio, and whether it meets its target."""
    if value is None:
        return MISSING
    met = value >= aim if at_least else value <= aim
    return f"{value:.2f} {'met' if met else 'missed'}"
