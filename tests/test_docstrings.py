"""The sections of a docstring in NumPy style are lines of their own, as readers and the website need them."""

from __future__ import annotations

import re

from .test_packages import ROOT, TOP

_JOINED = re.compile(r"\w -{4,}( |$)", re.MULTILINE)
"""A heading on one line with the dashes that underline it, as a tool that fills paragraphs leaves it."""


def test_no_heading_stands_on_one_line_with_its_underline() -> None:
    files = [file for top in TOP for file in sorted((ROOT / top).rglob("*.py"))]
    assert files
    assert not [str(file) for file in files if _JOINED.search(file.read_text(encoding="utf-8"))]
