"""The map of the packages in CONTRIBUTING.md, made from the first sentences of their docstrings.

python -m tests.rooms     writes the map
"""

from __future__ import annotations

import ast
from pathlib import Path

from .test_packages import ROOT, declared

__all__ = ["PAGE", "rendered", "rooms"]

PAGE = ROOT / "CONTRIBUTING.md"
_HEAD = "| room | what is in it |\n| --- | --- |\n"


def rooms() -> dict[str, str]:
    """The folder of each package with code, and the first paragraph of its docstring."""
    files = {folder: ROOT / folder / "__init__.py" for folder in declared().values()}
    return {folder: _purpose(file) for folder, file in files.items() if file.exists()}


def _purpose(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert docstring, f"{file} has no docstring"
    return " ".join(docstring.partition("\n\n")[0].split())


def rendered(page: str) -> str:
    """The page with the map as its last part."""
    rows = [f"| `{folder}/` | {purpose} |\n" for folder, purpose in sorted(rooms().items())]
    return page.partition(_HEAD)[0] + _HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
