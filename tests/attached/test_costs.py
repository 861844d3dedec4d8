"""The server's estimates of device time, and the shares of busy clients that follow from them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudnn_actor import BufferRef, ConvFwd, CudnnRef, DType, Receipt, connect
from cudnn_actor.attached import serve_socket
from cudnn_actor.attached.server.asked import Asked, Known
from cudnn_actor.attached.server.costs import Costs
from cudnn_actor.attached.server.fair_share import QUANTUM_US, WINDOW_US
from cudnn_actor.messages import Allocate, Copy, Download, Fill, RunModel, Upload, WriteWeights
from cudnn_actor.protocol.messages.model_messages import ModelRef
from cudnn_actor.protocol.types.tensor import TensorSpec

from ..inside import sessions_of
from ..patience import PATIENCE_S
from ..service.rigs import ONE_BY_ONE, Gate, in_thread, spawn_on
from ..service.worker_rigs import GatedEngine
from .conftest import eventually

FIRST_US, EACH_US = 200.0, 15.0
SPEC = TensorSpec.packed((1, 1, 500, 500), DType.FLOAT32)
BYTES_US = 100.0
"""A million bytes, 10 GB a second."""
REF = BufferRef(slot=0, generation=1, spec=SPEC, device="cpu")


def known(message: Any) -> Known:
    return Known(message, ())


def asked(one: Known, *, cost_us: float = 0.0, sent_ns: int = 0) -> Asked:
    session: Any = None  # costs ask nothing of it
    return Asked(session, 1, one, None, 0, None, cost_us=cost_us, sent_ns=sent_ns)


def receipt(run_us: float) -> Receipt:
    return Receipt(request_id=1, generation=1, plan="cpu/fill", queue_us=7.0, run_us=run_us)


def fill(value: float = 0.0) -> Fill:
    return Fill(dst=REF, value=value)


def model_run(number: int, rows: int = 1) -> RunModel:
    return RunModel(model=ModelRef(number=number, service=1), arrays={"x": np.zeros((rows, 2))})


def of_buffer(rows: int) -> RunModel:
    spec = TensorSpec.packed((rows, 1, 1, 1))
    ref = BufferRef(slot=rows, generation=1, spec=spec, device="cpu")
    return RunModel(model=ModelRef(number=1, service=1), buffers={"x": ref})


# The first guess.


@pytest.mark.parametrize("message", [fill(), model_run(1)], ids=["fill", "model"])
def test_the_first_of_a_kind_has_a_guess(message: Any) -> None:
    assert Costs().estimate(known(message)) == FIRST_US


@pytest.mark.parametrize(
    ("message", "expected_us"),
    [
        (Allocate(spec=SPEC), EACH_US),
        (Allocate(spec=SPEC, data=np.zeros((1, 1, 500, 500), np.float32)), EACH_US + BYTES_US),
        (Upload(dst=REF, data=np.zeros((1, 1, 500, 500), np.float32)), EACH_US + BYTES_US),
        (Download(src=REF), EACH_US + BYTES_US),
    ],
    ids=["empty", "values", "upload", "download"],
)
def test_a_copy_is_estimated_by_its_bytes(message: Any, expected_us: float) -> None:
    assert Costs().estimate(known(message)) == pytest.approx(expected_us)


# The average.


def test_a_message_is_estimated_by_its_own_runs() -> None:
    """The first run counts whole, and each later one a quarter."""
    costs, one, other = Costs(), known(fill(1.0)), known(fill(2.0))
    assert costs.note(asked(one), receipt(985.0), 0) == 985.0 + EACH_US
    assert costs.estimate(one) == 1000.0
    assert costs.note(asked(one), receipt(1985.0), 0) == 2000.0
    assert costs.estimate(one) == 1250.0
    costs.note(asked(other), receipt(85.0), 0)
    assert costs.estimate(one) == 1250.0


def test_an_estimate_approaches_what_runs_take_now() -> None:
    costs, one = Costs(), known(fill())
    costs.note(asked(one), receipt(1e6), 0)
    for _ in range(60):
        costs.note(asked(one), receipt(85.0), 0)
    assert costs.estimate(one) == pytest.approx(100.0, abs=1.0)


# Kinds.


def test_a_new_message_has_the_average_of_its_kind() -> None:
    costs, one = Costs(), known(fill(1.0))
    costs.note(asked(one), receipt(985.0), 0)
    costs.note(asked(known(fill(2.0))), receipt(1985.0), 0)
    assert costs.estimate(known(fill(3.0))) == 1250.0  # both runs
    assert costs.estimate(known(Copy(src=REF, dst=REF))) == FIRST_US


def test_each_model_and_each_shape_of_its_inputs_is_a_kind() -> None:
    costs = Costs()
    runs = [model_run(1), model_run(1, rows=8), model_run(2), of_buffer(1), of_buffer(8)]
    again = [model_run(1), model_run(1, rows=8), model_run(2), of_buffer(1), of_buffer(8)]
    for number, message in enumerate(runs):
        assert costs.estimate(known(message)) == FIRST_US
        costs.note(asked(known(message)), receipt(1000.0 * number), 0)
    assert [costs.estimate(known(each)) for each in again] == [1000.0 * n + EACH_US for n in range(5)]


# Requests without a receipt.


def test_a_run_of_a_model_has_taken_the_time_since_it_was_sent_or_the_one_before_it_ended() -> None:
    costs, one = Costs(), known(model_run(1))
    assert costs.note(asked(one, sent_ns=1_000_000), {}, 3_000_000) == 2000.0
    assert costs.note(asked(one, sent_ns=1_000_000), {}, 3_500_000) == 500.0, "it waited for the one before"
    assert costs.note(asked(one, sent_ns=9_000_000), {}, 9_300_000) == 300.0, "the device had no work"
    assert costs.note(asked(one, sent_ns=9_000_000), {}, 9_300_000) == EACH_US, "no less than a message takes"


def test_writing_weights_has_a_time_and_other_requests_the_one_of_their_estimate() -> None:
    costs = Costs()
    write = WriteWeights(model=ModelRef(number=1, service=1), buffers=(), values=())
    assert costs.note(asked(known(write), cost_us=7.0, sent_ns=0), None, 2_000_000) == 2000.0
    assert costs.note(asked(known(Download(src=REF)), cost_us=123.0), np.zeros(1), 9_000_000) == 123.0


# Bounds.


def test_kinds_are_bounded_and_the_one_that_was_used_least_recently_is_dropped() -> None:
    costs, first = Costs(), known(model_run(0))
    costs.note(asked(first), receipt(985.0), 0)
    for number in range(1, 1024):
        costs.note(asked(known(model_run(number))), receipt(485.0), 0)
    assert costs.estimate(known(model_run(0))) == 1000.0
    costs.note(asked(known(model_run(1024))), receipt(485.0), 0)
    assert costs.estimate(known(model_run(1))) == FIRST_US
    assert costs.estimate(known(model_run(0))) == 1000.0
    assert costs.estimate(known(model_run(1024))) == 500.0


def test_a_message_keeps_its_estimate_when_its_kind_is_dropped() -> None:
    costs, first = Costs(), known(model_run(0))
    costs.note(asked(first), receipt(985.0), 0)
    for number in range(1, 1100):
        costs.note(asked(known(model_run(number))), receipt(485.0), 0)
    assert costs.estimate(known(model_run(0))) == FIRST_US
    assert costs.estimate(first) == 1000.0
    costs.note(asked(first), receipt(1985.0), 0)
    assert costs.estimate(first) == 1250.0


# Shares.


LONG_US, SHORT_US = 1485.0, 85.0


class Clock:
    """The time of a device that is a clock: only its runs let time pass."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class ClockEngine(GatedEngine):
    """The CPU engine, whose runs take a time on a clock that depends on their buffers alone."""

    def __init__(self, gate: Gate, clock: Clock, ran: list[str]) -> None:
        super().__init__(gate)
        self._clock, self._ran = clock, ran

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        super().execute(plan, buffers, scalars)
        kind = "long" if max(buffer.size for buffer in buffers) > 1 else "short"
        self._clock.now_ns += round(1e3 * (LONG_US if kind == "long" else SHORT_US))
        self._ran.append(kind)


async def convolution(gpu: CudnnRef, width: int) -> ConvFwd:
    x = await gpu.upload(np.ones((1, 1, 1, width), np.float32))
    w = await gpu.upload(np.ones((1, 1, 1, 1), np.float32))
    return ConvFwd(x=x, w=w, y=await gpu.empty((1, 1, 1, width)), conv=ONE_BY_ONE)


async def test_busy_clients_share_the_device_by_time_and_not_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client's requests take 15 times as long as the other's, with what each message adds."""
    gate, clock, ran = Gate(), Clock(), list[str]()
    for module in ("actors.envelope", "actors.mailbox", "execution.runner"):
        monkeypatch.setattr(f"cudnn_actor.{module}.time", clock)
    counts = {"long": 80, "short": 1000}
    async with contextlib.AsyncExitStack() as ends:
        await ends.enter_async_context(asyncio.timeout(PATIENCE_S))
        gpu = await ends.enter_async_context(spawn_on(lambda: ClockEngine(gate, clock, ran)))
        served = await ends.enter_async_context(serve_socket(gpu, tmp_path / "s"))
        clients = {kind: await ends.enter_async_context(connect(served.path)) for kind in counts}
        widths = {"long": 4, "short": 1}
        messages = {kind: await convolution(client, widths[kind]) for kind, client in clients.items()}
        for kind, client in clients.items():
            done = await client.ask(messages[kind])
            assert done.run_us == (LONG_US if kind == "long" else SHORT_US)

        async def all_wait() -> bool:
            return sum(len(session.asked) for session in sessions_of(served)) == sum(counts.values())

        ran.clear()
        with gate.closed():
            futures = [
                clients[kind].submit(messages[kind]) for kind, count in counts.items() for _ in range(count)
            ]
            await in_thread(gate.wait_for_arrival)
            await eventually(all_wait)
        await asyncio.gather(*futures)
    assert {kind: ran.count(kind) for kind in counts} == counts
    costs = {"long": LONG_US + EACH_US, "short": SHORT_US + EACH_US}
    both_wait = ran[: min(len(ran) - ran[::-1].index(kind) for kind in counts)]
    passed_us = list(itertools.accumulate(costs[kind] for kind in both_wait))
    ahead_us = itertools.accumulate(costs[kind] if kind == "long" else -costs[kind] for kind in both_wait)
    # The service had the first requests before the others came.
    later_us = [ahead for ahead, passed in zip(ahead_us, passed_us, strict=True) if passed > 2 * WINDOW_US]
    assert passed_us[-1] > 20 * WINDOW_US
    assert max(later_us) - min(later_us) <= 2 * (costs["long"] + QUANTUM_US)
