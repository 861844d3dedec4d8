"""What `running` leaves out of a benchmark: that its module, run as a program, calls its `main`."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from .running import ROOT


@functools.cache
def mains() -> dict[Path, ast.FunctionDef]:
    """The `main` of each module that has one."""
    return {
        file: node
        for file in sorted((ROOT / "benchmarks").rglob("*.py"))
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    }


@pytest.mark.parametrize("file", mains(), ids=lambda file: file.relative_to(ROOT).as_posix())
def test_a_benchmark_is_a_program_that_ends_with_its_status(file: Path) -> None:
    returns = mains()[file].returns
    assert returns is not None
    call = "main()" if ast.unparse(returns) == "None" else "sys.exit(main())"
    last = ast.parse(file.read_text(encoding="utf-8")).body[-1]
    assert ast.unparse(last) == f"if __name__ == '__main__':\n    {call}"
