"""The changes that CONTRIBUTING.md shows are in their files; its lists match the Makefile and the folders."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import pytest

from .rooms import PAGE, rendered
from .test_packages import ROOT

TEXT = PAGE.read_text(encoding="utf-8")
CHANGES = TEXT.partition("## The five changes")[2].partition("\n## ")[0]


def excerpts() -> Iterator[tuple[str, str, list[str]]]:
    """Of each change: its title, and a file with the pieces of it that are shown, in order."""
    for part in CHANGES.split("\n### ")[1:]:
        for block in re.findall(r"^( *)```diff\n(.*?)^ *```$", part, flags=re.DOTALL | re.MULTILINE):
            for section in ("\n" + textwrap.dedent(block[1])).split("\n+++ ")[1:]:
                path, _, lines = section.partition("\n")
                shown = "".join(f"{line[1:]}\n" if line[:1] in "+ " else "\0" for line in lines.splitlines())
                yield part.partition("\n")[0], path, shown.split("\0")


@pytest.mark.parametrize(
    ("path", "pieces"),
    [each[1:] for each in excerpts()],
    ids=[f"{title}, {path}" for title, path, _ in excerpts()],
)
def test_the_lines_of_a_change_stand_in_its_file_in_this_order(path: str, pieces: list[str]) -> None:
    rest = "\n" + (ROOT / path).read_text(encoding="utf-8")
    for piece in pieces:
        _, found, rest = rest.partition(f"\n{piece}")
        assert found, f"{path} has not, or not in this place:\n{piece}"
        rest = f"\n{rest}"


def test_each_of_the_five_changes_is_shown() -> None:
    titles = ["An operation", "A fusion rule", "An ONNX operator", "A message", "A chaos fault"]
    assert [*dict.fromkeys(title for title, *_ in excerpts())] == titles


def test_every_test_that_the_changes_name_is_there() -> None:
    files = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    named = set(re.findall(r"`(test_\w+)`", CHANGES))
    assert named
    assert {name for name in named if not any(f"def {name}(" in file for file in files)} == set()


def test_every_target_of_the_makefile_is_explained() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [targets] = re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    table = TEXT.partition("| target |")[2].partition("\n\n")[0]
    firsts = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert sorted(re.findall(r"`make ([\w-]+)`", "".join(firsts))) == sorted(targets.split())


def test_a_file_of_more_than_600_lines_says_why() -> None:
    rooms = (
        "actors",
        "benchmarks",
        "cudnn_actor",
        "docker",
        "examples",
        "protocol",
        "supervision",
        "tests",
        "website",
    )
    texts = {path: path.read_text(encoding="utf-8") for room in rooms for path in (ROOT / room).rglob("*.py")}
    long = {path: text for path, text in texts.items() if text.count("\n") > 600}
    assert long
    assert [
        path for path, text in long.items() if "The file is long because" not in text.split('"""')[1]
    ] == []


def test_git_runs_what_make_check_runs() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"entry: (.*)", hooks) == ["make check"]


def test_the_map_names_each_room_with_its_purpose() -> None:
    assert rendered(TEXT) == TEXT, "run python -m tests.rooms"
