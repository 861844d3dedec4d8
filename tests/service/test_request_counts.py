"""What a service counts of its requests: bounded, whatever a stranger sends."""

from __future__ import annotations

import pytest

from cudnn_actor.actors import Envelope
from cudnn_actor.broker.request_counts import MOST_MODELS, OTHER, RequestCounters
from cudnn_actor.messages import ModelRef, Ping, RunModel
from cudnn_actor.service import RequestCounts


def answered(message: object, *, queue_ns: int = 1000, started: bool = True) -> Envelope:
    envelope = Envelope(message)
    envelope.admitted_ns = 1_000_000
    envelope.started_ns = 1_000_000 + queue_ns if started else 0
    return envelope


def run_of(number: int) -> Envelope:
    return answered(RunModel(model=ModelRef(number=number, service=1), arrays={}))


def by_model(counters: RequestCounters) -> dict[str | None, RequestCounts]:
    return {each.model: each for each in counters.snapshots()}


def test_a_histogram_tells_times_apart_by_powers_of_two() -> None:
    counters = RequestCounters()
    for queue_ns in (0, 1000, 1500, 3000, 2**40):
        counters.count(answered(Ping(), queue_ns=queue_ns), 1, None, run_us=5.0)
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
    counters.count(answered(Ping()), None, ValueError())
    (counts,) = counters.snapshots()
    assert (counts.failed, counts.finished, counts.total.mean, counts.total.quantile(0.5)) == (1, 0, 0, 0)


@pytest.mark.parametrize("run_us", [float("nan"), float("inf"), 1e300])
def test_times_that_are_none_harm_nothing(run_us: float) -> None:
    """A worker that writes nonsense may send any number."""
    counters = RequestCounters()
    envelope = answered(Ping())
    envelope.started_ns = 2**64 - 1
    counters.count(envelope, 1, None, run_us)
    counters.count(answered(Ping()), 1, None, run_us=5.0)
    (counts,) = counters.snapshots()
    assert counts.finished == 2
    assert counts.run.sum == pytest.approx(5e-6)


def test_many_models_keep_few_counts_and_none_is_lost() -> None:
    counters, most = RequestCounters(), MOST_MODELS
    for number in range(3 * most):
        counters.name_model(number, f"model {number}")
        counters.count(run_of(number), {}, None)
        counters.count(run_of(0), {}, None)  # the first is used all the time
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
    counters.count(run_of(1), {}, None)  # it is still loaded
    assert by_model(counters)[OTHER].finished == 2 * most + 1


def test_models_that_are_unloaded_give_their_places_first() -> None:
    counters = RequestCounters()
    for number in range(MOST_MODELS):
        counters.name_model(number, f"model {number}")
        counters.count(run_of(number), {}, None)
    counters.forget_model(MOST_MODELS - 1)
    counters.name_model(1000, "new")
    assert f"model {MOST_MODELS - 1}" not in by_model(counters)
    assert "model 0" in by_model(counters)


def test_names_are_cut_and_one_may_be_called_other() -> None:
    counters = RequestCounters()
    for number, name in enumerate(("", OTHER, "a" * 1000)):
        counters.name_model(number, name)
        counters.count(run_of(number), {}, None)
    assert {name: each.finished for name, each in by_model(counters).items()} == {OTHER: 2, "a" * 100: 1}


def test_types_that_are_no_messages_are_counted_together() -> None:
    counters = RequestCounters()
    for number in range(10):
        counters.count(answered(type(f"Stranger{number}", (), {})()), None, ValueError())
    (counts,) = counters.snapshots()
    assert (counts.operation, counts.failed) == (OTHER, 10)
