"""`docs/cudnn-functions.md`, made from the table.

python -m tests.counterparts.page     writes the page
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from pathlib import Path

from .table import FRONTEND, HEADERS, Kind, Row

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).parents[2] / "docs" / "cudnn-functions.md"

_HEAD = """\
# cuDNN's functions, and what does the same here

Made by `python -m tests.counterparts.page` from `tests/counterparts/table.py`. Do not edit it by hand.

This page lists each function of cuDNN's headers (9.28), and each public name of `pygraph`, the graphs of
its Python frontend (1.32), with its counterpart in this package. [cudnn.md](cudnn.md) has programs for the
functions of the older API.

In the tables, `gpu` is the handle that `spawn` gives, and `g` is a `GraphBuilder`. Names that begin with a
capital letter are classes of this package: [messages](operations.md), or types of their fields.

| | has a counterpart | nothing to call | not yet | no |
| --- | --- | --- | --- | --- |
{counts}
"""

_OF_HEADERS = """
## The C functions
"""

_OF_FRONTEND = """
## The graphs in Python

A graph is built here with `GraphBuilder`. [graphs.md](graphs.md) says how.
"""


def render() -> str:
    """The page."""
    functions = [row for header in HEADERS for row in header.rows]
    methods = [row for _, rows in FRONTEND for row in rows]
    counts = "\n".join(
        f"| {what} | {' | '.join(map(str, _counted(rows)))} |"
        for what, rows in (("functions in C", functions), ("names of `pygraph`", methods))
    )
    of_headers = (f"\n### {each.title}\n\nIn `{each.name}.h`.\n\n{_table(each.rows)}" for each in HEADERS)
    of_frontend = (f"\n### {title} in Python\n\n{_table(rows)}" for title, rows in FRONTEND)
    return "".join([_HEAD.format(counts=counts), _OF_HEADERS, *of_headers, _OF_FRONTEND, *of_frontend])


def _counted(rows: Iterable[Row]) -> Iterator[int]:
    of = collections.Counter(row.kind for row in rows for _ in row.names)
    return (of[kind] for kind in Kind)


def _table(rows: Iterable[Row]) -> str:
    lines = (
        f"| {', '.join(f'`{name}`' for name in row.names)} | {row.kind.value}{row.answer} |\n" for row in rows
    )
    return f"| function | here |\n| --- | --- |\n{''.join(lines)}"


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
