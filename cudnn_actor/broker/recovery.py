"""What happens to a request that was running at a crash, as a pure function.

==========================  ======================  ==============================  ===============
request                     crashes before this     answer                          what it writes
==========================  ======================  ==============================  ===============
not started                 any                     none yet: runs later            untouched
pure (output not read)      0                       none yet: runs again, first     kept
not pure                    0                       `OutcomeUnknown`                torn
any                         1                       `QuarantinedRequest`            torn
writes, may still write     0                       `OutcomeUnknown`                torn, withheld
a run with `again=False`    0                       `OutcomeUnknown`                torn
==========================  ======================  ==============================  ===============

A run of a model (`RunModel`) counts the crashes before it that it was sent with. So a batch that is divided
after a crash costs one more crash for each part that is a cause, and no other part is blamed.

What becomes of the graph that was running:

==========================================  ====================================================
graph                                       quarantined, so that all later requests are refused
==========================================  ====================================================
of a message (`RunGraph`, `ConvFwd`, ...)   with the first of its requests that is
of a model, and no run of it has finished   at the second crash at which a run of it was running
of a model, and a run of it has finished    at the third such crash with no finished run between
==========================================  ====================================================

A graph whose runs have finished is rarely the cause: one sample is. The third crash is the last that the
default restart intensity allows, so a graph that kills every worker is stopped before the service ends.

A worker that the kernel has not ended in time (`monitor.KILLED_S`) may
still write. The outputs of its last requests are torn, and no other buffer gets
their bytes until it has ended.

If memory does not outlive the device context (`outlives_context` is False),
every request fails with `ContextLost` and every buffer is lost.
"""

from __future__ import annotations

import enum

__all__ = ["MOST_CRASHES", "Verdict", "graph_is_cause", "judge"]

MOST_CRASHES = 2
"""A request that was running at this many crashes is assumed to be their cause."""


class Verdict(enum.Enum):
    """What to do with a request that was running at a crash."""

    RUN_AGAIN = "run again"
    OUTCOME_UNKNOWN = "outcome unknown"
    QUARANTINE = "quarantine"
    CONTEXT_LOST = "context lost"


def graph_is_cause(*, crashes: int, finished: bool) -> bool:
    """Whether a model's graph is quarantined after so many crashes in a row. `finished`: it ran before."""
    return crashes >= MOST_CRASHES + finished


def judge(*, repeatable: bool, crashes: int, outlives_context: bool, may_still_write: bool) -> Verdict:
    """The verdict on a request that was running at a crash, its `crashes`-th, counted from 1.

    `repeatable`: it is pure, and its sender did not want to be told instead.
    """
    if not outlives_context:
        return Verdict.CONTEXT_LOST
    if crashes >= MOST_CRASHES:
        return Verdict.QUARANTINE
    if may_still_write:
        return Verdict.OUTCOME_UNKNOWN
    return Verdict.RUN_AGAIN if repeatable else Verdict.OUTCOME_UNKNOWN
