"""A wait that a slow machine could reach is in no test: all have the one limit of `tests/patience.py`."""

from __future__ import annotations

import re

from .patience import PATIENCE_S
from .test_packages import ROOT

LIMITS = re.compile(
    r"(?:\.(?:wait|join|result|exception|acquire|communicate|alarm|dump_traceback_later|settimeout)"
    r"|\bmark\.timeout|\basyncio\.timeout)\((?:timeout=)?(\d+(?:\.\d+)?)[,)]"
    r"|\btimeout=(\d+(?:\.\d+)?),? (?:check|capture_output|cwd|env|text)=|PATIENCE_S = (\d+)"
)
ON_PURPOSE = {
    "supervision/test_hung_children.py": ["1.0"],  # a last act that takes a while
}
"""What is to pass, and how slow the machine is does not count."""
FOLDERS = {"gpu", "support"}
"""They run where somebody looks at them."""


def test_no_wait_has_a_limit_of_its_own() -> None:
    found = {}
    for file in sorted((ROOT / "tests").rglob("*.py")):
        path = file.relative_to(ROOT / "tests")
        if path.parts[0] in FOLDERS:
            continue
        numbers = ["".join(each.groups("")) for each in LIMITS.finditer(file.read_text(encoding="utf-8"))]
        if limits := [number for number in numbers if float(number) >= 1]:
            found[path.as_posix()] = limits
    assert found == ON_PURPOSE


def test_a_test_has_longer_than_a_wait() -> None:
    limits = re.findall(r"--timeout (\d+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert limits
    assert all(int(limit) >= 2 * PATIENCE_S for limit in limits)
