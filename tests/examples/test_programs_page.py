"""The page of programs: each row names a program that is there, has as many lines, and is run by a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| ([^|]+) \| \[[^\]]+\]\(([^)]+)\) \| (\d+) \| `([^:`]+)::(\w+)` \|$",
    (ROOT / "docs/programs.md").read_text(encoding="utf-8"),
    flags=re.MULTILINE,
)


def lengths(target: str) -> list[int]:
    """How many lines a linked example has, or each program below a linked heading."""
    name, _, anchor = target.partition("#")
    text = (ROOT / "docs" / name).resolve().read_text(encoding="utf-8")
    if not anchor:
        return [text.count("\n")]
    sections = re.split(r"^(#+ .+)$", text, flags=re.MULTILINE)
    [section] = [
        body
        for heading, body in zip(sections[1::2], sections[2::2], strict=True)
        if re.sub(r"[^\w-]", "", heading.lstrip("# ").lower().replace(" ", "-")) == anchor
    ]
    return [found.count("\n") for found in re.findall(r"```py(?:thon)?\n(.*?)```", section, flags=re.DOTALL)]


def test_it_has_all_programs() -> None:
    assert len(ROWS) == 14  # twelve programs, of which two are in two parts


@pytest.mark.parametrize(("target", "lines"), [row[1:3] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_program_has_as_many_lines_as_it_says(target: str, lines: str) -> None:
    assert int(lines) in lengths(target)


@pytest.mark.parametrize(("file", "test"), [row[3:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_test_of_a_program_is_there(file: str, test: str) -> None:
    assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")
