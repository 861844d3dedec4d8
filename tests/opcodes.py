"""Tracing of opcodes, on every Python that runs the tests."""

from __future__ import annotations

import sys

__all__ = ["want_opcodes"]


def want_opcodes() -> None:
    """Have opcodes traced by the next `sys.settrace`: Python 3.12 needs a frame that has wanted them before.

    That is this one, which ends at once: in a frame that goes on, the next opcode would be told to a tracer
    that may be gone.
    """
    sys._getframe().f_trace_opcodes = True
