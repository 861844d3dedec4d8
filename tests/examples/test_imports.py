"""Programs of the pages and examples import what they use.

Other tests run them in a process that has imported more than they do. There whoever has only imported
`importlib` has `importlib.util`, too, say.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from .test_readme import programs

ROOT = Path(__file__).parents[2]
BROUGHT = {"numpy.linalg", "numpy.random"}
"""Modules that their packages import themselves."""


def texts() -> Iterator[tuple[str, str]]:
    """Each program, with the name of its file."""
    for file in sorted((ROOT / "examples").glob("*.py")):
        yield file.name, file.read_text(encoding="utf-8")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for program in programs(page):
            yield page.name, program


def imported(tree: ast.AST) -> tuple[dict[str, str], set[str]]:
    """What names stand for, and which modules a program imports. A name may be that of a class, too."""
    names, modules = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                modules.update(accumulated(each.name))
                top = each.name.partition(".")[0]
                names[each.asname or top] = each.name if each.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                modules.update(accumulated(f"{node.module}.{each.name}"))
                names[each.asname or each.name] = f"{node.module}.{each.name}"
    return names, modules


def accumulated(name: str) -> list[str]:
    """A dotted name's packages from the outermost one on, and itself."""
    return [*itertools.accumulate(name.split("."), lambda package, part: f"{package}.{part}")]


def not_imported(program: str) -> set[str]:
    """Modules that a program reaches as attributes of their packages, and imports nowhere."""
    tree = ast.parse(program)
    names, modules = imported(tree)
    used = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    reached: set[str] = set()
    for first, _, rest in (each.partition(".") for each in used):
        if first in names:
            reached.update(name for name in accumulated(f"{names[first]}.{rest}") if is_module(name))
    return reached - modules


def is_module(name: str) -> bool:
    """Whether it is one that can be found on the path. Nothing is imported."""
    places: Sequence[str] | None = None  # all of the path
    for package in accumulated(name):
        spec = PathFinder.find_spec(package, places)
        if spec is None:
            return False
        places = spec.submodule_search_locations or ()  # nothing is in a module that is no package
    return True


@pytest.mark.parametrize(
    ("program", "missing"),
    [
        ("import importlib\nimportlib.util.find_spec('a')", {"importlib.util"}),
        ("import importlib.util\nimportlib.util.find_spec('a')", set()),
        ("import concurrent as c\nc.futures.wait([])", {"concurrent.futures"}),
        ("from concurrent import futures\nfutures.wait([])", set()),
        (
            "from concurrent import futures\nfutures.thread.ThreadPoolExecutor()",
            {"concurrent.futures.thread"},
        ),
        (
            "import cudnn_actor\ncudnn_actor.serving.server.serve()",
            {"cudnn_actor.serving", "cudnn_actor.serving.server"},
        ),
        ("import os, sys\nprint(os.path.sep, sys.argv)", set()),
    ],
)
def test_a_module_that_only_others_import_is_found(program: str, missing: set[str]) -> None:
    assert not_imported(program) == missing


def test_programs_import_each_module_that_they_use() -> None:
    found = {(name, module) for name, program in texts() for module in not_imported(program) - BROUGHT}
    assert not found
