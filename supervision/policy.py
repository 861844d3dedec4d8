"""What a supervisor is told to do: its children, its strategy, its restart intensity, its backoff.

Which exits are followed by a restart is `exits.Restart`. Who is restarted with a child that failed
(`Strategy.group`): one_for_one, itself; one_for_all, everyone; rest_for_one, itself and those after it.
"""

from __future__ import annotations

import enum

import msgspec

from cudnn_actor.protocol.checks import (
    require_fraction,
    require_member,
    require_name,
    require_seconds,
    require_whole,
)
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.supervision.exits import Restart

__all__ = [
    "Backoff",
    "ChildPolicy",
    "RestartIntensity",
    "Strategy",
    "SupervisorPolicy",
]


class Strategy(enum.StrEnum):
    """Who is restarted with a child that failed."""

    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"

    def group(self, index: int, count: int) -> range:
        """The places, of `count` in start order, that are restarted when the child at `index` fails."""
        match self:
            case Strategy.ONE_FOR_ONE:
                return range(index, index + 1)
            case Strategy.ONE_FOR_ALL:
                return range(count)
            case Strategy.REST_FOR_ONE:
                return range(index, count)


class RestartIntensity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many restarts a supervisor makes before it gives up: `max_restarts` within `period_s` seconds.

    A restart is dated by the failure that it answers, and one of a whole group counts once. One made exactly
    `period_s` ago has left the window. `max_restarts=0` never restarts.
    """

    max_restarts: int = 3
    period_s: float = 60.0

    def __post_init__(self) -> None:
        require_whole("max_restarts", self.max_restarts, 0)
        require_seconds("period_s", self.period_s, positive=True)

    def admit(self, restarts: tuple[float, ...], now: float) -> tuple[float, ...] | None:
        """The restarts in the window with one more at `now`, or None where that is one too many."""
        recent = self._in_window(restarts, now)
        return (*recent, now) if len(recent) < self.max_restarts else None

    def left(self, restarts: tuple[float, ...], now: float) -> int:
        """How many more restarts there may be at `now`."""
        return max(0, self.max_restarts - len(self._in_window(restarts, now)))

    def _in_window(self, restarts: tuple[float, ...], now: float) -> tuple[float, ...]:
        return tuple(at for at in restarts if now - at < self.period_s)


class Backoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a restart waits: exponential, capped, and spread by jitter.

    Parameters
    ----------
    initial_s
        Seconds before the first restart; 0 starts at once, every time.
    factor
        Each failure in a row multiplies the delay by this, at least 1.
    cap_s
        No delay is longer, jitter included. At least `initial_s`.
    jitter
        The part of a delay, 0 to 1, that chance may take off. It only shortens: were it added and then
        clamped, those at the cap would all wait equally long and return together.
    reset_after_s
        A child that was ready for this many seconds, or more, fails as if for the first time.
    at_once
        So many failures in a row are answered without a delay, before those above begin.

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
                field="factor", value=self.factor, problem="is under 1", fix="use 2.0 to double each delay"
            )
        if self.cap_s < self.initial_s:
            raise InvalidRequest(
                field="cap_s",
                value=self.cap_s,
                problem="is under initial_s",
                fix="raise cap_s or lower initial_s",
            )

    def delay(self, attempt: int, random01: float) -> float:
        """Seconds before the `attempt`-th restart in a row, from 1; `random01` in [0, 1) sets the jitter."""
        attempt -= self.at_once
        if attempt < 1:
            return 0.0
        try:
            grown = self.initial_s * self.factor ** (attempt - 1)
        except (
            OverflowError
        ):  # a float's power; so many failures in a row are at the cap, unless it starts at 0
            grown = self.cap_s if self.initial_s else 0.0
        return min(grown, self.cap_s) * (1.0 - self.jitter * random01)


class ChildPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One child as the core knows it; how it is started is the shell's business.

    Parameters
    ----------
    id
        Its name, unique in its supervisor.
    restart
        After which exits it is started again.
    shutdown_s
        Seconds from being asked to stop until it is killed; 0 kills it unasked.
    ready_within_s
        Seconds from its start until it is killed, if it has not said that it is ready.
    replaceable
        Whether a successor can go on where it ended. If not, a failure of an incarnation that was ready
        uses up all restarts at once; a start that fails is tried again like any other's.

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
    """All that a supervisor is told: its children in start order, and the rules for their failures.

    Raises `InvalidRequest` where two children have one id.
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
        """The child's place in start order. Raises `InvalidRequest` for one that is not here."""
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
