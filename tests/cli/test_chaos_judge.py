"""The judge of the chaos harness: nobody deceives it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cudnn_actor.protocol import (
    BufferRef,
    DeadlineExceeded,
    ExecutionFailed,
    GraphBuilder,
    Loop,
    OutcomeUnknown,
    OutOfMemory,
    QuarantinedRequest,
    RunLoop,
    StaleBufferError,
    StaleReason,
)
from cudnn_actor.trials.chaos.oracle import Alarmed, Deed, Model, Oracle, Torn

from .chaos_rigs import (
    RECEIPT,
    accumulation,
    buffer,
    copy,
    download,
    fill,
    two_outputs,
    values,
)
from .test_chaos import UNKNOWN


def stale(slot: int, reason: StaleReason = StaleReason.TORN) -> StaleBufferError:
    return StaleBufferError(slot=slot, generation=1, reason=reason)


# The judge.


def test_what_was_written_is_read_back() -> None:
    y = buffer(1)
    assert Oracle().judge([fill(y, 3), download(y)], [RECEIPT, values(3, 3, 3, 3)]) == []


def test_a_lie_is_caught_and_shown() -> None:
    y = buffer(1, (values(1, 2, 3, 4),))
    (wrong,) = Oracle().judge([download(y)], [values(1, 2, 3, 5)])
    assert wrong.request.startswith("Download src=<buffer 1.1")
    assert "[1, 2, 3, 4]" in wrong.expected
    assert "at (0, 0, 1, 1) 4, not 5" in wrong.expected
    assert wrong.got == "[1, 2, 3, 5]"


def test_one_lie_is_told_once() -> None:
    y = buffer(1, (values(0, 0, 0, 0),))
    lies = [values(1, 1, 1, 1)] * 2
    assert len(Oracle().judge([download(y), download(y)], lies)) == 1


def test_a_result_of_other_dims_is_caught() -> None:
    assert Oracle().judge([download(buffer(1))], [np.zeros(4, np.float32)])


@pytest.mark.parametrize(("times", "right"), [(2, False), (3, True), (4, False)])
def test_every_accumulation_counts_once(times: int, right: bool) -> None:
    y, amount = buffer(1, (values(1, 1, 1, 1),)), values(1, 2, 3, 4)
    deeds = [*(accumulation(y, amount) for _ in range(3)), download(y)]
    wrongs = Oracle().judge(deeds, [RECEIPT] * 3 + [values(1, 1, 1, 1) + times * amount])
    assert (wrongs == []) is right


def test_an_accumulation_of_unknown_outcome_tears_its_buffer() -> None:
    y, oracle = buffer(1, (values(0, 0, 0, 0),)), Oracle()
    assert oracle.judge([accumulation(y, values(1, 1, 1, 1))], [UNKNOWN]) == []
    assert y.torn is Torn.YES
    assert oracle.judge([download(y)], [stale(1)]) == []
    assert oracle.judge([download(y)], [values(0, 0, 0, 0)])


def test_a_pure_request_has_to_be_run_again() -> None:
    (wrong,) = Oracle().judge([fill(buffer(1), 3)], [UNKNOWN])
    assert "run again" in wrong.expected


def test_a_pure_request_whose_input_was_overwritten_need_not_be_run_again() -> None:
    x, y = buffer(1), buffer(2)
    assert Oracle().judge([copy(x, y), fill(x, 1)], [UNKNOWN, RECEIPT]) == []


def test_a_pure_request_is_not_run_again_on_a_buffer_that_another_has_torn() -> None:
    """On a device several have begun, and a later one may have torn what this one writes as well."""
    y, refused = (
        buffer(1),
        OutcomeUnknown(request_id=1, cause="killed", why="its second run was refused: torn"),
    )
    burst = [fill(y, 1), accumulation(y, values(1, 1, 1, 1))]
    assert Oracle().judge(burst, [refused, UNKNOWN]) == []
    assert Oracle().judge([fill(buffer(1), 1)], [refused]), "nobody has torn it"
    y = buffer(1)
    assert Oracle().judge([fill(y, 1), fill(y, 2)], [refused, refused]), "nor here"


def test_a_stale_buffer_that_nothing_has_torn_is_wrong() -> None:
    assert Oracle().judge([download(buffer(1))], [stale(1)])


def test_a_torn_buffer_may_not_say_that_it_was_freed() -> None:
    y = buffer(1)
    y.torn = Torn.YES
    assert Oracle().judge([download(y)], [stale(1, StaleReason.FREED)])


def test_an_earlier_request_finds_what_a_later_one_of_its_burst_has_torn() -> None:
    y = buffer(1)
    burst = [fill(y, 1), accumulation(y, values(1, 1, 1, 1))]
    assert Oracle().judge(burst, [stale(1), UNKNOWN]) == []


def test_what_was_cancelled_has_run_or_not_but_not_twice() -> None:
    amount = values(1, 2, 3, 4)
    for times, right in ((0, True), (1, True), (2, False)):
        y = buffer(1, (values(0, 0, 0, 0),))
        burst = [accumulation(y, amount, cancel_after_s=0.0), download(y)]
        wrongs = Oracle().judge(burst, [asyncio.CancelledError(), times * amount])
        assert (wrongs == []) is right


def test_what_is_read_back_decides_what_was_cancelled() -> None:
    y, oracle = buffer(1, (values(0, 0, 0, 0),)), Oracle()
    burst = [fill(y, 7, cancel_after_s=0.0), download(y)]
    assert oracle.judge(burst, [asyncio.CancelledError(), values(7, 7, 7, 7)]) == []
    assert oracle.judge([download(y)], [values(0, 0, 0, 0)])


def test_a_request_that_was_dropped_at_its_deadline_has_not_run() -> None:
    y = buffer(1, (values(0, 0, 0, 0),))
    burst = [fill(y, 7, timeout_s=0.0), download(y)]
    dropped = DeadlineExceeded(timeout_s=0.0, started=False)
    assert Oracle().judge(burst, [dropped, values(7, 7, 7, 7)])


@pytest.mark.parametrize(
    "outcome", [asyncio.CancelledError(), DeadlineExceeded(timeout_s=0.01, started=True)]
)
def test_what_a_loop_writes_may_hold_anything_once_its_caller_has_left(outcome: BaseException) -> None:
    """It ends between two turns. Of a fill, the same is a lie."""
    g = GraphBuilder()
    a, b = buffer(1), buffer(2, (values(0, 0, 0, 0),))
    loop = Loop(body=g.build(b=g.input("a", a.ref.spec.dims) + 1.0), carried={"a": "b"})
    scratch = BufferRef(slot=3, generation=1, spec=loop.scratch, device="cpu")
    message = RunLoop.bind(loop, {"a": a.ref, "b": b.ref}, turns=9, scratch=scratch)
    leaves = {"cancel_after_s": 0.0, "timeout_s": 0.01}
    run = Deed(message, (a, b), {b: lambda: (values(9, 9, 9, 9),)}, **leaves)  # type: ignore[arg-type]
    assert Oracle().judge([run, download(b)], [outcome, values(4, 4, 4, 4)]) == []
    y = buffer(4, (values(0, 0, 0, 0),))
    filled = fill(y, 9, cancel_after_s=0.0, timeout_s=0.01)
    assert Oracle().judge([filled, download(y)], [outcome, values(4, 4, 4, 4)])


def test_nobody_is_cancelled_or_timed_out_who_did_not_ask_for_it() -> None:
    timed_out = DeadlineExceeded(timeout_s=0.0, started=False)
    for outcome in (asyncio.CancelledError(), timed_out, RuntimeError("oops")):
        assert Oracle().judge([fill(buffer(1), 7)], [outcome])


def test_an_error_is_excused_only_while_it_is_injected() -> None:
    failed = ExecutionFailed(status="INJECTED", detail="scripted", plan="fill")
    full = OutOfMemory(requested=0, in_use=0, limit=None)
    for error in (failed, full):
        assert Oracle().judge([fill(buffer(1), 7)], [error])
        assert Oracle({type(error)}).judge([fill(buffer(1), 7)], [error]) == []


def test_a_full_memory_changes_nothing_and_a_failed_run_leaves_anything() -> None:
    failed = ExecutionFailed(status="INJECTED", detail="scripted", plan="fill")
    full = OutOfMemory(requested=0, in_use=0, limit=None)
    for error, wrong in ((full, True), (failed, False)):
        y = buffer(1, (values(0, 0, 0, 0),))
        burst = [fill(y, 7), download(y)]
        assert bool(Oracle({type(error)}).judge(burst, [error, values(7, 7, 7, 7)])) is wrong


def test_what_a_quarantined_request_writes_is_unknown() -> None:
    quarantined = QuarantinedRequest(request_id=1, digest="abc", cause="killed")
    for outcome in (values(1, 2, 3, 4), stale(1)):
        y = buffer(1, (values(0, 0, 0, 0),))
        assert Oracle().judge([fill(y, 7), download(y)], [quarantined, outcome]) == []


def test_what_an_alarm_interrupted_has_run_or_not_but_not_twice() -> None:
    amount = values(1, 2, 3, 4)
    for times, right in ((0, True), (1, True), (2, False)):
        y = buffer(1, (values(0, 0, 0, 0),))
        interrupted = accumulation(y, amount)
        interrupted.alarmed = True
        wrongs = Oracle().judge([interrupted, download(y)], [Alarmed(), times * amount])
        assert (wrongs == []) is right


def test_an_alarm_strikes_nobody_who_has_set_none() -> None:
    assert Oracle().judge([fill(buffer(1), 7)], [Alarmed()])


# Several outputs.


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_outputs_that_one_request_may_have_torn_both_are_torn_or_none(first: int) -> None:
    quarantined = QuarantinedRequest(request_id=1, digest="abc", cause="killed")
    for outcome in (quarantined, asyncio.CancelledError()):
        for torn, alive in ((stale, values(1, 1, 1, 1)), (None, values(2, 2, 2, 2))):
            outputs, oracle = (buffer(1), buffer(2)), Oracle()
            one, other = outputs[first], outputs[1 - first]
            assert oracle.judge([two_outputs(*outputs, cancel_after_s=0.0)], [outcome]) == []
            assert (one.torn, other.torn) == (Torn.MAYBE, Torn.MAYBE)
            seen = torn(first + 1) if torn else values(1, 1, 1, 1)
            assert oracle.judge([download(one)], [seen]) == []
            assert other.torn is (Torn.YES if torn else Torn.NO)
            right = [stale(2 - first)] if torn else [alive]
            wrong = [alive] if torn else [stale(2 - first)]
            assert oracle.judge([download(other)], right) == []
            assert oracle.judge([download(other)], wrong)


def test_one_output_torn_and_one_not_is_wrong_within_a_burst_too() -> None:
    quarantined = QuarantinedRequest(request_id=1, digest="abc", cause="killed")
    for answers, right in (
        ([values(1, 1, 1, 1), values(2, 2, 2, 2)], True),
        ([stale(1), stale(2)], True),
        ([values(1, 1, 1, 1), stale(2)], False),
    ):
        y, index = buffer(1), buffer(2)
        burst = [two_outputs(y, index), download(y), download(index)]
        assert (Oracle().judge(burst, [quarantined, *answers]) == []) is right


def test_an_output_that_another_request_may_have_torn_says_nothing_about_the_others() -> None:
    quarantined = QuarantinedRequest(request_id=1, digest="abc", cause="killed")
    y, index, oracle = buffer(1), buffer(2), Oracle()
    burst = [two_outputs(y, index), fill(y, 7)]
    assert oracle.judge(burst, [quarantined, quarantined]) == []
    assert oracle.judge([download(y)], [stale(1)]) == []
    assert oracle.judge([download(index)], [values(1, 2, 3, 4)]) == []


def test_an_unknown_outcome_tears_all_outputs() -> None:
    y, index = buffer(1), buffer(2)
    request = two_outputs(y, index)
    request.accumulates = True
    assert Oracle().judge([request], [UNKNOWN]) == []
    assert (y.torn, index.torn) == (Torn.YES, Torn.YES)


def test_each_output_is_checked() -> None:
    for seen, right in ((values(2, 2, 2, 2), True), (values(1, 1, 1, 1), False)):
        y, index = buffer(1), buffer(2)
        burst = [two_outputs(y, index), download(y), download(index)]
        assert (Oracle().judge(burst, [RECEIPT, values(1, 1, 1, 1), seen]) == []) is right


def test_results_that_are_rounded_may_differ_a_little() -> None:
    for error, right in ((1e-6, True), (1e-2, False), (np.nan, False)):
        y = buffer(1, (values(1, 2, 3, 4),))
        assert Oracle().judge([download(y)], [values(1, 2, 3, 4 + 1e-6)])
        y = Model(y.ref, (values(1, 2, 3, 4),), tolerance=1e-4)
        assert (Oracle().judge([download(y)], [values(1, 2, 3, 4 + error)]) == []) is right
    for wanted, got, right in ((-np.inf, -np.inf, True), (-np.inf, -9e9, False), (np.nan, np.nan, True)):
        y = Model(y.ref, (values(1, 2, 3, wanted),), tolerance=1e-4)
        assert (Oracle().judge([download(y)], [values(1, 2, 3.0001, got)]) == []) is right


def test_what_an_applied_operation_allocates_has_the_specs_that_follow_from_its_inputs() -> None:
    x, y, index = buffer(1), buffer(2), buffer(3)
    deed = Deed(two_outputs(y, index).message, (x,), gives=(y.ref.spec, index.ref.spec))
    assert Oracle().judge([deed], [(y.ref, index.ref)]) == []
    for answer in (y.ref, (y.ref,), (y.ref, None), RECEIPT):
        (wrong,) = Oracle().judge([deed], [answer])
        assert "applied" in wrong.request
