"""What the README and the page of operations show is what runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
PAGES = [README.parent / "docs" / name for name in ("operations.md", "graphs.md")]


def programs(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


SHOWN = [r"c(pu|uda)/conv_fwd/\w{8}\S* \(1, 8, 222, 222\) \(1, 8, 111, 111\)", r"\{1, 2\} 72\.0"]
"""What each prints, in the README's order."""


@pytest.mark.parametrize(
    ("program", "shown"), list(zip(programs(README), SHOWN, strict=True)), ids=["lines", "kill"]
)
def test_the_readme_s_programs_run_as_they_stand(program: str, shown: str, tmp_path: Path) -> None:
    assert re.search(shown, printed(program, tmp_path))


@pytest.mark.parametrize("program", [program for page in PAGES for program in programs(page)])
def test_the_programs_of_the_pages_print_what_the_page_says(program: str, tmp_path: Path) -> None:
    said = program.rstrip().rpartition("  # ")[2]
    assert printed(program, tmp_path) == f"{said}\n"


def printed(program: str, tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_that_the_documents_link_to_is_there() -> None:
    for page in (README, *README.parent.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
