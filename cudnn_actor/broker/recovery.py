"""The verdict on a request that was running at a crash, as a pure function of what is known of it.

The first row that holds decides:

=====================================================  ======================  ======================
what is known of the request                           its answer              what it writes
=====================================================  ======================  ======================
memory does not outlive the device context             `ContextLost`           lost, as every buffer
it was running at a crash before                       `QuarantinedRequest`    torn
it writes, and the process may still write             `OutcomeUnknown`        torn, and withheld
it has staging memory, and the process may still       `OutcomeUnknown`        torn, and withheld
write
a later running request writes what it reads           `OutcomeUnknown`        torn
it is a run with `again=False`                         `OutcomeUnknown`        torn
it is not pure: it reads what it writes                `OutcomeUnknown`        torn
none of these                                          it runs again, first    stays valid
                                                       and alone
=====================================================  ======================  ======================

`InterruptedRequests` asks for the verdict and carries it out. The host of the broker hands it the
requests that were running. Those that had not begun run later, and those that had finished are answered:
`isolation.process.parent.crash` tells them apart by the status page of the worker that has ended. A thread
that does not end keeps the memory table, so `CudnnActor.on_crash` answers its requests without a verdict.

A run of a model (`RunModel`) also counts the crashes that it was sent with. After a crash, a batch of several
requests is divided, and each of its requests runs alone with that crash. A request that is a cause crashes
the worker once more then, and no other request is blamed.

The consequences for the graph that was running:

==========================================  ====================================================
graph                                       quarantined, so that all later requests are refused
==========================================  ====================================================
of a message (`RunGraph`, `ConvFwd`, ...)   with the first of its requests that is
of a model, and no run of it has finished   at the second crash at which a run of it was running
of a model, and a run of it has finished    at the third such crash with no finished run between
==========================================  ====================================================

A graph whose runs have finished is rarely the cause: one sample is. The third crash is the last that the
default restart intensity allows, so a graph that kills every worker is stopped before the service ends.

A process may still write if the kernel has not ended it in time (`monitor.KILLED_S`). The buffers and the
staging memory of requests that do not run again are withheld from all others until it has ended.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["QUARANTINED_AT", "Interrupted", "Outcome", "Verdict", "graph_is_cause", "verdict_on"]

QUARANTINED_AT = 2
"""At how many crashes a request must have been running to be quarantined, as their assumed cause: at its
second, it is not run again."""


class Outcome(enum.Enum):
    """The outcome of a request that was running at a crash."""

    RUN_AGAIN = "run again"
    OUTCOME_UNKNOWN = "outcome unknown"
    QUARANTINE = "quarantine"
    CONTEXT_LOST = "context lost"


class Verdict(NamedTuple):
    """The outcome of a request, and why it is unknown; "" for the other outcomes."""

    outcome: Outcome
    why: str = ""


class Interrupted(NamedTuple):
    """The facts about a request that was running at a crash.

    Attributes
    ----------
    crashes
        At how many crashes it was running, including this one: 1 at its first.
    pure
        Whether a second run gives the same: it reads nothing that it writes.
    again
        Whether its sender lets it run again.
    writes
        Whether it writes a buffer, or weights, or places of a model's graph.
    has_staging
        Whether it has staging memory, which its worker reads or writes.
    is_input_overwritten
        Whether a later request that was running, too, may have overwritten its input.
    """

    crashes: int = 1
    pure: bool = True
    again: bool = True
    writes: bool = True
    has_staging: bool = False
    is_input_overwritten: bool = False


def verdict_on(request: Interrupted, *, memory_survives: bool, may_still_write: bool) -> Verdict:
    """The verdict on a request: the table above, row by row.

    `memory_survives`: memory outlives the device context. `may_still_write`: the process that ran the request
    could not be ended.
    """
    if not memory_survives:
        return Verdict(Outcome.CONTEXT_LOST)
    if request.crashes >= QUARANTINED_AT:
        return Verdict(Outcome.QUARANTINE)
    unknown = (
        (may_still_write and request.writes, "it may still be written"),
        (may_still_write and request.has_staging, "its process may still use its place in staging memory"),
        (request.is_input_overwritten, "a later request may have overwritten its input"),
        (not request.again, "it was sent with again=False"),
        (not request.pure, "it reads what it writes"),
    )
    for holds, why in unknown:
        if holds:
            return Verdict(Outcome.OUTCOME_UNKNOWN, why)
    return Verdict(Outcome.RUN_AGAIN)


def graph_is_cause(*, crashes: int, finished: bool) -> bool:
    """Whether a model's graph is quarantined that was running at this many crashes since its last finished
    run. `finished`: a run of it has finished."""
    return crashes >= QUARANTINED_AT + finished
