"""Applies a fault plan: counts starts and messages, and decides which fault to inject."""

from __future__ import annotations

from typing import Protocol

import msgspec

from cudnn_actor.protocol.types.short_repr import short_repr
from cudnn_actor.supervision.faults import Fault, FaultPlan, FaultRule
from cudnn_actor.supervision.seeded import random01

__all__ = ["FaultInjector", "FaultSource", "Fired"]


class Fired(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault that was injected.

    Parameters
    ----------
    rule
        The rule that fired.
    number
        The number of the message among all messages (not within its class), or of the start, from 1.
    message
        The message's class; None for a start.
    """

    rule: FaultRule
    number: int
    message: str | None

    __repr__ = short_repr


class FaultSource(Protocol):
    """Decides which fault to inject: a plan in this process, or in another one."""

    def on_start(self) -> Fault | None:
        """The fault for the start that is being made; None for none."""

    def on_message(self, type_name: str) -> FaultRule | None:
        """The rule for the message that is being started, by its class's name; None for none."""


class FaultInjector:
    """Counts, and decides which fault to inject. One per service, kept when the worker is replaced.

    Not thread-safe: only the thread that runs the messages calls it, and only one thread at a time does.
    """

    def __init__(self, plan: FaultPlan) -> None:
        self._seed = plan.seed
        numbered = tuple(enumerate(plan.rules))
        self._start_rules = tuple(rule for _, rule in numbered if rule.fault is Fault.CRASH_IN_START)
        self._message_rules = tuple(pair for pair in numbered if pair[1].fault is not Fault.CRASH_IN_START)
        self._strikes = [0] * len(plan.rules)
        self._of_type: dict[str, int] = {}
        self.messages = 0
        """Messages counted so far."""
        self.starts = 0
        """Starts counted so far."""
        self._fired: list[Fired] = []

    @classmethod
    def of(cls, plan: FaultPlan | None) -> FaultInjector | None:
        """An injector for a plan; None if there is nothing to inject, so that no calls are needed."""
        return cls(plan) if plan is not None and plan.rules else None

    @property
    def fired(self) -> tuple[Fired, ...]:
        """The faults injected so far, in order."""
        return tuple(self._fired)

    def messages_of(self, message: type | str) -> int:
        """Messages of this class counted so far."""
        return self._of_type.get(message if isinstance(message, str) else message.__name__, 0)

    def on_start(self) -> Fault | None:
        """Count a start of the worker. Returns `Fault.CRASH_IN_START` if the start must fail."""
        self.starts += 1
        for rule in self._start_rules:
            if _is_reached(rule, self.starts):
                self._fired.append(Fired(rule=rule, number=self.starts, message=None))
                return rule.fault
        return None

    def on_message(self, type_name: str) -> FaultRule | None:
        """Count a message, by its class's name, when it is started. Returns the rule to apply, if any."""
        self.messages += 1
        self._of_type[type_name] = self._of_type.get(type_name, 0) + 1
        for place, rule in self._message_rules:
            if (rule.of is None or rule.of == type_name) and self._strikes_now(place, rule):
                self._strikes[place] += 1
                self._fired.append(Fired(rule=rule, number=self.messages, message=type_name))
                return rule
        return None

    def _strikes_now(self, place: int, rule: FaultRule) -> bool:
        number = self.messages if rule.of is None else self._of_type[rule.of]
        if rule.probability is None:
            return _is_reached(rule, number)
        if rule.times is not None and self._strikes[place] >= rule.times:
            return False
        # Drawn from the rule's place and the message's number, so that rules do not affect each other's
        # draws.
        return random01(self._seed, place, number) < rule.probability


def _is_reached(rule: FaultRule, number: int) -> bool:
    assert rule.at is not None
    return rule.at <= number and (rule.times is None or number < rule.at + rule.times)
