"""What the README shows is what runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_s_fifteen_lines_run_as_they_stand(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    program = tmp_path / "fifteen_lines.py"
    program.write_text(block)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"c(pu|uda)/conv_fwd/\w{8}\S* \(1, 8, 222, 222\)", done.stdout)


def test_every_file_that_the_documents_link_to_is_there() -> None:
    for page in (README, *README.parent.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
