"""The records of a policy: who is restarted, how often, after how long."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_actor.actors import Actor
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.supervision import (
    Backoff,
    ChildPolicy,
    ChildSpec,
    ExitKind,
    ExitReason,
    Restart,
    Restarting,
    RestartIntensity,
    Strategy,
    Supervisor,
    SupervisorPolicy,
)
from cudnn_actor.supervision.core import decide
from cudnn_actor.supervision.signals import ChildExited, Emit, StartRequested

ABNORMAL = [kind for kind in ExitKind if kind not in (ExitKind.NORMAL, ExitKind.SHUTDOWN)]

RESTARTED: dict[tuple[Restart, ExitKind], bool] = {
    **{(Restart.PERMANENT, kind): True for kind in ExitKind},
    (Restart.TRANSIENT, ExitKind.NORMAL): False,
    (Restart.TRANSIENT, ExitKind.SHUTDOWN): False,
    **{(Restart.TRANSIENT, kind): True for kind in ABNORMAL},
    **{(Restart.TEMPORARY, kind): False for kind in ExitKind},
}


@pytest.mark.parametrize(("restart", "kind"), RESTARTED)
def test_restart_type_and_exit_kind_say_whether_a_child_is_restarted(
    restart: Restart, kind: ExitKind
) -> None:
    assert restart.covers(ExitReason(kind=kind)) is RESTARTED[restart, kind]


def test_every_pair_of_restart_type_and_exit_kind_is_in_the_table() -> None:
    assert len(RESTARTED) == len(Restart) * len(ExitKind)


@pytest.mark.parametrize(
    ("strategy", "group"),
    [(Strategy.ONE_FOR_ONE, [1]), (Strategy.ONE_FOR_ALL, [0, 1, 2, 3]), (Strategy.REST_FOR_ONE, [1, 2, 3])],
)
def test_the_strategy_says_who_is_restarted(strategy: Strategy, group: list[int]) -> None:
    assert list(strategy.group(1, 4)) == group


@pytest.mark.parametrize(
    ("now", "admitted"),
    [
        (59.75, None),  # 0, 1 and 2 are all in the window: a fourth is one too many
        (math.nextafter(60.0, 0), None),
        (60.0, (1.0, 2.0, 60.0)),  # exactly period_s ago has left
        (math.nextafter(60.0, 100), (1.0, 2.0, math.nextafter(60.0, 100))),
        (61.0, (2.0, 61.0)),
    ],
)
def test_a_restart_exactly_one_period_ago_has_left_the_window(
    now: float, admitted: tuple[float, ...] | None
) -> None:
    assert RestartIntensity(max_restarts=3, period_s=60.0).admit((0.0, 1.0, 2.0), now) == admitted


@pytest.mark.parametrize(("now", "left"), [(2.0, 0), (59.75, 0), (60.0, 1), (61.0, 2), (62.0, 3), (1e9, 3)])
def test_what_is_left_is_how_often_another_would_be_admitted(now: float, left: int) -> None:
    intensity = RestartIntensity(max_restarts=3, period_s=60.0)
    restarts: tuple[float, ...] = (0.0, 1.0, 2.0)
    assert intensity.restarts_left(restarts, now) == left
    for _ in range(left):
        admitted = intensity.admit(restarts, now)
        assert admitted is not None
        restarts = admitted
    assert intensity.admit(restarts, now) is None
    assert intensity.restarts_left(restarts, now) == 0


def test_no_restarts_allowed_admits_none() -> None:
    assert RestartIntensity(max_restarts=0).admit((), 5.0) is None


def test_the_delay_grows_by_its_factor_up_to_the_cap() -> None:
    backoff = Backoff(initial_s=0.5, factor=2.0, cap_s=3.0, jitter=0.0)
    assert [backoff.delay(attempt, 0.9) for attempt in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_jitter_takes_off_and_never_adds() -> None:
    backoff = Backoff(initial_s=1.0, factor=2.0, cap_s=4.0, jitter=0.5)
    assert backoff.delay(1, 0.0) == 1.0
    assert backoff.delay(1, 0.5) == 0.75
    assert backoff.delay(9, 0.0) == 4.0
    assert backoff.delay(9, 0.5) == 3.0


@given(
    initial_s=st.floats(0, 1e6),
    factor=st.floats(1, 1e6),
    over=st.floats(0, 1e6),
    jitter=st.floats(0, 1),
    attempt=st.integers(1, 10**6),
    random01=st.floats(0, 1, exclude_max=True),
)
def test_no_delay_is_over_the_cap_or_negative(
    *, initial_s: float, factor: float, over: float, jitter: float, attempt: int, random01: float
) -> None:
    backoff = Backoff(initial_s=initial_s, factor=factor, cap_s=initial_s + over, jitter=jitter)
    assert 0 <= backoff.delay(attempt, random01) <= backoff.cap_s


def test_a_backoff_that_starts_at_nothing_stays_there() -> None:
    backoff = Backoff(initial_s=0.0)
    assert {backoff.delay(attempt, 0.0) for attempt in (1, 2, 100, 10**6)} == {0.0}


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Backoff(initial_s=-1.0), "initial_s"),
        (lambda: Backoff(initial_s=math.nan), "initial_s"),
        (lambda: Backoff(cap_s=math.inf), "cap_s"),
        (lambda: Backoff(initial_s=2.0, cap_s=1.0), "cap_s"),
        (lambda: Backoff(factor=0.5), "factor"),
        (lambda: Backoff(jitter=1.5), "jitter"),
        (lambda: Backoff(jitter=math.nan), "jitter"),
        (lambda: Backoff(reset_after_s=-0.5), "reset_after_s"),
        (lambda: RestartIntensity(max_restarts=-1), "max_restarts"),
        (lambda: RestartIntensity(max_restarts=True), "max_restarts"),
        (lambda: RestartIntensity(period_s=0.0), "period_s"),
        (lambda: ChildPolicy(id=""), "id"),
        (lambda: ChildPolicy(id="a", shutdown_s=-1.0), "shutdown_s"),
        (lambda: ChildPolicy(id="a", ready_within_s=0.0), "ready_within_s"),
        (lambda: ChildPolicy(id="a", restart="permanent"), "restart"),  # type: ignore[arg-type]
        (lambda: SupervisorPolicy(children=(), strategy="one_for_all"), "strategy"),  # type: ignore[arg-type]
        (lambda: SupervisorPolicy(children=(ChildPolicy(id="a"), ChildPolicy(id="a"))), "children"),
        (lambda: SupervisorPolicy(children=(ChildPolicy(id="a"),)).index_of("b"), "child"),
    ],
)
def test_a_bad_policy_is_refused_by_its_field(make: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.field == field
    assert caught.value.fix


def test_a_policy_is_data() -> None:
    policy = SupervisorPolicy(children=(ChildPolicy(id="a"),), strategy=Strategy.REST_FOR_ONE)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(policy), type=SupervisorPolicy) == policy


def test_an_exit_reason_reads_as_its_kind_and_cause() -> None:
    assert str(ExitReason.crash("boom")) == "crash: boom"
    assert str(ExitReason.normal()) == "normal"


def test_two_supervisors_do_not_wait_equally_long_unless_their_seed_is_given() -> None:
    def first_delay(seed: int | None = None) -> float:
        spec = ChildSpec(policy=ChildPolicy(id="worker"), make=lambda _: Actor())
        supervisor = Supervisor([spec], seed=seed)
        state, _ = decide(supervisor.state, StartRequested(), 0.0)
        failed = ChildExited(child="worker", incarnation=1, reason=ExitReason.crash("it died"))
        _, effects = decide(state, failed, 1.0)
        (event,) = [effect.event for effect in effects if isinstance(effect, Emit)]
        assert isinstance(event, Restarting)
        return event.delay_s

    assert len({first_delay() for _ in range(8)}) == 8
    assert len({first_delay(seed=7) for _ in range(8)}) == 1
