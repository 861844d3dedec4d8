"""What each method of the handle gives."""

from __future__ import annotations

import asyncio
from asyncio import Future
from typing import assert_type

import numpy as np
import pykka
import pytest

from cudnn_actor import (
    Activation,
    BufferRef,
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    ConvSpec,
    DType,
    Epilogue,
    Layout,
    Receipt,
    StaleBufferError,
    Statistics,
    TensorSpec,
    UnsupportedGraph,
)
from cudnn_actor.messages import (
    Allocate,
    Copy,
    Download,
    Drain,
    Fill,
    Free,
    GetStatistics,
    Ping,
    Upload,
    Warm,
)
from cudnn_actor.supervision import Started

from ..patience import PATIENCE_S
from .rigs import ONE_BY_ONE, Trio, bare, outcome, single, spawn

pytestmark = pytest.mark.usefixtures("isolation")

X = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)


async def test_the_handle_says_what_it_serves() -> None:
    async with spawn(device="auto") as gpu:
        assert gpu.device == "cpu"
        assert gpu.generation == 1
        assert isinstance(gpu.actor_ref, pykka.ActorRef)
        assert gpu.actor_ref.is_alive()
        first = await anext(gpu.events())
        assert bare(first) == Started(child="cudnn", generation=1)


async def test_ask_answers_each_message_with_what_its_class_says() -> None:
    async with spawn(device="cpu") as gpu:
        spec = TensorSpec.packed((1, 1, 1, 1))
        ref = await gpu.ask(Allocate(spec=spec))
        other = await gpu.ask(Allocate(spec=spec, data=single(4)))
        assert isinstance(ref, BufferRef)
        assert isinstance(await gpu.ask(Upload(dst=ref, data=single(5))), Receipt)
        assert isinstance(await gpu.ask(Fill(dst=ref, value=5)), Receipt)
        assert isinstance(await gpu.ask(Copy(src=other, dst=ref)), Receipt)
        assert isinstance(await gpu.ask(ConvFwd(x=other, w=other, y=ref, conv=ONE_BY_ONE)), Receipt)
        assert (await gpu.ask(Download(src=ref))).item() == 16
        assert await gpu.ask(Ping()) == 1
        assert isinstance(await gpu.ask(GetStatistics()), Statistics)
        assert await gpu.ask(Warm(messages=(ConvFwd(x=other, w=other, y=ref, conv=ONE_BY_ONE),))) == 0
        for message in (Drain(), Free(buffer=ref)):
            assert await outcome(gpu.submit(message)) is None


async def test_what_submit_gives_is_typed_by_its_message() -> None:
    async with spawn(device="cpu") as gpu:
        allocated = assert_type(gpu.submit(Allocate(spec=TensorSpec.packed((1,)))), Future[BufferRef])
        ref = await allocated
        filled = assert_type(gpu.submit(Fill(dst=ref, value=5)), Future[Receipt])
        read = assert_type(gpu.submit(Download(src=ref)), Future[np.ndarray])
        pinged = assert_type(gpu.submit(Ping()), Future[int])
        counted = assert_type(gpu.submit(GetStatistics()), Future[Statistics])
        freed = assert_type(gpu.submit(Free(buffer=ref)), Future[None])
        assert (await filled).generation == await pinged == 1
        assert (await read).item() == 5
        assert (await counted).generation == 1
        assert await outcome(freed) is None


async def test_an_empty_buffer_has_the_dims_dtype_and_layout_that_were_asked_for() -> None:
    async with spawn(device="cpu") as gpu:
        ref = await gpu.empty((2, 3, 4, 5), dtype="bfloat16", layout="NHWC")
        assert (ref.spec.dims, ref.spec.dtype, ref.spec.layout) == (
            (2, 3, 4, 5),
            DType.BFLOAT16,
            Layout.NHWC,
        )
        assert ref.device == "cpu"


async def test_a_buffer_can_be_filled_copied_overwritten_and_freed() -> None:
    async with spawn(device="cpu") as gpu:
        a = await gpu.upload(X)
        b = await gpu.empty(X.shape, layout="NHWC")
        await gpu.copy(a, b)
        np.testing.assert_array_equal(await gpu.download(b), X)
        receipt = await gpu.fill(a, -1.5)
        assert receipt.plan == "fill"
        np.testing.assert_array_equal(await gpu.download(a), np.full_like(X, -1.5))
        assert (await gpu.write(a, X * 2)).plan == "upload"
        np.testing.assert_array_equal(await gpu.download(a), X * 2)
        before = await gpu.statistics()
        await gpu.free(a)
        after = await gpu.statistics()
        assert (before.live_buffers, after.live_buffers) == (2, 1)
        assert before.live_bytes - after.live_bytes == X.nbytes
        with pytest.raises(StaleBufferError, match="freed"):
            await gpu.download(a)


async def test_conv_fwd_allocates_its_result_in_the_layout_of_x() -> None:
    async with spawn(device="cpu") as gpu:
        x = await gpu.upload(X, layout="NHWC")
        w = await gpu.upload(np.ones((2, 3, 1, 1), np.float32))
        bias = await gpu.upload(np.array([0.5, -1000], np.float32))
        y = await gpu.conv_fwd(
            x, w, conv=ONE_BY_ONE, bias=bias, alpha=2.0, epilogue=Epilogue(activation=Activation.RELU)
        )
        assert (y.spec.dims, y.spec.layout) == ((2, 2, 4, 5), Layout.NHWC)
        summed = 2 * X.sum(axis=1, keepdims=True)
        expected = np.maximum(np.concatenate([summed + 0.5, summed - 1000], axis=1), 0)
        np.testing.assert_allclose(await gpu.download(y), expected)


async def test_the_backward_methods_are_the_gradients() -> None:
    conv = ConvSpec.symmetric(2, pad=1, stride=2)
    rng = np.random.default_rng(3)
    async with spawn(device="cpu") as gpu:
        x = await gpu.upload(rng.standard_normal((2, 3, 8, 8)))
        w = await gpu.upload(rng.standard_normal((4, 3, 3, 3)))
        y = await gpu.conv_fwd(x, w, conv=conv)
        dy = await gpu.upload(rng.standard_normal(y.spec.dims))
        dx = await gpu.conv_bwd_data(dy, w, conv=conv, dims=x.spec.dims)
        dw = await gpu.conv_bwd_filter(x, dy, conv=conv, dims=w.spec.dims)
        refs = {"x": x, "w": w, "y": y, "dy": dy, "dx": dx, "dw": dw}
        # <dy, conv(x, w)> is linear in x and in w, so each gradient gives the same number back.
        values = {name: await gpu.download(ref) for name, ref in refs.items()}
        wanted = np.vdot(values["dy"], values["y"])
        assert np.vdot(values["dx"], values["x"]) == pytest.approx(wanted)
        assert np.vdot(values["dw"], values["w"]) == pytest.approx(wanted)
        smallest = await gpu.conv_bwd_data(dy, w, conv=conv)
        assert smallest.spec.dims == (2, 3, 7, 7)
        assert dx.spec.dtype is DType.FLOAT64


async def test_a_convolution_that_fails_gives_its_result_buffer_back() -> None:
    async with spawn(device="cpu") as gpu:
        x = await gpu.upload(np.ones((1, 1, 4, 4), np.int8))
        with pytest.raises(UnsupportedGraph):
            await gpu.conv_bwd_data(x, x, conv=ONE_BY_ONE)
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 1


async def test_tell_has_its_effect_before_what_is_sent_later() -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        gpu.tell(trio.product())
        gpu.tell(trio.sum())
        assert await trio.result() == 12


async def test_warm_builds_what_is_not_there_yet() -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        assert await gpu.warm([trio.product(), trio.sum(), trio.product()]) == 2
        assert await gpu.warm([trio.product(), trio.sum()]) == 0
        assert await trio.result() == 1, "warming has run something"
        before = (await gpu.statistics()).plans
        await gpu.ask(trio.product())
        after = (await gpu.statistics()).plans
        assert (after.misses, after.hits) == (before.misses, before.hits + 1)


async def test_drain_waits_for_all_that_was_sent_before() -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        futures = [gpu.submit(trio.product()) for _ in range(500)]
        async with asyncio.timeout(PATIENCE_S):
            await gpu.drain()
        assert all(future.done() for future in futures)


async def test_a_receipt_says_where_and_how_long() -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        dy = await gpu.upload(single(1))
        forward = await gpu.ask(trio.product())
        data = await gpu.ask(ConvBwdData(dy=dy, w=trio.w, dx=trio.y, conv=ONE_BY_ONE))
        filters = await gpu.ask(ConvBwdFilter(x=trio.x, dy=dy, dw=trio.y, conv=ONE_BY_ONE))
        heads = [receipt.plan.rpartition("/")[0] for receipt in (forward, data, filters)]
        assert heads == ["cpu/conv_fwd", "cpu/conv_bwd_data", "cpu/conv_bwd_filter"]
        assert forward.request_id < data.request_id < filters.request_id
        assert min(forward.queue_us, forward.run_us) > 0
