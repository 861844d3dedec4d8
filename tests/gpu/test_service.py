"""Whole services on a GPU: what the README promises, whatever the engine, and what only a GPU can show.

In both isolations, but for what is promised in one of them alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor import (
    Activation,
    BufferRef,
    ConvBwdFilter,
    ConvFwd,
    ConvSpec,
    CudnnRef,
    Epilogue,
    ExecutionFailed,
    Fault,
    FaultPlan,
    InvalidRequest,
    Layout,
    Numerics,
    OutOfMemory,
    Receipt,
    ServiceStopped,
    StaleBufferError,
    StartFailed,
    TensorSpec,
    UnsupportedGraph,
)
from cudnn_actor.errors import ContextLost
from cudnn_actor.messages import Allocate, Download, Fill
from cudnn_actor.trials.bench.cpu_time import process_cpu_s

from ..engines.references import direct_forward, relative_error
from ..service.rigs import THREAD_ONLY, isolated, spawn, start

pytestmark = pytest.mark.usefixtures("isolation")

SAME = ConvSpec.symmetric(2, pad=1)
IDLE_S, MOST_IDLE_SHARE = 2.0, 0.01


@pytest.fixture(params=["thread", "process"])
def isolation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the services of `rigs` have their actor."""
    with isolated(request.param):
        yield request.param


def numbers(dims: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *dims]).standard_normal(dims).astype(np.float32)


async def convolved(
    gpu: CudnnRef, x: np.ndarray, w: np.ndarray, numerics: Numerics | None = None
) -> np.ndarray:
    """Up, through a convolution, and down; nothing is left on the device."""
    a, b = await gpu.upload(x, layout="NHWC"), await gpu.upload(w, layout="NHWC")
    y = await gpu.conv_fwd(a, b, conv=SAME, numerics=numerics)
    result = await gpu.download(y)
    for ref in (a, b, y):
        await gpu.free(ref)
    return result


# What the README says.


@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
async def test_the_fifteen_lines_give_the_right_picture(layout: Layout) -> None:
    image, kernel = numbers((1, 3, 64, 48)), numbers((8, 3, 3, 3))
    async with spawn(device="cuda:0") as gpu:
        x = await gpu.upload(image, layout=layout)
        w = await gpu.upload(kernel, layout=layout)
        y = await gpu.empty((1, 8, 62, 46), dtype="float32", layout=layout)
        receipt = await gpu.ask(ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2)))
        out = await gpu.download(y)
        await gpu.free(y)
    wanted = direct_forward(image.astype("float64"), kernel.astype("float64"), ConvSpec.symmetric(2))
    assert relative_error(out, wanted) < 1e-6
    assert isinstance(receipt, Receipt)
    assert receipt.plan.startswith("cuda/conv_fwd/")
    assert receipt.run_us > 0


async def test_auto_takes_the_gpu_and_says_why(logs: list[EventDict]) -> None:
    async with spawn(device="auto") as gpu:
        assert gpu.device == "cuda:0"
    (chosen,) = (line for line in logs if line["event"] == "device.chosen")
    assert chosen["device"] == "cuda:0"
    assert chosen["reason"]


async def test_a_gpu_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises((InvalidRequest, StartFailed), match="99"):
        async with spawn(device="cuda:99"):
            pass


async def test_two_services_share_a_gpu_and_nothing_else() -> None:
    x, w = numbers((2, 8, 20, 12)), numbers((16, 8, 3, 3))
    wanted = direct_forward(x.astype("float64"), w.astype("float64"), SAME)
    async with spawn(device="cuda:0") as one, spawn(device="cuda:0") as two:
        results = await asyncio.gather(*(convolved(gpu, x, w) for gpu in (one, two) for _ in range(20)))
        assert all(relative_error(result, wanted) < 1e-6 for result in results)
        foreign = await one.upload(x)
        with pytest.raises(StaleBufferError, match="foreign"):
            await two.download(foreign)
        await two.aclose()
        np.testing.assert_array_equal(await one.download(foreign), x)


def test_a_thread_asks_without_asyncio() -> None:
    service = start(device="cuda:0")
    try:
        ref: Any = service.actor_ref.ask(Allocate(spec=TensorSpec.packed((1, 4, 5, 6))))
        service.actor_ref.ask(Fill(dst=ref, value=2.5))
        values: Any = service.actor_ref.ask(Download(src=ref))
        assert (values == 2.5).all()
    finally:
        service.stop(timeout=30)


async def test_requests_run_in_the_order_in_which_they_were_sent() -> None:
    async with spawn(device="cuda:0") as gpu:
        x, w = await gpu.upload(np.ones((1, 8, 16, 16), "f4")), await gpu.upload(np.ones((8, 8, 1, 1), "f4"))
        a, b = [await gpu.upload(np.zeros((1, 8, 16, 16), "f4")) for _ in range(2)]
        one = ConvSpec.symmetric(2)
        sent = []
        for _ in range(50):  # each reads what the one before it wrote
            sent.append(gpu.submit(ConvFwd(x=x, w=w, y=a, conv=one, alpha=0.125, beta=1.0)))
            sent.append(gpu.submit(ConvFwd(x=a, w=w, y=b, conv=one, alpha=0.125)))
        receipts = await asyncio.gather(*sent)
        assert [r.request_id for r in receipts] == sorted(r.request_id for r in receipts)
        assert (await gpu.download(b) == 50).all()


async def test_a_failed_execution_is_only_its_own_request_s() -> None:
    async with spawn(device="cuda:0", faults=FaultPlan().at(1, Fault.FAIL_EXECUTION, of=ConvFwd)) as gpu:
        x, w = numbers((1, 4, 9, 7)), numbers((4, 4, 3, 3))
        with pytest.raises(ExecutionFailed):
            await convolved(gpu, x, w)
        wanted = direct_forward(x.astype("float64"), w.astype("float64"), SAME)
        assert relative_error(await convolved(gpu, x, w), wanted) < 1e-6


@THREAD_ONLY
async def test_a_sticky_error_ends_the_service_and_everything_pending() -> None:
    ends: list[object] = []

    async def body() -> None:
        async with spawn(device="cuda:0", faults=FaultPlan().at(3, Fault.STICKY, of=ConvFwd)) as gpu:
            x, w = [await gpu.upload(np.ones((1, 4, 1, 1), "f4")) for _ in range(2)]
            y = await gpu.empty((1, 1, 1, 1))
            sent = [gpu.submit(ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))) for _ in range(30)]
            ends.extend(await asyncio.gather(*sent, return_exceptions=True))
            await asyncio.Event().wait()

    with pytest.raises(ServiceStopped, match="gave up"):
        await body()
    assert len(ends) == 30
    assert {type(end) for end in ends} <= {Receipt, ContextLost}
    assert sum(isinstance(end, ContextLost) for end in ends) >= 28


async def test_memory_that_is_not_allowed_is_refused_and_nothing_changes() -> None:
    async with spawn(device="cuda:0", memory_limit=128 << 20) as gpu:
        small = await gpu.upload(numbers((1, 1, 8, 8)))
        with pytest.raises(OutOfMemory):
            await gpu.empty((1, 1, 16384, 16384))
        np.testing.assert_array_equal(await gpu.download(small), numbers((1, 1, 8, 8)))


async def test_what_no_gpu_has_room_for_is_refused_and_the_service_goes_on() -> None:
    async with spawn(device="cuda:0") as gpu:
        with pytest.raises(OutOfMemory):
            await gpu.empty((1, 1 << 10, 1 << 16, 1 << 10), dtype="float64")
        assert await gpu.ping() == 1
        await gpu.free(await gpu.upload(numbers((1, 1, 8, 8))))


async def test_an_epilogue_is_applied() -> None:
    x, w, bias = numbers((2, 8, 12, 10)), numbers((8, 8, 3, 3)), numbers((8,))
    async with spawn(device="cuda:0") as gpu:
        refs: list[BufferRef] = [await gpu.upload(a) for a in (x, w, bias)]
        epilogue = Epilogue(activation=Activation.RELU)
        y = await gpu.conv_fwd(refs[0], refs[1], bias=refs[2], conv=SAME, epilogue=epilogue)
        got = await gpu.download(y)
    sums = direct_forward(x.astype("float64"), w.astype("float64"), SAME) + bias.reshape(1, 8, 1, 1)
    assert relative_error(got, np.maximum(sums, 0)) < 1e-6


# What only a GPU can show.


async def test_an_idle_actor_burns_less_than_a_hundredth_of_a_core() -> None:
    async with spawn(device="cuda:0") as gpu:
        await convolved(gpu, numbers((1, 4, 9, 7)), numbers((4, 4, 3, 3)))  # it has worked before it idles
        start_s = computed_s(gpu)
        await asyncio.sleep(IDLE_S)
        assert computed_s(gpu) - start_s < MOST_IDLE_SHARE * IDLE_S


def computed_s(gpu: CudnnRef) -> float:
    """Of this process, and of the worker where there is one."""
    return time.process_time() + (0.0 if gpu.worker_pid is None else process_cpu_s(gpu.worker_pid))


async def test_a_gibibyte_goes_up_and_comes_down_unchanged() -> None:
    values = np.arange(1 << 28, dtype=np.int32).reshape(1, 4, 1 << 13, 1 << 13)
    async with spawn(device="cuda:0") as gpu:
        packed, channels_last = await gpu.upload(values), await gpu.upload(values, layout="NHWC")
        assert np.array_equal(await gpu.download(packed), values)
        assert np.array_equal(await gpu.download(channels_last), values)


@pytest.mark.parametrize("limit", [1, 1 << 16, 1 << 20, 1 << 26])
async def test_with_little_workspace_the_result_is_right_or_there_is_none(limit: int) -> None:
    x, w = numbers((4, 32, 40, 36)), numbers((64, 32, 3, 3))
    async with spawn(device="cuda:0", workspace_limit=limit) as gpu:
        try:
            got = await convolved(gpu, x, w)
        except OutOfMemory:
            return
    wanted = direct_forward(x.astype("float64"), w.astype("float64"), SAME)
    assert relative_error(got, wanted) < 1e-6


async def test_float32_is_float32_unless_tf32_is_asked_for() -> None:
    x, w = numbers((8, 64, 32, 30)), numbers((64, 64, 3, 3))
    async with spawn(device="cpu") as cpu:
        wanted = await convolved(cpu, x.astype("float64"), w.astype("float64"))
    async with spawn(device="cuda:0") as gpu:
        exact, quick = [
            relative_error(await convolved(gpu, x, w, Numerics(tf32=tf32)), wanted) for tf32 in (False, True)
        ]
    assert exact < 1e-6
    assert 4 * exact < quick < 1e-3  # TF32 keeps 11 bits of each operand


async def test_deterministic_gradients_have_the_same_bits_every_time() -> None:
    x, dy = numbers((16, 32, 40, 36)), numbers((16, 48, 40, 36), seed=1)
    async with spawn(device="cuda:0") as gpu:
        a, b, dw = await gpu.upload(x), await gpu.upload(dy), await gpu.empty((48, 32, 3, 3))
        how = Numerics(deterministic=True)
        results = []
        for _ in range(5):
            await gpu.fill(dw, float("nan"))
            await gpu.ask(ConvBwdFilter(x=a, dy=b, dw=dw, conv=SAME, numerics=how))
            results.append(await gpu.download(dw))
    assert np.isfinite(results[0]).all()
    assert all(result.tobytes() == results[0].tobytes() for result in results)


async def test_a_refusal_names_the_way_to_repeat_it() -> None:
    async with spawn(device="cuda:0") as gpu:
        x = await gpu.upload(np.ones((1, 3, 4, 4), np.uint8))
        dw = await gpu.empty((3, 3, 1, 1), dtype="int32")
        with pytest.raises(UnsupportedGraph, match="cudnn-actor reproduce"):
            await gpu.ask(ConvBwdFilter(x=x, dy=x, dw=dw, conv=ConvSpec.symmetric(2)))
