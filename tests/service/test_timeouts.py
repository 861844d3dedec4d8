"""`timeout=` of every call of the handle: one meaning, also for calls that send several requests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor import CudnnRef, DeadlineExceeded, GraphBuilder, InvalidRequest, Loop
from cudnn_actor.models import Feature
from cudnn_actor.operations import MaxPool, Recurrent, RecurrentMode, Window
from cudnn_actor.protocol import DType

from ..patience import PATIENCE_S
from .rigs import Gate, Trio, in_thread, outcome, spawn, spawn_gated

pytestmark = pytest.mark.usefixtures("isolation")

X = np.ones((1, 1, 4, 4), np.float32)
G = GraphBuilder()
GRAPH = G.build(y=G.input("x", (1, 1, 4, 4)) * 2.0)
BODY = GraphBuilder()
LOOP = Loop(body=BODY.build(y=BODY.input("x", (1, 1, 1, 1)) * 2.0), carried={"x": "y"})
FEATURE = Feature(name="x", dtype=DType.FLOAT32, dims=("N", 3))
Call = Callable[[CudnnRef, Trio, float | None], Any]
CALLS: dict[str, Call] = {
    "upload": lambda gpu, t, s: gpu.upload(X, timeout=s),
    "empty": lambda gpu, t, s: gpu.empty((1,), timeout=s),
    "write": lambda gpu, t, s: gpu.write(t.y, X[:, :, :1, :1], timeout=s),
    "download": lambda gpu, t, s: gpu.download(t.y, timeout=s),
    "copy": lambda gpu, t, s: gpu.copy(t.x, t.y, timeout=s),
    "fill": lambda gpu, t, s: gpu.fill(t.y, 1.0, timeout=s),
    "free": lambda gpu, t, s: gpu.free(t.w, timeout=s),
    "apply": lambda gpu, t, s: gpu.apply(MaxPool(x=t.x, window=Window.symmetric(2, 1)), timeout=s),
    "compute": lambda gpu, t, s: gpu.compute(MaxPool, x=X, window=Window.symmetric(2, 1), timeout=s),
    "loop": lambda gpu, t, s: gpu.loop(LOOP, x=t.x, turns=2, timeout=s),
    "conv_fwd": lambda gpu, t, s: gpu.conv_fwd(t.x, t.w, timeout=s),
    "conv_bwd_data": lambda gpu, t, s: gpu.conv_bwd_data(t.y, t.w, timeout=s),
    "conv_bwd_filter": lambda gpu, t, s: gpu.conv_bwd_filter(t.x, t.y, dims=(1, 1, 1, 1), timeout=s),
    "warm": lambda gpu, t, s: gpu.warm([GRAPH, t.product()], timeout=s),
    "clear_plans": lambda gpu, t, s: gpu.clear_plans(timeout=s),
    "explain": lambda gpu, t, s: gpu.explain(GRAPH, timeout=s),
    "plans": lambda gpu, t, s: gpu.plans(GRAPH, measure=True, timeout=s),
    "drain": lambda gpu, t, s: gpu.drain(timeout=s),
    "staging": lambda gpu, t, s: gpu.staging(FEATURE, N=2, timeout=s),
}
ELSEWHERE = {"ask", "submit", "aclose", "load", "run", "ping", "statistics", "view", "reserve_nbytes"}
"""Calls that are tested in other files or below; those that overtake what waits; and the one of thread
isolation."""

BOOKKEEPING = {"upload", "empty", "free", "staging"}


def test_every_call_of_the_handle_has_a_timeout() -> None:
    calls = {
        name
        for name, method in inspect.getmembers(CudnnRef, inspect.iscoroutinefunction)
        if not name.startswith("_")
    }
    for name in (calls | {"submit"}) - {"aclose"}:
        assert inspect.signature(getattr(CudnnRef, name)).parameters["timeout"].default is None, name
    assert calls <= CALLS.keys() | ELSEWHERE


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_that_cannot_start_ends_with_its_timeout_and_leaves_nothing(
    name: str, isolation: str
) -> None:
    if isolation == "process" and name in BOOKKEEPING:
        pytest.skip("the parent answers it at once")
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            first = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            error = await outcome(CALLS[name](gpu, trio, 0.02))
        assert isinstance(error, DeadlineExceeded)
        assert str(error).startswith("no reply within 0.02 s: "), "the call's own timeout is named"
        await first
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 3


async def test_a_question_about_a_reserve_ends_with_its_timeout() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        x, w = (
            await gpu.upload(np.ones((2, 1, 3), np.float32)),
            await gpu.upload(np.ones((1, 3, 3), np.float32)),
        )
        layer = Recurrent(x=x, w_ih=w, w_hh=w, mode=RecurrentMode.TANH)
        with gate.closed():
            first = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            error = await outcome(asyncio.ensure_future(gpu.reserve_nbytes(layer, timeout=0.02)))
        assert isinstance(error, DeadlineExceeded)
        await first
        assert await gpu.reserve_nbytes(layer, timeout=PATIENCE_S) > 0


async def test_a_timeout_that_is_no_number_sends_nothing() -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        receipt = await gpu.ask(trio.product())
        for call in CALLS.values():
            for wrong in (-1.0, float("nan"), "2"):
                with pytest.raises(InvalidRequest, match=r"^timeout=.*: must be a number of seconds"):
                    await call(gpu, trio, wrong)  # type: ignore[arg-type]
        assert (await gpu.ask(trio.product())).request_id == receipt.request_id + 1


async def test_a_call_that_is_answered_in_time_does_what_it_does() -> None:
    async with spawn(device="cpu") as gpu:
        for name, call in CALLS.items():
            result = await outcome(call(gpu, await Trio.on(gpu), 60))
            assert not isinstance(result, BaseException), name


class TestReferences:
    """What a reference tells of its buffer."""

    async def test_it_has_the_dims_dtype_and_bytes_of_its_buffer(self) -> None:
        async with spawn(device="cpu") as gpu:
            ref = await gpu.upload(X, dtype="float16")
        assert (ref.dims, ref.dtype, ref.nbytes) == ((1, 1, 4, 4), "float16", 32)

    @pytest.mark.parametrize("read", [np.asarray, np.sum, lambda ref: np.ones(3) * ref, np.stack])
    async def test_numpy_is_told_to_download(self, read: Callable[[Any], object]) -> None:
        async with spawn(device="cpu") as gpu:
            ref = await gpu.upload(X)
            with pytest.raises(TypeError, match=r"^<buffer .*> holds no values that NumPy .*gpu\.download"):
                read([ref] if read is np.stack else ref)


class TestConvolutionsByNumbers:
    """Convolutions whose parameters are given one by one, as to a graph builder."""

    async def test_they_are_those_of_a_spec(self) -> None:
        rng = np.random.default_rng(5)
        async with spawn(device="cpu") as gpu:
            x = await gpu.upload(rng.standard_normal((2, 4, 9, 8)))
            w = await gpu.upload(rng.standard_normal((6, 2, 3, 3)))
            g = GraphBuilder()
            like: Any = {"pad": (1, (0, 2)), "stride": 2, "groups": 2}
            y = g.conv(g.input("x", x.dims, "float64"), g.input("w", w.dims, "float64"), **like)
            made = await gpu.conv_fwd(x, w, **like)
            wanted = await gpu.apply(g.build(y=y), x=x, w=w)
            np.testing.assert_array_equal(await gpu.download(made), await gpu.download(wanted))
            dy = await gpu.upload(rng.standard_normal(made.dims))
            dx = await gpu.conv_bwd_data(dy, w, dims=x.dims, **like)
            dw = await gpu.conv_bwd_filter(x, dy, dims=w.dims, **like)
            values = [await gpu.download(ref) for ref in (dy, made, dx, x, dw, w)]
            assert np.vdot(values[0], values[1]) == pytest.approx(np.vdot(values[2], values[3]))
            assert np.vdot(values[0], values[1]) == pytest.approx(np.vdot(values[4], values[5]))

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({"conv": 3}, "conv=3: is of type int, but must be a ConvSpec; .* or give pad, stride"),
            ({"pad": (1, 2, 3)}, "pad=.*: must be one whole number, or one or a pair of them for each of 2"),
            ({"pad": -1}, "pad=.*: has a value that is not from 0"),
            ({"stride": "2"}, "stride='2': must be one whole number or 2 of them"),
        ],
    )
    async def test_wrong_ones_are_named(self, given: Any, text: str) -> None:
        async with spawn(device="cpu") as gpu:
            trio = await Trio.on(gpu)
            with pytest.raises(InvalidRequest, match=f"^{text}"):
                await gpu.conv_fwd(trio.x, trio.w, **given)
            flat = await gpu.empty((3, 4))
            with pytest.raises(InvalidRequest, match=r"^x=\(3, 4\): has no spatial dims; give it dims N, C"):
                await gpu.conv_fwd(flat, trio.w)
