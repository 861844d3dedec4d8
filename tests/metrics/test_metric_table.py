"""The table of all metrics, and the page that has it."""

from __future__ import annotations

from pathlib import Path

from cudnn_actor.metrics.metric_table import FAMILIES, markdown_table

PAGE = Path(__file__).resolve().parents[2] / "docs/observability.md"


def test_the_page_lists_all_metrics() -> None:
    """If it does not, print the table:

    `python -c "from cudnn_actor.metrics.metric_table import *; print(markdown_table())"`.
    """
    assert markdown_table() in PAGE.read_text()


def test_no_name_stands_twice() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
