"""The policy of a supervisor: its children, its strategy, its restart intensity, its backoff.

`exits.Restart` says which exits are followed by a restart. `Strategy.group` says which children are restarted
when one fails: one_for_one, only that child; one_for_all, all; rest_for_one, that child and those after it.
"""

from __future__ import annotations

import enum

import msgspec

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.checks import (
    require_fraction,
    require_member,
    require_name,
    require_seconds,
    require_whole,
)
from cudnn_actor.supervision.exits import Restart

__all__ = [
    "Backoff",
    "ChildPolicy",
    "RestartIntensity",
    "Strategy",
    "SupervisorPolicy",
]


class Strategy(enum.StrEnum):
    """The choice of the children that are restarted when one fails."""

    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"

    def group(self, index: int, count: int) -> range:
        """The indices, out of `count` in start order, that are restarted when the child at `index` fails."""
        match self:
            case Strategy.ONE_FOR_ONE:
                return range(index, index + 1)
            case Strategy.ONE_FOR_ALL:
                return range(count)
            case Strategy.REST_FOR_ONE:
                return range(index, count)


class RestartIntensity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many restarts a supervisor makes before it gives up: `max_restarts` within `period_s` seconds.

    A restart has the time of the failure that causes it. The restart of a whole group counts once. A restart
    exactly `period_s` ago has left the window. `max_restarts=0` never restarts.
    """

    max_restarts: int = 3
    period_s: float = 60.0

    def __post_init__(self) -> None:
        require_whole("max_restarts", self.max_restarts, 0)
        require_seconds("period_s", self.period_s, positive=True)

    def admit(self, restarts: tuple[float, ...], now: float) -> tuple[float, ...] | None:
        """The restarts in the window with one more at `now`, or None if that exceeds the limit."""
        recent = self._in_window(restarts, now)
        return (*recent, now) if len(recent) < self.max_restarts else None

    def exceeded_text(self) -> str:
        """The text about a failure that is over the limit: "at the 4th failure within 60 s
        (max_restarts=3)"."""
        number = self.max_restarts + 1
        ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
        return (
            f"at the {number}{ending} failure within {self.period_s:g} s (max_restarts={self.max_restarts})"
        )

    def restarts_left(self, restarts: tuple[float, ...], now: float) -> int:
        """How many more restarts are allowed at `now`."""
        return max(0, self.max_restarts - len(self._in_window(restarts, now)))

    def _in_window(self, restarts: tuple[float, ...], now: float) -> tuple[float, ...]:
        return tuple(at for at in restarts if now - at < self.period_s)


class Backoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a restart waits: exponential, capped, and spread by jitter.

    Parameters
    ----------
    initial_s
        Seconds before the first restart; 0 never waits.
    factor
        Each consecutive failure multiplies the delay by this factor, at least 1.
    cap_s
        No delay is longer, jitter included. At least `initial_s`.
    jitter
        The fraction of a delay, 0 to 1, by which it may be shortened at random. It only shortens: if it were
        added and then clamped, all children at the cap would wait equally long and restart together.
    reset_after_s
        The next failure of a child that was ready for at least this many seconds counts as its first.
    at_once
        This many consecutive failures are answered without delay, before the delays above begin.

    Raises
    ------
    InvalidRequest
        A value is out of its range.
    """

    initial_s: float = 0.02
    factor: float = 4.0
    cap_s: float = 5.0
    jitter: float = 0.25
    reset_after_s: float = 30.0
    at_once: int = 0

    def __post_init__(self) -> None:
        require_whole("at_once", self.at_once, 0)
        for field in ("initial_s", "factor", "cap_s", "reset_after_s"):
            require_seconds(field, getattr(self, field))
        require_fraction("jitter", self.jitter)
        if self.factor < 1:
            raise InvalidRequest(
                field="factor",
                value=self.factor,
                problem="is less than 1",
                fix="use 2.0 to double each delay",
            )
        if self.cap_s < self.initial_s:
            raise InvalidRequest(
                field="cap_s",
                value=self.cap_s,
                problem="is less than initial_s",
                fix="raise cap_s or lower initial_s",
            )

    def delay(self, attempt: int, random01: float) -> float:
        """Seconds before the `attempt`-th consecutive restart, from 1; `random01` in [0, 1) sets the
        jitter."""
        attempt -= self.at_once
        if attempt < 1:
            return 0.0
        try:
            grown = self.initial_s * self.factor ** (attempt - 1)
        except OverflowError:  # after so many failures the delay is at the cap, unless it starts at 0
            grown = self.cap_s if self.initial_s else 0.0
        return min(grown, self.cap_s) * (1.0 - self.jitter * random01)


class ChildPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One child as the core knows it. The shell (`supervisor`) knows how to start it.

    Parameters
    ----------
    id
        Its name, unique in its supervisor.
    restart
        After which exits it is started again.
    shutdown_s
        Seconds from the request to stop until it is killed; 0 kills it without a request.
    ready_within_s
        Seconds from its start until it is killed, if it has not reported that it is ready.
    replaceable
        Whether a successor can continue with its state. If not, a failure of an incarnation that was ready
        uses up all restarts at once; a failed start is tried again as usual.

    Raises
    ------
    InvalidRequest
        A value is out of its range.
    """

    id: str
    restart: Restart = Restart.PERMANENT
    shutdown_s: float = 5.0
    ready_within_s: float = 30.0
    replaceable: bool = True

    def __post_init__(self) -> None:
        require_name("id", self.id)
        require_member("restart", self.restart, Restart)
        require_seconds("shutdown_s", self.shutdown_s)
        require_seconds("ready_within_s", self.ready_within_s, positive=True)


_INTENSITY = RestartIntensity()
_BACKOFF = Backoff()


class SupervisorPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole policy of a supervisor: its children in start order, and the rules for their failures.

    Raises `InvalidRequest` if two children have the same id.
    """

    children: tuple[ChildPolicy, ...]
    strategy: Strategy = Strategy.ONE_FOR_ONE
    intensity: RestartIntensity = _INTENSITY
    backoff: Backoff = _BACKOFF

    def __post_init__(self) -> None:
        require_member("strategy", self.strategy, Strategy)
        ids = [child.id for child in self.children]
        for name in ids:
            if ids.count(name) > 1:
                raise InvalidRequest(
                    field="children",
                    value=name,
                    problem="is the id of two children",
                    fix="give each its own id",
                )

    def index_of(self, child: str) -> int:
        """The child's index in start order. Raises `InvalidRequest` for an unknown child."""
        for index, policy in enumerate(self.children):
            if policy.id == child:
                return index
        known = ", ".join(policy.id for policy in self.children)
        raise InvalidRequest(
            field="child",
            value=child,
            problem="is not a child of this supervisor",
            fix=f"use one of: {known}",
        )
