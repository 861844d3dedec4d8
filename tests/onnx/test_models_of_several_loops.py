"""A model that event loops on several threads use: one is stopped where another gets ahead of it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from cudnn_actor import CudnnRef, InvalidRequest, spawn, start
from cudnn_actor.messages import Message, UnloadModel, WarmModel, WriteWeights
from cudnn_actor.onnx import OnnxModel

from ..inside import kept_by
from ..patience import PATIENCE_S
from .small_models import FLOAT, model_of, node


def rows(count: int, value: float = 1) -> np.ndarray:
    return np.full((count, 2), value, np.float32)


def file() -> Any:
    """Adds a weight, and one that follows from it."""
    nodes = [node("Neg", "w", "negative"), node("Add", "x w", "a"), node("Mul", "a negative", "y")]
    weights = {"w": np.array([1, 2], np.float32)}
    return model_of(nodes, {"x": (FLOAT, ["N", 2])}, {"y": (FLOAT, None)}, weights)


def test_a_graph_that_one_loop_gives_back_is_deployed_again_by_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop is stopped before it sends the places of a graph. The other one deploys them, finds them
    forgotten by the service, and gives them back."""
    gpu = CudnnRef(start(device="cpu"))
    model = asyncio.run(gpu.load(file()))
    ask, slow = gpu.ask, threading.local()
    stopped, go_on = threading.Event(), threading.Event()

    async def ask_later(message: Message, **options: Any) -> Any:
        if type(message) is WarmModel and getattr(slow, "stops", False):
            slow.stops = False
            stopped.set()
            assert await asyncio.to_thread(go_on.wait, PATIENCE_S)
        return await ask(message, **options)

    monkeypatch.setattr(gpu, "ask", ask_later)

    async def run() -> Any:
        return (await gpu.run(model, x=rows(1)))["y"]

    def of_slow_loop() -> Any:
        slow.stops = True
        return asyncio.run(run())

    async def of_quick_loop() -> Any:
        await run()
        graphs = tuple(kept.name for kept in kept_by(model).kept.values())
        await gpu.ask(UnloadModel(model=model.ref, graphs=graphs))
        return await run()

    async def end() -> None:
        await model.close()
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 0
        await gpu.aclose()

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(of_slow_loop)
        assert stopped.wait(PATIENCE_S)
        try:
            np.testing.assert_array_equal(asyncio.run(of_quick_loop()), [[-2, -6]])
        finally:
            go_on.set()
        np.testing.assert_array_equal(first.result(PATIENCE_S), [[-2, -6]])
    asyncio.run(end())


def test_a_loop_leaves_alone_what_another_one_deploys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop is stopped when it has deployed a graph. The service forgets it, and the other loop, which has
    found that, is stopped before it sends the graph's new places. Then the first goes on."""
    gpu = CudnnRef(start(device="cpu"))
    model = asyncio.run(gpu.load(file()))
    ask, own = gpu.ask, threading.local()
    first_at, second_at, first_may, second_may = (threading.Event() for _ in range(4))

    async def ask_later(message: Message, **options: Any) -> Any:
        stops = getattr(own, "stops", None) if type(message) is WarmModel else None
        if stops is not None:
            own.stops = stops - 1
        if stops == 2:
            second_at.set()
            assert await asyncio.to_thread(second_may.wait, PATIENCE_S)
        answer = await ask(message, **options)
        if stops == 0:
            first_at.set()
            assert await asyncio.to_thread(first_may.wait, PATIENCE_S)
        return answer

    monkeypatch.setattr(gpu, "ask", ask_later)

    async def run() -> Any:
        return (await gpu.run(model, x=rows(1)))["y"]

    def of_first_loop() -> Any:
        own.stops = 0
        return asyncio.run(run())

    async def forgotten() -> Any:
        await run()
        graphs = tuple(kept.name for kept in kept_by(model).kept.values())
        await gpu.ask(UnloadModel(model=model.ref, graphs=graphs))
        own.stops = 2
        return await run()

    def of_second_loop() -> Any:
        return asyncio.run(forgotten())

    async def end() -> None:
        await model.close()
        await gpu.aclose()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(of_first_loop)
        assert first_at.wait(PATIENCE_S)
        second = threads.submit(of_second_loop)
        assert second_at.wait(PATIENCE_S)
        first_may.set()
        np.testing.assert_array_equal(first.result(PATIENCE_S), [[-2, -6]])
        second_may.set()
        np.testing.assert_array_equal(second.result(PATIENCE_S), [[-2, -6]])
    asyncio.run(end())


class Gated:
    """A model whose next import waits for the test."""

    def __init__(self, of: OnnxModel) -> None:
        self._of = of
        self.inputs, self.defaults, self.outputs = of.inputs, of.defaults, of.outputs
        self.swappable, self.tensors = of.swappable, of.tensors
        self.begun, self.may_end = threading.Event(), threading.Event()

    def with_tensors(self, tensors: Any) -> OnnxModel:
        return self._of.with_tensors(tensors)

    def specialise(self, *given: Any) -> Any:
        if given[0]["x"].dims != (1, 2):
            self.begun.set()
            assert self.may_end.wait(PATIENCE_S)
        return self._of.specialise(*given)


async def test_weights_that_a_graph_s_import_writes_are_not_given_back_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A write makes the import outdated, the next one is cancelled when it was sent, and so the import sends
    it again. While it does, a thread closes the model."""
    source = Gated(OnnxModel(file(), swappable=True))
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(source)
        ask = gpu.ask
        await gpu.run(model, x=rows(1))
        running = asyncio.ensure_future(gpu.run(model, x=rows(2)))
        await asyncio.to_thread(source.begun.wait, PATIENCE_S)
        await model.write({"w": np.array([5, 5], np.float32)})

        async def ask_cancelled(message: Message, **options: Any) -> Any:
            if type(message) is WriteWeights:
                raise asyncio.CancelledError
            return await ask(message, **options)

        async def ask_closing(message: Message, **options: Any) -> Any:
            if type(message) is WriteWeights:
                await asyncio.to_thread(model.end)
            return await ask(message, **options)

        monkeypatch.setattr(gpu, "ask", ask_cancelled)
        with pytest.raises(asyncio.CancelledError):
            await model.write({"w": np.array([7, 7], np.float32)})
        monkeypatch.setattr(gpu, "ask", ask_closing)
        source.may_end.set()
        with pytest.raises(InvalidRequest, match="is closed"):
            await running
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 0
