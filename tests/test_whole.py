"""The part of a product that `make test` runs has each pair of its values; `make test-all` runs all of it."""

from __future__ import annotations

import ast
import collections
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from . import forked_programs
from .left_out import left_out
from .patience import PATIENCE_S
from .whole import PRODUCTS, covering

PRODUCT = [*itertools.product("abcd", range(3), (False, True), "xyz")]
ROOT = Path(__file__).parents[1]
CASES = """
import pytest

@pytest.mark.pairwise
@pytest.mark.parametrize("a", [0, 1, 2])
@pytest.mark.parametrize("b", [0, 1, 2])
@pytest.mark.parametrize("c", [0, 1, 2])
def test_product(a, b, c): pass

@pytest.mark.pairwise
@pytest.mark.parametrize("a", [0, 1, 2])
@pytest.mark.parametrize("b", [0, 1, 2])
@pytest.mark.parametrize("new_engine", ["one", "other"])
def test_product_for_each_engine(a, b, new_engine): pass

@pytest.mark.pairwise
@pytest.mark.parametrize("a", [0, 1, 2])
@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("new_engine", ["exact"])
def test_product_for_the_engine_that_evaluates_definitions(a, b, new_engine): pass

@pytest.mark.pairwise(of_exact=True)
@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("new_engine", ["exact"])
def test_product_that_this_engine_computes_in_another_way(a, b, new_engine): pass

@pytest.mark.each_value
@pytest.mark.parametrize("a", [0, 1, 2])
@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("new_engine", ["one", "other"])
def test_product_of_which_each_value_is_run(a, b, new_engine): pass

@pytest.mark.parametrize("a", [0, 1, 2])
@pytest.mark.parametrize("b", [0, 1, 2])
def test_without_the_marker(a, b): pass
"""

IMPORTS = """
import importlib, pathlib, sys
import pytest
count = 0
for file in sorted(pathlib.Path("tests", sys.argv[1]).rglob("[!_]*.py")):
    try:
        importlib.import_module(".".join(file.with_suffix("").parts))
        count += 1
    except pytest.skip.Exception:  # `importorskip`
        continue
print(count)
"""


def pairs(rows: Sequence[tuple[object, ...]]) -> set[object]:
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


def test_each_pair_of_values_stands_in_few_rows() -> None:
    chosen = [PRODUCT[place] for place in covering(PRODUCT)]
    assert pairs(chosen) == pairs(PRODUCT)
    assert len(chosen) <= 16  # of 72; 12 rows are needed for the two longest columns alone


def test_pairs_that_no_row_has_are_not_asked_for() -> None:
    rows = [row for row in PRODUCT if row[0] != "a" or row[1] != 0]
    assert pairs([rows[place] for place in covering(rows)]) == pairs(rows)


def test_of_values_one_by_one_as_many_rows_stay_as_the_longest_column_has() -> None:
    assert len(covering(PRODUCT, together=1)) == 4
    assert covering([("a",), ("b",), ("a",)]) == [0, 1]


def test_of_values_one_by_one_each_of_a_short_column_stands_beside_many() -> None:
    rows = [*itertools.product(range(30), "abc")]
    chosen = [rows[place] for place in covering(rows, together=1)]
    assert sorted(number for number, _ in chosen) == [*range(30)]
    assert collections.Counter(letter for _, letter in chosen) == {"a": 10, "b": 10, "c": 10}


def test_true_is_not_1_and_what_has_no_hash_is_compared_by_identity() -> None:
    one, other = [0], [0]
    assert covering([(True, one), (1, one), (True, other), (True, one)]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("environment", "name", "run"),
    [
        ({"TEST_ALL": ""}, "", 10 + 18 + 3 + 4 + 6 + 9),
        ({"TEST_ALL": "1"}, "", 27 + 18 + 6 + 4 + 12 + 9),
        ({"TEST_ALL": ""}, "::test_product[2-2-1]", 1),
    ],
    ids=["a part", "all", "a case that is named"],
)
def test_what_is_run(environment: dict[str, str], name: str, run: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_collection_modifyitems\n")
    (tmp_path / "test_cases.py").write_text(CASES)
    # In a new interpreter: pytest warns of packages imported before it could rewrite their assertions.
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "--collect-only"]
    command += ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path / "test_cases.py") + name]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout.count("test_cases.py::") == run, done.stdout + done.stderr


@pytest.mark.parametrize("folder", ["gpu", "support"])
def test_what_need_not_be_collected_can_be_imported(folder: str) -> None:
    """Where nobody runs these tests, a name that has changed in the package must be noticed all the same."""
    done = forked_programs.run(["-W", "error", "-c", IMPORTS, folder], cwd=ROOT, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 20


def test_no_case_of_a_product_skips_itself() -> None:
    """It would count as run: a pair of values that no other case has would be tested nowhere."""
    files = {file: file.read_text(encoding="utf-8") for file in Path(__file__).parent.rglob("test_*.py")}
    products = [
        (file.name, each)
        for file, text in files.items()
        if any(f"@pytest.mark.{name}" in text for name in PRODUCTS)
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(f"mark.{name}" in ast.unparse(of) for of in each.decorator_list for name in PRODUCTS)
    ]
    assert products
    assert [(name, each.name) for name, each in products if "pytest.skip" in ast.unparse(each)] == []


@pytest.mark.parametrize(
    "expression", ["not gpu", "not gpu and not support", "pairwise and  not gpu", "a and not gpu and b"]
)
def test_what_must_not_be_marked_is_left_out(expression: str) -> None:
    assert left_out("gpu", expression)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "gpu",
        "not support",
        "not gpus",
        "not gpu or pairwise",
        "pairwise or a and not gpu",
        "not (not gpu)",
        "not not gpu",
    ],
)
def test_what_may_be_marked_is_not_left_out(expression: str) -> None:
    assert not left_out("gpu", expression)
