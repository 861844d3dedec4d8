"""Rows of a benchmark as they are measured: printed, as a table, and as a file, also where it ends early."""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

__all__ = ["Row", "attempted", "ends_at_sigterm", "keep", "table_of", "write_found"]

Row = dict[str, Any]


def attempted(what: str, rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows of a part; where it fails, a row with its error in their place, so that the others go on."""
    try:
        yield from rows()
    except Exception as error:  # noqa: BLE001 - recorded
        traceback.print_exc()
        yield {"part": what, "error": f"{type(error).__name__}: {error}"}


def keep(
    rows: Iterable[Row],
    sheet: Callable[[list[Row]], RenderableType],
    out: Path | None,
    name: str,
    **known: Any,
) -> None:
    """Print each row at once; at the end, be it an error, ^C or SIGTERM, write the file and print the table.

    `known` is what the file says besides; it also says how many seconds that took. What failed is in the
    file, and below the table.
    """
    ends_at_sigterm()
    found, start = list[Row](), time.monotonic()
    try:
        for row in rows:
            found.append(row)
            print(json.dumps(row), flush=True)
    finally:
        if out is not None:
            write_found(out, name, found, **known, seconds=round(time.monotonic() - start, 1))
        console = Console(width=200)
        console.print(sheet([row for row in found if "error" not in row]))
        for row in found:
            if "error" in row:
                console.print(f"failed: {row['part']}: {row['error']}", markup=False)


def table_of(title: str, found: list[Row]) -> Table:
    """The table of rows that have the same columns."""
    table = Table(title=title)
    for name in found[0] if found else ():
        table.add_column(name, justify="right")
    for row in found:
        table.add_row(*map(str, row.values()))
    return table


def ends_at_sigterm() -> None:
    """Have SIGTERM, which `timeout` sends, do what ^C does, also where that is ignored."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def write_found(folder: Path, name: str, found: list[Row] | Row, **known: Any) -> None:
    """Write what a benchmark has found, and what is known of the run, to a new file; print its path."""
    record = {**known, "date": time.strftime("%Y-%m-%dT%H:%M:%S"), "found": found}
    path = folder / time.strftime(f"{name}-%Y%m%dT%H%M%S.json")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)
