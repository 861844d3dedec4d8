"""Processes of pytest-xdist share the compiling of tests: each begins with tests of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from . import forked_programs
from .compiling import own_share, share
from .patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
IMPORTS = """
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.compiling import import_share

worker = {"workerid": f"gw{sys.argv[1]}", "workercount": 2}
config = SimpleNamespace(
    workerinput=worker,
    args=sys.argv[3:],
    option=SimpleNamespace(markexpr=sys.argv[2]),
    invocation_params=SimpleNamespace(dir=Path.cwd()),
)
import_share(config)
print(*(name for name in sys.modules if ".test_" in name))
"""


def imported(number: int, expression: str, *args: str, first: str = "") -> set[str]:
    """The modules of tests that one of two processes imports at first, in a program that has run `first`."""
    words = ["-c", first + IMPORTS, str(number), expression, *args]
    done = forked_programs.run(words, cwd=ROOT, timeout=PATIENCE_S, check=True)
    return set(done.stdout.split())


def names(folder: str) -> set[str]:
    return {f"tests.{folder}.{file.stem}" for file in (ROOT / "tests" / folder).glob("test_*.py")}


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_each_file_is_in_one_share_and_shares_have_about_as_many_bytes(count: int, tmp_path: Path) -> None:
    files = [tmp_path / f"test_{number:02}.py" for number in range(40)]
    for number, file in enumerate(files):
        file.write_bytes(b"#" * (1 + number % 7))
    shares = [share(files, number, count) for number in range(count)]
    assert [file for each in shares for file in each] == files
    sizes = [sum(file.stat().st_size for file in each) for each in shares]
    assert max(sizes) - min(sizes) <= 2 * 7


def test_of_no_file_there_is_no_share() -> None:
    assert share([], 0, 2) == []


def test_two_processes_import_each_test_of_a_folder_once() -> None:
    first, second = (imported(number, "", "tests/plan_store") for number in range(2))
    assert first
    assert second
    assert (first | second, first & second) == (names("plan_store"), set())


def test_what_a_marker_leaves_out_is_in_no_share_nor_what_is_no_test() -> None:
    config: Any = SimpleNamespace(
        args=["tests/support", "tests/plan_store/test_builders.py::test_name", "tests/whole.py"],
        option=SimpleNamespace(markexpr="not gpu and not support"),
        invocation_params=SimpleNamespace(dir=ROOT),
    )
    names_of_shares = []
    for number in range(2):
        config.workerinput = {"workerid": f"gw{number}", "workercount": 2}
        names_of_shares += own_share(config)
    assert names_of_shares == ["tests.plan_store.test_builders"]


def test_what_cannot_be_imported_is_left_to_pytest() -> None:
    """One of these tests skips itself without PyTorch, and the others need the module that is missing."""
    missing = "import sys; sys.modules |= {'torch': None, 'tests.plan_store.kept_plans': None}"
    words = ("tests/engines/operations/test_sequences_against_torch.py", "tests/plan_store")
    found = imported(0, "", *words, first=missing) | imported(1, "", *words, first=missing)
    assert found < names("plan_store")


def test_a_process_of_pytest_xdist_has_begun_with_its_share(request: pytest.FixtureRequest) -> None:
    """Modules stand in the order of their imports. In pytest's only process, nothing is to be compared."""
    tests = [name for name in sys.modules if name.rpartition(".")[2].startswith("test_")]
    share_of_this_one = own_share(request.config)
    assert not share_of_this_one or tests[0] in share_of_this_one
