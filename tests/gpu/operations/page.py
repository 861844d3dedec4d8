"""The sections of the support page on operations that are no convolutions: one for each family."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from cudnn_actor.protocol import DType, Layout

from ..page_parts import largest, markdown, words_by_rank
from ..support_record import Record
from . import EXACTNESS, ROWS
from .drawing import OperationCell, cells
from .rows import Row

__all__ = ["section"]

_RECORDED = """\
Largest error of all cells, in terms of its bound; 0.00 where every result is the correctly rounded one:
"""


def section(family: str, record: Record | None) -> str:
    """A family's section."""
    rows = [row for row in ROWS if row.family == family]
    parts = [
        f"## {_words(family).capitalize()}\n",
        "In this section, numbers behind a word count the dims of the first input.\n",
    ]
    for row in rows:
        parts += [f"### {row.operation.__name__}\n", _table(row, record)]
    verb = "are" if family.endswith("s") else "is"
    parts += [f"### How exact {_words(family)} {verb}\n", EXACTNESS[family]]
    if record is not None and any(cell.name in record.cells for cell in cells(family)):
        parts += [_RECORDED, _errors(rows, record)]
    return "\n".join(parts)


def _words(family: str) -> str:
    return family.replace("_", " ")


def _table(row: Row, record: Record | None) -> str:
    """Dtypes and layouts down, forms across. Layouts that fare alike share a line, and so do dtypes then."""
    lines = [(dtype, *line) for dtype in row.dtypes for line in _layouts(row, dtype, record)]
    merged: dict[tuple[str, ...], list[str]] = {}
    for dtype, *line in lines:
        merged.setdefault(tuple(line), []).append(dtype)
    body = [[", ".join(dtypes), *line] for line, dtypes in merged.items()]
    return markdown(["dtype", "layout", *row.forms], body)


def _layouts(row: Row, dtype: DType, record: Record | None) -> Iterator[tuple[str, ...]]:
    words = {
        layout: tuple(words_by_rank(_cells(row, dtype, layout, form), record) for form in row.forms)
        for layout in Layout
    }
    for alike, layouts in itertools.groupby(Layout, words.__getitem__):
        yield ", ".join(layouts), *alike


def _cells(row: Row, dtype: DType, layout: Layout, form: str) -> list[OperationCell]:
    wanted = (row, dtype, layout, form)
    return [c for c in cells(row.family) if (c.row, c.dtype, c.layout, c.form) == wanted]


def _errors(rows: list[Row], record: Record) -> str:
    dtypes = list(dict.fromkeys(dtype for row in rows for dtype in row.dtypes))
    table = [[dtype.value, *(_largest(row, dtype, record) for row in rows)] for dtype in dtypes]
    return markdown(["dtype", *(row.operation.__name__ for row in rows)], table)


def _largest(row: Row, dtype: DType, record: Record) -> str:
    alike = (c.name for c in cells(row.family) if c.row is row and c.dtype is dtype)
    return largest(record.cells[name] for name in alike if name in record.cells)
