"""The fifteen lines of the README, and the three ways in and out of a service."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cudnn_actor import (
    ConvFwd,
    ConvSpec,
    InvalidRequest,
    Receipt,
)

from .rigs import Trio, spawn

pytestmark = pytest.mark.usefixtures("isolation")


async def test_the_fifteen_lines_work_as_they_stand() -> None:
    rng = np.random.default_rng(15)
    image = rng.standard_normal((1, 3, 224, 224)).astype(np.float32)
    kernel = rng.standard_normal((8, 3, 3, 3)).astype(np.float32)
    async with spawn(device="auto") as gpu:
        x = await gpu.upload(image, layout="NHWC")
        w = await gpu.upload(kernel, layout="NHWC")
        y = await gpu.empty((1, 8, 222, 222), dtype="float32", layout="NHWC")
        receipt = await gpu.ask(ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2)))
        out = await gpu.download(y)
        await gpu.free(y)
    windows = np.lib.stride_tricks.sliding_window_view(image.astype(np.float64), (3, 3), axis=(2, 3))
    expected = np.einsum("nchwij,kcij->nkhw", windows, kernel.astype(np.float64))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert isinstance(receipt, Receipt)
    assert receipt.generation == 1
    assert receipt.plan.startswith("cpu/conv_fwd/")
    assert receipt.run_us > 0


async def test_closing_lets_what_was_sent_before_finish() -> None:
    gpu = await spawn(device="cpu")
    trio = await Trio.on(gpu)
    sent = [gpu.submit(trio.product()) for _ in range(200)]
    await gpu.aclose()
    assert all(isinstance(future.result(), Receipt) for future in sent)


async def test_leaving_the_body_drains_too() -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        sent = [gpu.submit(trio.product()) for _ in range(200)]
    assert all(isinstance(future.result(), Receipt) for future in sent)


async def test_an_error_of_the_body_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with spawn(device="cpu"):
            _ = 1 / 0


async def test_a_cancelled_body_closes_its_service_first() -> None:
    entered, gone = asyncio.Event(), []

    async def body() -> None:
        async with spawn(device="cpu") as gpu:
            gone.append(gpu)
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not gone[0].actor_ref.is_alive()


async def test_a_start_that_is_cancelled_leaves_nothing_behind() -> None:
    # Cancelled at each step of the start in turn, so that wherever the actor is by then, it ends.
    for steps in range(40):
        task = asyncio.ensure_future(_entered())
        for _ in range(steps % 8):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def _entered() -> None:
    async with spawn(device="cpu"):
        await asyncio.Event().wait()


async def test_a_service_can_be_spawned_from_one_spawning_only_once() -> None:
    spawning = spawn(device="cpu")
    gpu = await spawning
    with pytest.raises(InvalidRequest, match="spawn"):
        await spawning
    assert await gpu.ping() == 1
    await gpu.aclose()
