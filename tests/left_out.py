"""What `-m` leaves out, and need not be collected at all."""

from __future__ import annotations

import re

__all__ = ["left_out"]


def left_out(marker: str, expression: str) -> bool:
    """Whether `-m expression` leaves out every test with this marker, whatever other markers it has.

    It does if `not marker` is one of the terms that must all hold. Of other expressions it is not said.
    """
    if re.search(r"\bor\b|[()]", expression):
        return False
    return marker in re.findall(r"(?:^|\band\s+)\s*not\s+(\w+)\s*(?=$|\band\b)", expression)
