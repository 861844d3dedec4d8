"""What becomes of a request that was running at a crash: a pure decision.

==========================  ======================  ==============================  ===============
request                     crashes before this     answer                          what it writes
==========================  ======================  ==============================  ===============
not started                 any                     none yet: runs later            untouched
pure (output not read)      0                       none yet: runs again, first     kept
not pure                    0                       `OutcomeUnknown`                torn
any                         1                       `QuarantinedRequest`            torn
writes, may still write     0                       `OutcomeUnknown`                torn, withheld
==========================  ======================  ==============================  ===============

A worker that the kernel has not ended in time may still write. What its last
requests write is torn, and the bytes go to no other buffer until it has ended.

Where the context's memory dies with it (`outlives_context` is False), every
request ends in `ContextLost` and every buffer is lost.
"""

from __future__ import annotations

import enum

__all__ = ["MOST_CRASHES", "Verdict", "judge"]

MOST_CRASHES = 2
"""A request that was running at this many crashes is taken for their cause."""


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
