"""How long a test waits for what must happen: only a hang takes so long, however slow the machine.

No test waits for so long in order to pass. Where a limit of the product is to pass, such as a deadline, the
test configures that limit.

Who expects a hang, such as of a change that is wrong on purpose, shortens it: `PATIENCE_S=5 pytest ...`.
"""

from __future__ import annotations

import os

__all__ = ["PATIENCE_S"]

PATIENCE_S = int(os.environ.get("PATIENCE_S", "600"))
"""Seconds: more than ten times what the slowest program of a test takes on two slow cores that others use.

A whole number, since `signal.alarm` takes no other. `make` gives each test twice as long, so that the test
itself says what did not happen.
"""
