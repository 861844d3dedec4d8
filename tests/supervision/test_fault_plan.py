"""Fault plans: what strikes when, the same for one seed, and nothing that means nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.messages.messages import ConvBwdData, ConvFwd, Ping, Upload, WarmModel
from cudnn_actor.supervision import Fault, FaultInjector, FaultPlan, FaultRule, Fired


def struck(plan: FaultPlan, messages: list[str]) -> list[Fault | None]:
    rules = map(FaultInjector(plan).on_message, messages)
    return [None if rule is None else rule.fault for rule in rules]


def places(plan: FaultPlan, count: int = 2000, message: str = "ConvFwd") -> list[int]:
    return [place for place, fault in enumerate(struck(plan, [message] * count), 1) if fault]


def test_the_nth_message_is_struck_and_no_other() -> None:
    assert places(FaultPlan().at(3, Fault.STICKY), 10) == [3]


def test_a_fault_may_strike_several_messages_in_a_row() -> None:
    assert places(FaultPlan().at(3, Fault.OUT_OF_MEMORY, times=4), 10) == [3, 4, 5, 6]


@pytest.mark.parametrize("of", [ConvFwd, "ConvFwd"])
def test_the_nth_message_of_a_type_is_struck(of: type | str) -> None:
    plan = FaultPlan().at(2, Fault.FAIL_EXECUTION, of=of)
    messages = ["Upload", "ConvFwd", "Upload", "Upload", "ConvFwd", "ConvFwd"]
    assert struck(plan, messages) == [None, None, None, None, Fault.FAIL_EXECUTION, None]


def test_the_rule_that_was_added_first_wins_and_the_other_has_missed_its_turn() -> None:
    plan = FaultPlan().at(2, Fault.KILL).at(2, Fault.HANG).at(3, Fault.REJECT_BUILD)
    assert struck(plan, ["Copy"] * 4) == [None, Fault.KILL, Fault.REJECT_BUILD, None]


def test_the_nth_start_fails_and_starts_are_not_messages() -> None:
    injector = FaultInjector(FaultPlan().at_start(2, times=2))
    assert injector.on_message("Copy") is None
    assert [injector.on_start() for _ in range(5)] == [
        None,
        Fault.CRASH_IN_START,
        Fault.CRASH_IN_START,
        None,
        None,
    ]


def test_a_rule_without_a_limit_goes_on_for_ever() -> None:
    plan = FaultPlan(rules=(FaultRule(fault=Fault.HANG, at=3),))
    assert places(plan, 100) == list(range(3, 101))


def test_a_restart_does_not_count_anew() -> None:
    injector = FaultInjector(FaultPlan().at(2, Fault.STICKY))
    struck_at = []
    for number in range(1, 7):
        if number % 2:
            injector.on_start()
        if injector.on_message("Copy"):
            struck_at.append(number)
    assert struck_at == [2]
    assert (injector.starts, injector.messages) == (3, 6)


def test_chance_strikes_about_as_often_as_it_says() -> None:
    struck_at = places(FaultPlan(seed=7).chance(0.1, Fault.HANG), 5000)
    assert 400 < len(struck_at) < 600


def test_chance_of_nothing_never_strikes_and_of_one_always_does() -> None:
    assert places(FaultPlan().chance(0, Fault.HANG)) == []
    assert len(places(FaultPlan().chance(1, Fault.HANG))) == 2000


def test_chance_is_decided_by_the_seed() -> None:
    assert places(FaultPlan(seed=7).chance(0.1, Fault.HANG), 60) == [11, 28, 38, 39, 53]
    assert places(FaultPlan(seed=7).chance(0.1, Fault.HANG)) != places(
        FaultPlan(seed=8).chance(0.1, Fault.HANG)
    )


def test_two_chances_of_one_plan_are_independent() -> None:
    plan = FaultPlan(seed=7).chance(0.1, Fault.HANG, of=ConvFwd).chance(0.1, Fault.HANG, of=Upload)
    assert places(plan, message="ConvFwd") != places(plan, message="Upload")


def test_chance_is_limited_by_times() -> None:
    free = places(FaultPlan(seed=7).chance(0.1, Fault.HANG))
    assert places(FaultPlan(seed=7).chance(0.1, Fault.HANG, times=3)) == free[:3]


def test_a_type_that_a_chance_does_not_name_does_not_shift_it() -> None:
    plan = FaultPlan(seed=7).chance(0.5, Fault.HANG, of=ConvFwd)
    mixed = struck(plan, ["ConvFwd", "Upload"] * 50)
    assert mixed[::2] == struck(plan, ["ConvFwd"] * 50)
    assert set(mixed[1::2]) == {None}


def test_what_fired_and_the_counts_can_be_read() -> None:
    plan = FaultPlan().at(1, Fault.SLOW, of=ConvBwdData, seconds=0.05).at_start(1)
    injector = FaultInjector(plan)
    injector.on_start()
    injector.on_message("ConvFwd")
    rule = injector.on_message("ConvBwdData")
    assert rule is not None
    assert rule.seconds == 0.05
    assert injector.fired == (
        Fired(rule=plan.rules[1], number=1, message=None),
        Fired(rule=plan.rules[0], number=2, message="ConvBwdData"),
    )
    assert (injector.messages, injector.messages_of(ConvFwd), injector.messages_of("Upload")) == (2, 1, 0)


def test_an_empty_plan_needs_no_injector() -> None:
    assert FaultInjector.of(FaultPlan()) is None
    assert FaultInjector.of(None) is None
    assert FaultInjector.of(FaultPlan().at(1, Fault.KILL)) is not None


def test_building_a_plan_leaves_the_one_before_as_it_was() -> None:
    base = FaultPlan(seed=3)
    assert base.at(1, Fault.KILL).seed == 3
    assert base.rules == ()


def test_a_plan_survives_the_wire_and_means_the_same_there() -> None:
    plan = (
        FaultPlan(seed=7)
        .at(3, Fault.STICKY)
        .at(2, Fault.FAIL_EXECUTION, of=ConvFwd)
        .chance(0.2, Fault.SLOW, seconds=0.05, times=9)
        .at_start(2)
    )
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=FaultPlan)
    assert decoded == plan
    messages = ["ConvFwd", "Upload", "ConvFwd"] * 50
    assert struck(decoded, messages) == struck(plan, messages)


def test_a_bad_plan_from_the_wire_is_refused() -> None:
    bad = msgspec.msgpack.encode({"seed": 1, "rules": [{"fault": "hang", "at": 0}]})
    with pytest.raises(msgspec.ValidationError, match="at=0"):
        msgspec.msgpack.decode(bad, type=FaultPlan)


BAD: list[tuple[Callable[[], object], str, str]] = [
    (lambda: FaultPlan(seed=-1), "seed", "-1"),
    (lambda: FaultPlan(seed=1 << 63), "seed", str(1 << 63)),
    (lambda: FaultPlan().at(0, Fault.KILL), "at", "0"),
    (lambda: FaultPlan().at(1.5, Fault.KILL), "at", "1.5"),  # type: ignore[arg-type]
    (lambda: FaultPlan().at(True, Fault.KILL), "at", "True"),
    (lambda: FaultPlan().at(1, Fault.KILL, times=0), "times", "0"),
    (lambda: FaultPlan().at(1, "explode"), "fault", "'explode'"),  # type: ignore[arg-type]
    (lambda: FaultPlan().at(1, Fault.CRASH_IN_START), "fault", "'crash in start'"),
    (lambda: FaultPlan().at(1, Fault.REJECT_BUILD, of=WarmModel), "of", "'WarmModel'"),
    (lambda: FaultPlan().chance(0.5, Fault.REJECT_BUILD, of=Upload), "of", "'Upload'"),
    (lambda: FaultPlan().chance(0.5, Fault.CRASH_IN_START), "fault", "'crash in start'"),
    (lambda: FaultPlan().at(1, Fault.KILL, of="ConvForward"), "of", "'ConvForward'"),
    (lambda: FaultPlan().at(1, Fault.KILL, of=Ping), "of", "'Ping'"),
    (lambda: FaultPlan().at(1, Fault.KILL, of=["ConvFwd"]), "of", "['ConvFwd']"),  # type: ignore[arg-type]
    (lambda: FaultPlan().chance(1.01, Fault.KILL), "probability", "1.01"),
    (lambda: FaultPlan().chance(-0.01, Fault.KILL), "probability", "-0.01"),
    (lambda: FaultPlan().chance(math.nan, Fault.KILL), "probability", "nan"),
    (lambda: FaultPlan().at(1, Fault.SLOW), "seconds", "None"),
    (lambda: FaultPlan().at(1, Fault.SLOW, seconds=-1.0), "seconds", "-1.0"),
    (lambda: FaultPlan().at(1, Fault.SLOW, seconds=math.inf), "seconds", "inf"),
    (lambda: FaultPlan().at(1, Fault.HANG, seconds=1.0), "seconds", "1.0"),
    (lambda: FaultPlan().at_start(0), "at", "0"),
    (lambda: FaultRule(fault=Fault.KILL), "at", "None"),
    (lambda: FaultRule(fault=Fault.KILL, at=1, probability=0.5), "at", "1"),
]


@pytest.mark.parametrize(("make", "field", "value"), BAD)
def test_a_bad_value_is_named_with_its_field_and_a_fix(
    make: Callable[[], object], field: str, value: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert (caught.value.field, caught.value.value) == (field, value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("word", "meant"),
    [("KILL", "Fault.KILL"), ("kil", "Fault.KILL"), ("out_of_memory", "Fault.OUT_OF_MEMORY")],
)
def test_a_word_for_a_fault_is_told_the_member_that_was_meant(word: str, meant: str) -> None:
    with pytest.raises(InvalidRequest, match=f"did you mean {meant}\\?"):
        FaultPlan().at(1, word)  # type: ignore[arg-type]
