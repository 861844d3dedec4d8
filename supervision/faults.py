"""Scripted faults: test what your own code does when a GPU service fails.

    plan = (
        FaultPlan(seed=7)
        .at(3, Fault.STICKY)                           # the 3rd message kills the device context
        .at(2, Fault.FAIL_EXECUTION, of=ConvFwd)       # the 2nd ConvFwd fails, and no other does
        .chance(0.01, Fault.SLOW, seconds=0.05)        # one message in a hundred takes 50 ms longer
        .at_start(2)                                   # the first restart fails to start
    )
    async with spawn(device="cpu", faults=plan) as gpu: ...

Messages and starts are counted from 1 over the service's whole life: a restart does not reset the count, so a
fault `at(3)` fires once and not once per incarnation. A message that runs again after a crash counts
again. Control messages (`Ping`, `GetStatistics`) are not counted. If several rules match one message, the one
that was added first fires, and the others do not fire later in its place. The same seed, plan and sequence of
messages give the same faults, in every process.
"""

from __future__ import annotations

import enum
from typing import get_args

import msgspec

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.messages.computations import COMPUTE
from cudnn_actor.protocol.messages.messages import Explain, Message, RunModel
from cudnn_actor.protocol.types.checks import require_fraction, require_member, require_seconds, require_whole
from cudnn_actor.protocol.types.short_repr import short_repr

__all__ = ["Fault", "FaultPlan", "FaultRule"]

_REPLIED = tuple(sorted(message.__name__ for message in (*COMPUTE, Explain, RunModel)))
"""The messages whose reply says that a plan could not be built."""
_COUNTED = tuple(sorted(message.__name__ for message in get_args(Message) if not message.control))


class Fault(enum.StrEnum):
    """A kind of fault."""

    REJECT_BUILD = "reject build"
    """The plan cannot be built: the reply is `UnsupportedGraph`. No effect on a message without a plan; and
    `Warm` and `WarmModel` leave out what cannot be built, without an error."""
    FAIL_EXECUTION = "fail execution"
    """The run fails and the context survives: the reply is `ExecutionFailed`."""
    OUT_OF_MEMORY = "out of memory"
    """An allocation fails: the reply is `OutOfMemory`."""
    STICKY = "sticky"
    """The device context dies: the worker is replaced."""
    HANG = "hang"
    """The message never ends: the watchdog kills the worker, which is replaced."""
    SLOW = "slow"
    """The message takes the rule's `seconds` longer."""
    CRASH_IN_START = "crash in start"
    """A start of the worker fails, which counts like a crash. Use `at_start` for it."""
    KILL = "kill"
    """The worker ends at once, as by SIGKILL: it is replaced."""


class FaultRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule of a `FaultPlan`; use the plan's methods to make one.

    Parameters
    ----------
    fault
        What goes wrong.
    at
        Fires from this message on (for `CRASH_IN_START`: from this start on), counted from 1. Give either
        this or `probability`.
    probability
        Fires at each message with this probability, 0 to 1.
    of
        Only messages of this class are counted and affected; None: all.
    times
        With `at`: fires at this many messages in a row. With `probability`: fires at most this
        often. None: no limit.
    seconds
        How much longer the message takes; only for `SLOW`.

    Raises
    ------
    InvalidRequest
        A value is out of its range, unknown, or cannot be combined with the others.
    """

    fault: Fault
    at: int | None = None
    probability: float | None = None
    of: str | None = None
    times: int | None = None
    seconds: float | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        require_member("fault", self.fault, Fault)
        self._check_when()
        self._check_start()
        self._check_seconds()
        if self.of is not None and self.of not in _COUNTED:
            known = ", ".join(_COUNTED)
            raise InvalidRequest(
                field="of",
                value=self.of,
                problem="is not a message that is counted",
                fix=f"use one of: {known}",
            )
        if self.fault is Fault.REJECT_BUILD and self.of not in (None, *_REPLIED):
            raise InvalidRequest(
                field="of",
                value=self.of,
                problem="is not a message whose reply says that its plan cannot be built",
                fix=f"use one of: {', '.join(_REPLIED)}",
            )

    def _check_when(self) -> None:
        if (self.at is None) == (self.probability is None):
            raise InvalidRequest(
                field="at",
                value=self.at,
                problem="cannot be used so: exactly one of at and probability must be given",
                fix="use for example at=1",
            )
        if self.at is not None:
            require_whole("at", self.at, 1)
        if self.probability is not None:
            require_fraction("probability", self.probability)
        if self.times is not None:
            require_whole("times", self.times, 1)

    def _check_start(self) -> None:
        if self.fault is Fault.CRASH_IN_START and (self.at is None or self.of is not None):
            raise InvalidRequest(
                field="fault",
                value=self.fault,
                problem="applies to starts, not messages",
                fix="use at_start(n)",
            )

    def _check_seconds(self) -> None:
        if self.fault is Fault.SLOW:
            require_seconds("seconds", self.seconds)
        elif self.seconds is not None:
            raise InvalidRequest(
                field="seconds",
                value=self.seconds,
                problem=f"does not apply to {self.fault}",
                fix="leave it out",
            )


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan of the faults that are injected into a service: `spawn(faults=...)`. Each method returns a new
    plan.

    Parameters
    ----------
    seed
        Decides which messages `chance` affects: 0 or more, below 2**63.
    rules
        The rules, in the order in which they were added. An empty plan does nothing and costs nothing.

    Raises
    ------
    InvalidRequest
        The seed is out of its range.
    """

    seed: int = 0
    rules: tuple[FaultRule, ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        require_whole("seed", self.seed, 0)

    def at(
        self,
        n: int,
        fault: Fault,
        *,
        of: type | str | None = None,
        times: int = 1,
        seconds: float | None = None,
    ) -> FaultPlan:
        """Inject a fault at the n-th message (from 1), or at the n-th of class `of`, and at `times` in a row.

        Raises `InvalidRequest` for a value out of range, or for `CRASH_IN_START` (use `at_start`).
        """
        if fault is Fault.CRASH_IN_START:
            raise InvalidRequest(
                field="fault", value=fault, problem="applies to starts, not messages", fix="use at_start(n)"
            )
        return self._with(FaultRule(fault=fault, at=n, of=_name_of(of), times=times, seconds=seconds))

    def chance(
        self,
        probability: float,
        fault: Fault,
        *,
        of: type | str | None = None,
        times: int | None = None,
        seconds: float | None = None,
    ) -> FaultPlan:
        """Inject a fault at each message, or each of class `of`, with this probability; at most `times` in
        all.

        Raises `InvalidRequest` for a value out of range.
        """
        rule = FaultRule(fault=fault, probability=probability, of=_name_of(of), times=times, seconds=seconds)
        return self._with(rule)

    def at_start(self, n: int, *, times: int = 1) -> FaultPlan:
        """Make the n-th start fail, and `times` in a row; the service's first start is 1, its first restart
        2.

        Raises `InvalidRequest` for a value out of range.
        """
        return self._with(FaultRule(fault=Fault.CRASH_IN_START, at=n, times=times))

    def _with(self, rule: FaultRule) -> FaultPlan:
        return FaultPlan(seed=self.seed, rules=(*self.rules, rule))


def _name_of(of: type | str | None) -> str | None:
    return of.__name__ if isinstance(of, type) else of
