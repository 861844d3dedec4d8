"""What the README shows is what runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


PROGRAMS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
SHOWN = [r"c(pu|uda)/conv_fwd/\w{8}\S* \(1, 8, 222, 222\)", r"\{1, 2\} 72\.0"]
"""What each prints, in the README's order."""


@pytest.mark.parametrize(("program", "shown"), list(zip(PROGRAMS, SHOWN, strict=True)), ids=["lines", "kill"])
def test_the_readme_s_programs_run_as_they_stand(program: str, shown: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(shown, done.stdout)


def test_every_file_that_the_documents_link_to_is_there() -> None:
    for page in (README, *README.parent.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
