"""Small tables in HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import msgspec

from cudnn_actor.protocol.types.short_repr import one_line, shown_value

__all__ = ["MOST_ROWS", "html_table", "record_table"]

MOST_ROWS = 50
"""The most rows of a table."""
_LONGEST_CELL = 200
"""The most characters of a cell."""


def html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of the first rows, and how many more there are. All texts are escaped.

    Parameters
    ----------
    caption
        Text above the table.
    head
        The names of the columns; empty for a table whose first column names the rows.
    rows
        The texts of each row.
    """
    lines = ["<table>", f"<caption>{_text(caption)}</caption>"]
    if head:
        lines.append(f"<tr>{''.join(f'<th>{_text(name)}</th>' for name in head)}</tr>")
    lines += [f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows[:MOST_ROWS]]
    if len(rows) > MOST_ROWS:
        lines.append(f"<tr><td>and {len(rows) - MOST_ROWS:,} more</td></tr>")
    return "\n".join([*lines, "</table>"])


def record_table(caption: str, record: msgspec.Struct) -> str:
    """A table of a record's fields; those of a record in it have its name in front."""
    return html_table(caption, (), list(_rows(record)))


def _rows(record: msgspec.Struct, before: str = "") -> Iterator[tuple[str, str]]:
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, msgspec.Struct) and type(value).__str__ is msgspec.Struct.__str__:
            yield from _rows(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", _cell(value)


def _cell(value: object) -> str:
    """A field's value: numbers with commas, and texts without quotes."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value) if isinstance(value, str | msgspec.Struct) else shown_value(value)


def _text(text: str) -> str:
    return escape(one_line(text, _LONGEST_CELL))
