"""Where this process has no memory for what a worker says, the worker goes on, and answers come later."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from cudnn_actor import CudnnRef, GraphBuilder, OutOfMemory
from cudnn_actor.engines import choose_engine
from cudnn_actor.isolation.process.parent.in_flight import WorkerRequest
from cudnn_actor.isolation.process.parent.model_runs import ModelRuns
from cudnn_actor.isolation.process.wire import KnowGraph, Requests, encode_message
from cudnn_actor.isolation.staging import Staging
from cudnn_actor.messages import Ping, Upload
from cudnn_actor.options import make_options
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import encode
from cudnn_actor.service import GraphLimits, Spawning
from cudnn_actor.service.service import CudnnService
from tests.onnx.small_models import FLOAT, model_of, node
from tests.service.rigs import Trio, in_thread, single

from ..patience import PATIENCE_S
from .crash_rigs import workers


@asynccontextmanager
async def unharmed(*, host_arenas: bool = True, **given: Any) -> AsyncIterator[CudnnRef]:
    """A service whose worker is the same at the end."""
    options = make_options({"device": "cpu", "isolation": "process", **given})
    chosen = await asyncio.to_thread(choose_engine, "cpu")  # it reads the container's limits
    engine = chosen._replace(host_arenas=host_arenas)
    async with Spawning(CudnnService(options, engine=engine)) as gpu:
        worker = gpu.worker_pid
        async with asyncio.timeout(PATIENCE_S):
            yield gpu
            assert ((await gpu.statistics()).restarts, gpu.worker_pid) == (0, worker)


def wanting(function: Callable[..., Any], times: int) -> tuple[Callable[..., Any], list[int]]:
    """A function for which there is no memory the next so many times; which of those are left."""
    left = list(range(times))

    def tried(*arguments: Any, **named: Any) -> Any:
        if left:
            left.pop()
            raise MemoryError
        return function(*arguments, **named)

    return tried, left


async def by_this_loop(gpu: CudnnRef) -> Any:
    return await gpu.ping()


async def by_a_loop_on_another_thread(gpu: CudnnRef) -> Any:
    return await in_thread(lambda: asyncio.run(gpu.ping()))


async def by_no_loop(gpu: CudnnRef) -> Any:
    return await in_thread(lambda: gpu.actor_ref.ask(Ping(), timeout=PATIENCE_S))


@pytest.mark.parametrize("asked", [by_this_loop, by_a_loop_on_another_thread, by_no_loop])
async def test_an_answer_that_cannot_be_decoded_for_want_of_memory_comes_when_there_is_some(
    asked: Callable[[CudnnRef], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with unharmed() as gpu:
        decoded, left = wanting(Channel.decode, 7)
        monkeypatch.setattr(Channel, "decode", decoded)
        assert await asked(gpu) == 1
        assert not left


@pytest.mark.parametrize(("edge", "tries"), [(8, (2, 3)), (1024, (1, 1))], ids=["copied", "handed over"])
async def test_a_result_that_there_is_no_memory_for_is_refused_alone(
    edge: int, tries: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy in one step is tried by the thread that reads the answer, by the monitor's, then as all else.

    The one that reads the answer may be the monitor's.
    """
    least, most = tries
    async with unharmed(host_arenas=False) as gpu:
        values = np.arange(edge * edge, dtype=np.float32).reshape(1, 1, edge, edge)
        ref = await gpu.upload(values)
        for _ in range(2):
            shown, left = wanting(Staging.array_at, most)
            with monkeypatch.context() as patch:
                patch.setattr(Staging, "array_at", shown)
                with pytest.raises(OutOfMemory):
                    await gpu.download(ref)
            assert most - len(left) >= least
            np.testing.assert_array_equal(await gpu.download(ref), values)


@pytest.mark.parametrize("on_another_thread", [False, True])
@pytest.mark.parametrize("edge", [8, 256], ids=["copied", "lent"])
async def test_a_run_whose_outputs_there_is_no_memory_for_is_refused_alone(
    edge: int, on_another_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers behind it are not held up."""
    proto = model_of(
        [node("Add", "x one", "y")],
        {"x": (FLOAT, [edge, edge])},
        {"y": (FLOAT, None)},
        {"one": np.ones(1, np.float32)},
    )
    x = np.arange(edge * edge, dtype=np.float32).reshape(edge, edge)
    async with unharmed() as gpu:

        async def runs() -> list[Any]:
            asked = (gpu.run(model, x=number * x) for number in range(4))
            found: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
            return found

        async def wrong() -> list[Any]:
            found = await (in_thread(lambda: asyncio.run(runs())) if on_another_thread else runs())
            right = [
                isinstance(each, dict) and np.array_equal(each["y"], n * x + 1)
                for n, each in enumerate(found)
            ]
            return [each for each, fits in zip(found, right, strict=True) if not fits]

        model = await gpu.load(proto)
        assert await wrong() == []
        results, poor = ModelRuns.results, list[WorkerRequest]()

        def tried(models: ModelRuns, request: WorkerRequest) -> Any:
            if request is (poor or [request])[0]:
                poor.append(request)
                raise MemoryError
            return results(models, request)

        monkeypatch.setattr(ModelRuns, "results", tried)
        (refused,) = await wrong()
        assert isinstance(refused, OutOfMemory)
        assert poor
        monkeypatch.undo()
        assert await wrong() == []
        await model.close()


def staging_files() -> int:
    """How many descriptors of staging memory this process has."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += "cudnn-actor-stage" in os.readlink(f"/proc/self/fd/{name}")
    return count


@pytest.mark.parametrize(
    ("call", "wanted"),
    [("upload", Staging.array), ("upload", encode_message), ("download", encode_message)],
    ids=["show an upload", "encode an upload", "encode a download"],
)
async def test_a_transfer_that_there_is_no_memory_to_prepare_gives_its_staging_memory_back(
    call: str, wanted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with unharmed(host_arenas=False) as gpu:
        values = np.ones((1, 1, 1024, 5120), np.float32)  # 20 MiB: a segment has no room for two
        ref = await gpu.upload(values)
        before = staging_files()
        tried, left = wanting(wanted, 1)
        if wanted is encode_message:
            monkeypatch.setattr("cudnn_actor.isolation.process.parent.values.encode_message", tried)
        else:
            monkeypatch.setattr(Staging, "array", tried)
        with pytest.raises(OutOfMemory):
            await (gpu.upload(values) if call == "upload" else gpu.download(ref))
        assert not left
        await gpu.ask(Upload(dst=ref, data=2 * values))
        assert staging_files() == before
        assert (await gpu.download(ref)).max() == 2.0


async def test_a_request_that_there_is_no_memory_to_send_is_refused_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with unharmed() as gpu:
        trio = await Trio.on(gpu)
        encoded, left = wanting(encode_message, 100)  # as often as it is tried, by either way
        monkeypatch.setattr("cudnn_actor.isolation.process.parent.sender.encode_message", encoded)
        with pytest.raises(OutOfMemory):
            await gpu.ask(trio.product())
        assert left
        monkeypatch.undo()
        await gpu.ask(trio.product())


def wanting_for(kind: type) -> tuple[Callable[[Any], bytes], list[int]]:
    """What encodes frames, and has no memory for the next one of this kind."""
    tried, left = wanting(encode, 1)
    return lambda frame: (tried if isinstance(frame, kind) else encode)(frame), left


async def test_a_graph_that_there_is_no_memory_to_send_leaves_its_buffers_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    g = GraphBuilder()
    x = g.input("x", (1, 1, 768, 1024))
    graph = g.build(y=x * 2.0)
    async with unharmed(memory_limit=8 << 20) as gpu:
        buffer = await gpu.empty((1, 1, 768, 1024))
        encoded, left = wanting_for(KnowGraph)
        monkeypatch.setattr("cudnn_actor.processes.channel.encode", encoded)
        with pytest.raises(OutOfMemory):
            await gpu.apply(graph, x=buffer)
        assert not left
        await gpu.free(buffer)
        whole = await gpu.empty((1, 2, 1024, 1024))  # all that the limit allows
        await gpu.fill(whole, 2.0)


@pytest.mark.usefixtures("a_forkserver")
async def test_a_request_that_there_is_no_memory_to_send_to_the_next_worker_waits_for_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    g = GraphBuilder()
    graph = g.build(y=g.input("x", (1, 1, 1, 1)) * 2.0)
    async with workers() as (gpu, points):
        x = await gpu.upload(single(3.0))
        points.hold("execute")
        asked = asyncio.ensure_future(gpu.apply(graph, x=x))
        begun = await in_thread(lambda: points.arrival("execute"))
        encoded, left = wanting_for(KnowGraph)
        monkeypatch.setattr("cudnn_actor.processes.channel.encode", encoded)
        begun.kill()
        points.let_go()
        async with asyncio.timeout(PATIENCE_S):
            y = await asked
        assert not left
        assert (await gpu.download(y)).item() == 6.0


async def test_a_long_request_whose_frame_there_is_no_memory_for_is_sent_when_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    g = GraphBuilder(limits=GraphLimits(nbytes=1 << 20))
    x = g.input("x" * (100 << 10), (1, 1, 1, 1))
    graph = g.build(y=x * 2.0)
    async with unharmed() as gpu:
        encoded, left = wanting_for(Requests)
        monkeypatch.setattr("cudnn_actor.processes.channel.encode", encoded)
        assert await gpu.warm(graph) == 1
        assert not left
        assert await gpu.warm(graph) == 0
