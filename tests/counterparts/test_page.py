"""The page of cuDNN's functions is made from the table, and what the table names is there."""

from __future__ import annotations

import collections
import re

import pytest

from .names import unknown_names
from .page import PAGE, render
from .table import FRONTEND, HEADERS, Row

FUNCTIONS = [row for header in HEADERS for row in header.rows]
METHODS = [row for _, rows in FRONTEND for row in rows]


def test_the_page_is_what_its_generator_makes() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python -m tests.counterparts.page"


@pytest.mark.parametrize("rows", [FUNCTIONS, METHODS], ids=["C", "Python"])
def test_a_function_is_listed_once(rows: list[Row]) -> None:
    listed = collections.Counter(name for row in rows for name in row.names)
    assert [name for name, count in listed.items() if count > 1] == []


def test_what_the_table_names_is_there() -> None:
    assert {row.functions: wrong for row in FUNCTIONS + METHODS if (wrong := unknown_names(row.answer))} == {}


def test_the_sections_that_the_table_links_to_are_there() -> None:
    links = {link for row in FUNCTIONS + METHODS for link in re.findall(r"\]\(([^)]+)\)", row.answer)}
    for name, _, section in (link.partition("#") for link in links):
        titles = re.findall(r"^#+ (.*)$", (PAGE.parent / name).read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not section or section in anchors, f"{name}#{section}"


def test_names_that_are_not_there_are_found() -> None:
    right = "`gpu.apply(graph)`, `g.relu(x, upper=6)`, `TensorSpec.nbytes`, `cudnn-actor doctor`, `mode`"
    assert unknown_names(right) == []
    wrong = ["g.rely(x)", "g.relu(x, over=6)", "g.abs(x, y)", "Conv", "TensorSpec.bytes", "cudnn-actor medic"]
    assert unknown_names(" ".join(f"`{code}`" for code in wrong)) == wrong
