"""What a service counts of its requests: bounded, whatever a stranger sends."""

from __future__ import annotations

import contextvars
import time
from typing import Any

import numpy as np
import pytest

from cudnn_actor.actors import Envelope
from cudnn_actor.broker.answer_times import ANSWERS_ADDED
from cudnn_actor.broker.request_counts import MOST_MODELS, OTHER, RequestCounters
from cudnn_actor.messages import Message, ModelRef, Ping, RunModel
from cudnn_actor.service import RequestCounts


def answered(message: object, *, queue_ns: int = 1000, started: bool = True) -> Envelope:
    envelope = Envelope(message)
    envelope.admitted_ns = 1_000_000
    envelope.started_ns = 1_000_000 + queue_ns if started else 0
    return envelope


def count(
    counters: RequestCounters,
    envelope: Envelope,
    value: Any = 1,
    error: Exception | None = None,
    run_us: float = -1.0,
) -> None:
    counters.count(envelope, value, error, time.perf_counter_ns(), run_us)


def run_of(number: int) -> Envelope:
    return answered(RunModel(model=ModelRef(number=number, service=1), arrays={}))


def by_model(counters: RequestCounters) -> dict[str | None, RequestCounts]:
    return {each.model: each for each in counters.snapshots()}


def test_a_histogram_tells_times_apart_by_powers_of_two() -> None:
    counters = RequestCounters()
    for queue_ns in (0, 1000, 1500, 3000, 2**40):
        count(counters, answered(Ping(), queue_ns=queue_ns), run_us=5.0)
    (counts,) = counters.snapshots()
    queue = counts.queue
    assert queue.bounds[:3] == pytest.approx((1.024e-6, 2.048e-6, 4.096e-6))
    assert (queue.counts[:3], queue.counts[-1], queue.count) == ((2, 1, 1), 1, 5)
    assert queue.sum == pytest.approx((1000 + 1500 + 3000 + 2**40) / 1e9)
    assert (queue.quantile(0.5), queue.quantile(1.0)) == (queue.bounds[1], float("inf"))
    assert counts.run.sum == pytest.approx(25e-6)
    assert len(queue.counts) == len(queue.bounds) + 1


def test_an_empty_histogram_has_no_mean_and_no_quantiles() -> None:
    counters = RequestCounters()
    count(counters, answered(Ping()), None, ValueError())
    (counts,) = counters.snapshots()
    assert (counts.failed, counts.finished, counts.total.mean, counts.total.quantile(0.5)) == (1, 0, 0, 0)


@pytest.mark.parametrize("run_us", [float("nan"), float("inf"), 1e300])
def test_times_that_are_none_harm_nothing(run_us: float) -> None:
    """A worker that writes nonsense may send any number."""
    counters = RequestCounters()
    envelope = answered(Ping())
    envelope.started_ns = 2**64 - 1
    count(counters, envelope, run_us=run_us)
    count(counters, answered(Ping()), run_us=5.0)
    (counts,) = counters.snapshots()
    assert counts.finished == 2
    assert counts.run.sum == pytest.approx(5e-6)


@pytest.mark.parametrize("run_us", [-1.0, 9e14])
@pytest.mark.parametrize("started_ns", [-(2**63), -1, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_worker_may_say_that_a_run_began_at_any_time(started_ns: int, run_us: float) -> None:
    """Also in a list of answers that is full, and in all that are added together."""
    counters = RequestCounters()
    for number in range(ANSWERS_ADDED + 1):
        envelope = answered(Ping())
        if number in {0, ANSWERS_ADDED}:
            envelope.started_ns = started_ns
        count(counters, envelope, run_us=run_us)
    (counts,) = counters.snapshots()
    assert counts.queue.count == counts.run.count == counts.total.count == ANSWERS_ADDED + 1


def test_many_models_keep_few_counts_and_none_is_lost() -> None:
    counters, most = RequestCounters(), MOST_MODELS
    for number in range(3 * most):
        counters.name_model(number, f"model {number}")
        count(counters, run_of(number), {})
        count(counters, run_of(0), {})  # the first is used all the time
        counters.note_batch(number, 2)
    found = by_model(counters)
    assert len(found) == most + 1
    assert found["model 0"].finished == 3 * most + 1
    assert sum(each.finished for each in found.values()) == 6 * most
    assert sum(each.batches.sum for each in found.values() if each.batches) == 6 * most
    assert sum(each.batches.count for each in found.values() if each.batches) == 3 * most
    assert found[OTHER].total.count == found[OTHER].queue.count == 3 * most - most
    assert found[OTHER].queue.sum == pytest.approx(2 * most * 1e-6)
    assert f"model {3 * most - 1}" in found
    assert "model 1" not in found
    count(counters, run_of(1), {})  # it is still loaded
    assert by_model(counters)[OTHER].finished == 2 * most + 1


def test_models_that_are_unloaded_give_their_places_first() -> None:
    counters = RequestCounters()
    for number in range(MOST_MODELS):
        counters.name_model(number, f"model {number}")
        count(counters, run_of(number), {})
    counters.forget_model(MOST_MODELS - 1)
    counters.name_model(1000, "new")
    assert f"model {MOST_MODELS - 1}" not in by_model(counters)
    assert "model 0" in by_model(counters)


def test_names_are_cut_and_one_may_be_called_other() -> None:
    counters = RequestCounters()
    for number, name in enumerate(("", OTHER, "a" * 1000)):
        counters.name_model(number, name)
        count(counters, run_of(number), {})
    assert {name: each.finished for name, each in by_model(counters).items()} == {OTHER: 2, "a" * 100: 1}


def test_types_that_are_no_messages_are_counted_together() -> None:
    counters = RequestCounters()
    for number in range(10):
        count(counters, answered(type(f"Stranger{number}", (), {})()), None, ValueError())
    (counts,) = counters.snapshots()
    assert (counts.operation, counts.failed) == (OTHER, 10)


def test_answers_are_added_to_the_histograms_however_many_there_are() -> None:
    counters, messages = RequestCounters(), (Ping(), object())
    for number in range(2 * ANSWERS_ADDED + 100):
        count(counters, answered(messages[number % 3 > 0], queue_ns=number), run_us=float(number % 7))
        if number in {10, 63, 64, 100, ANSWERS_ADDED - 1, ANSWERS_ADDED, ANSWERS_ADDED + 70}:
            assert sum(each.finished for each in counters.snapshots()) == number + 1
    pings = range(0, 2 * ANSWERS_ADDED + 100, 3)
    found = {each.operation: each for each in counters.snapshots()}
    of_pings = found["Ping"]
    assert (of_pings.finished, found[OTHER].finished) == (len(pings), 2 * ANSWERS_ADDED + 100 - len(pings))
    assert of_pings.queue.sum == pytest.approx(sum(pings) * 1e-9)
    assert of_pings.run.sum == pytest.approx(sum(number % 7 for number in pings) * 1e-6)
    assert of_pings.queue.count == of_pings.run.count == of_pings.total.count
    assert of_pings.queue.counts[:2] == (
        sum(number < 1 << 10 for number in pings),
        sum(1 << 10 <= number < 1 << 11 for number in pings),
    )


def test_an_answer_of_a_request_that_never_started_has_waited_for_no_time() -> None:
    counters = RequestCounters()
    for _ in range(2):
        count(counters, answered(Ping(), started=False))
    (counts,) = counters.snapshots()
    assert (counts.queue.sum, counts.run.sum) == (0, counts.total.sum)
    assert counts.total.sum > 0


class _Told:
    """An observer."""

    def __init__(self) -> None:
        self.runs_ns: list[int] = []

    def answered(self, envelope: Any, value: Any, error: Any, started_ns: int, run_ns: int) -> None:
        self.runs_ns.append(run_ns)

    def not_run(self, envelope: Any, error: BaseException) -> None: ...

    def replayed(self, envelope: Any, cause: str) -> None: ...

    def sent(self, envelope: Any) -> None: ...

    def received(self, headers: Any) -> contextvars.Context:
        return contextvars.Context()


@pytest.mark.parametrize("message", [Ping(), run_of(1).message], ids=["ping", "run"])
def test_an_observer_is_told_of_each_answer_from_when_it_is_set_until_it_is_removed(message: Message) -> None:
    counters, told = RequestCounters(), _Told()
    for observer, run_us in ((None, 1.0), (None, 2.0), (told, 3.0), (told, 4.0), (None, 5.0)):
        if counters.observer is not observer:
            counters.observer = observer
        count(counters, answered(message), {}, run_us=run_us)
    assert told.runs_ns == [3000, 4000]
    (counts,) = counters.snapshots()
    assert counts.run.sum == pytest.approx(15e-6)


def test_the_bytes_of_a_models_runs_are_those_of_its_arrays() -> None:
    """Also with an observer. What is no array, because the message was changed, has none."""
    counters = RequestCounters()
    counters.name_model(1, "one")
    x, y = np.zeros(10, np.float32), np.zeros(3, np.float64)
    for observer in (None, _Told()):
        counters.observer = observer
        message = RunModel(model=ModelRef(number=1, service=1), arrays={"x": x, "again": x})
        message.arrays["again"] = None  # type: ignore[assignment]
        count(counters, answered(message), {"y": y, "twice": y})
    one = by_model(counters)["one"]
    assert (one.uploaded_bytes, one.downloaded_bytes, one.finished) == (2 * 40, 2 * 48, 2)
