"""What `running` leaves out of a benchmark: that its module, run as a program, calls its `main`."""

from __future__ import annotations

import ast
from pathlib import Path

from .running import ROOT


def last_lines(file: Path) -> tuple[str, str]:
    """The statement at a module's end, and what its `main` wants there; "" for both if it has none."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            assert node.returns is not None, file
            call = "main()" if ast.unparse(node.returns) == "None" else "sys.exit(main())"
            return ast.unparse(body[-1]), f"if __name__ == '__main__':\n    {call}"
    return "", ""


def test_each_benchmark_is_a_program_that_ends_with_its_status() -> None:
    found = {str(file): last_lines(file) for file in (ROOT / "benchmarks").rglob("*.py")}
    assert sum(last != "" for last, _ in found.values()) > 40
    assert {file: last for file, (last, wanted) in found.items() if last != wanted} == {}
