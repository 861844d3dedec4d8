"""What happens to a request that was running at a crash, as a pure function.

==========================  ======================  ==============================  ===============
request                     crashes before this     answer                          what it writes
==========================  ======================  ==============================  ===============
not started                 any                     none yet: runs later            untouched
pure (output not read)      0                       none yet: runs again, first     kept
not pure                    0                       `OutcomeUnknown`                torn
any                         1                       `QuarantinedRequest`            torn
writes, may still write     0                       `OutcomeUnknown`                torn, withheld
==========================  ======================  ==============================  ===============

A worker that the kernel has not ended in time (`monitor.KILLED_S`) may
still write. The outputs of its last requests are torn, and no other buffer gets
their bytes until it has ended.

If memory does not outlive the device context (`outlives_context` is False),
every request fails with `ContextLost` and every buffer is lost.
"""

from __future__ import annotations

import enum

__all__ = ["MOST_CRASHES", "Verdict", "judge"]

MOST_CRASHES = 2
"""A request that was running at this many crashes is assumed to be their cause."""


class Verdict(enum.Enum):
    """What to do with a request that was running at a crash."""

    RUN_AGAIN = "run again"
    OUTCOME_UNKNOWN = "outcome unknown"
    QUARANTINE = "quarantine"
    CONTEXT_LOST = "context lost"


def judge(*, pure: bool, crashes: int, outlives_context: bool, may_still_write: bool) -> Verdict:
    """The verdict on a request that was running at a crash, its `crashes`-th, counted from 1."""
    if not outlives_context:
        return Verdict.CONTEXT_LOST
    if crashes >= MOST_CRASHES:
        return Verdict.QUARANTINE
    if may_still_write:
        return Verdict.OUTCOME_UNKNOWN
    return Verdict.RUN_AGAIN if pure else Verdict.OUTCOME_UNKNOWN
