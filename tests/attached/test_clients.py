"""A client uses a service of another process as if it were its own."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import threading
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import pytest

from cudnn_actor import (
    ConvFwd,
    ConvSpec,
    CudnnRef,
    GraphBuilder,
    InvalidRequest,
    OutOfMemory,
    ServiceStopped,
    StaleBufferError,
    StartFailed,
    blocking,
    connect,
    spawn,
)
from cudnn_actor.actors import LoopBridge
from cudnn_actor.attached import ServedSocket, serve_socket
from cudnn_actor.attached.client.sent import Outcomes
from cudnn_actor.messages import Download, Upload
from cudnn_actor.operations import MaxPool, Window

from ..inside import kept_by, service_behind
from ..onnx.small_models import image_model
from ..patience import PATIENCE_S
from ..service.trained_layers import LAYERS
from .client_program import W, X
from .conftest import client_process, eventually, said_by


async def test_a_convolution_gives_what_the_service_itself_gives(client: CudnnRef, gpu: CudnnRef) -> None:
    y = await client.conv_fwd(await client.upload(X), await client.upload(W))
    own = await gpu.conv_fwd(await gpu.upload(X), await gpu.upload(W))
    assert np.array_equal(await client.download(y), await gpu.download(own))
    assert (
        (
            await client.ask(
                ConvFwd(x=await client.upload(X), w=await client.upload(W), y=y, conv=ConvSpec.symmetric(2))
            )
        ).generation
        == client.generation
        == 1
    )


@pytest.mark.parametrize("shape", [(1, 1, 3, 5), (1, 4, 128, 256), (4, 4, 256, 512)])
async def test_arrays_of_every_size_come_back(client: CudnnRef, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(1).random(shape, np.float32)
    for layout in ("NCHW", "NHWC"):
        assert np.array_equal(await client.download(await client.upload(values, layout=layout)), values)


async def test_operations_graphs_and_scopes(client: CudnnRef, gpu: CudnnRef) -> None:
    before = (await gpu.statistics()).live_buffers
    async with client.scope() as scope:
        y, _ = await scope.apply(
            MaxPool(x=await scope.upload(X), window=Window.symmetric(2, size=2)), also=("index",)
        )
        assert np.array_equal(await scope.download(y), X[:, :, 1::2, 1::2])
    builder = GraphBuilder()
    graph = builder.build(y=builder.relu(builder.input("x", X.shape, "float32")))
    assert np.array_equal(await client.compute(graph, x=-X), np.zeros_like(X))
    assert (await client.explain(graph)).pieces
    await client.drain()
    assert (await gpu.statistics()).live_buffers == before


async def test_a_layer_is_trained_with_its_reserve_in_a_buffer(client: CudnnRef) -> None:
    layer = LAYERS["lstm"]
    found = await (await layer.on(client)).train()
    for name, wanted in layer.results().items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=2e-6, err_msg=name)


async def test_a_freed_buffer_is_stale_and_one_of_another_client_is_foreign(
    client: CudnnRef, served: ServedSocket, gpu: CudnnRef
) -> None:
    mine, services = await client.upload(X), await gpu.upload(X)
    await client.free(mine)
    with pytest.raises(StaleBufferError, match="freed"):
        await client.download(mine)
    async with connect(served.path) as other:
        theirs = await other.upload(X)
        for ref in (theirs, services):
            service_behind(client).state.memory.add(ref)  # or the client itself would refuse it
            with pytest.raises(StaleBufferError, match="foreign"):
                await client.download(ref)
            with pytest.raises(StaleBufferError, match="foreign"):
                await client.free(ref)
        assert np.array_equal(await other.download(theirs), X)


async def test_models_are_loaded_once_for_all_clients(gpu: CudnnRef, tmp_path: Path) -> None:
    file = tmp_path / "image.onnx"
    file.write_bytes(image_model().SerializeToString())
    image = np.ones((1, 3, 8, 8), np.float32)
    async with await gpu.load(file) as own:
        expected = await gpu.run(own, image=image)
    await gpu.drain()
    async with (
        serve_socket(gpu, tmp_path / "s", models={"images": file}) as served,
        connect(served.path) as one,
    ):
        first = await one.load("images", dims={"N": 1})
        assert all(
            np.array_equal(a, b)
            for a, b in zip((await one.run(first, image=image)).values(), expected.values(), strict=True)
        )
        weights = len(served.shared)
        held = (await gpu.statistics()).live_bytes
        async with connect(served.path) as two:
            second = await two.load(str(file), dims={"N": 1})
            assert (await two.run(second, image=image)).keys() == expected.keys()
            assert len(served.shared) == weights > 0
            assert (await gpu.statistics()).live_bytes - held < held  # places alone
            await first.close()
            await one.drain()
            assert len(served.shared) == weights  # the second still has them
            assert (await two.run(second, image=image)).keys() == expected.keys()
            await second.close()
            await two.drain()
            assert len(served.shared) == 0
    await gpu.drain()
    assert (await gpu.statistics()).live_buffers == 0


async def test_a_model_of_the_servers_own_process_has_the_weights_of_its_clients(
    gpu: CudnnRef, tmp_path: Path
) -> None:
    file = tmp_path / "image.onnx"
    file.write_bytes(image_model().SerializeToString())
    image = np.ones((1, 3, 8, 8), np.float32)
    async with serve_socket(gpu, tmp_path / "s") as served, connect(served.path) as client:
        own = await gpu.load(file, dims={"N": 1})
        expected = await gpu.run(own, image=image)
        weights = {ref for ref, _ in kept_by(own).weights.values()}
        places = (await gpu.statistics()).live_bytes - sum(ref.nbytes for ref in weights)
        model = await client.load(str(file), dims={"N": 1})
        await client.run(model, image=image)
        both = (await gpu.statistics()).live_bytes
        assert both == sum(ref.nbytes for ref in weights) + 2 * places
        await own.close()
        await gpu.drain()
        found = await client.run(model, image=image)  # it still has the weights
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
        again = await gpu.load(file, dims={"N": 1})
        assert {ref for ref, _ in kept_by(again).weights.values()} == weights
        await model.close()
        await client.drain()
        assert len(served.shared) == len(weights)
        await again.close()
        await asyncio.sleep(0)  # the loop takes back what the model gave back
        assert len(served.shared) == 0
        last = await gpu.load(file, dims={"N": 1})
    await gpu.run(last, image=image)
    await last.close()  # it frees its weights itself: there is no socket any more
    await gpu.drain()
    assert (await gpu.statistics()).live_buffers == 0


async def test_a_killed_client_leaves_nothing_behind(
    served: ServedSocket, gpu: CudnnRef, client: CudnnRef
) -> None:
    mine = await client.upload(X)
    async with client_process("hold", served.path) as process:
        assert (await gpu.statistics()).live_buffers > 3
        process.send_signal(signal.SIGKILL)

        async def alone() -> bool:
            return (await gpu.statistics()).live_buffers == 1 and served.clients == 1

        async with asyncio.timeout(PATIENCE_S):
            await eventually(alone)
    assert np.array_equal(await client.download(mine), X)


async def test_a_lost_server_ends_the_handle(gpu: CudnnRef, tmp_path: Path) -> None:
    async with serve_socket(gpu, tmp_path / "s") as served:
        client = await connect(served.path)
        x = await client.upload(X)
        following = client.events()
        assert (await anext(following)).service == "cudnn"
    with pytest.raises(ServiceStopped, match="has ended"):
        while True:
            await client.download(x)
    assert not client.alive
    assert [type(event).__name__ async for event in following] == ["Stopped"]
    await client.aclose()
    with pytest.raises(StartFailed, match=r"nobody serves at .*; call serve_socket\(gpu\) in the process"):
        await connect(tmp_path / "s")


async def test_a_service_that_gives_up_ends_its_clients(tmp_path: Path) -> None:
    async with spawn(device="cpu", isolation="thread", on_give_up=lambda _: None) as gpu:
        async with serve_socket(gpu, tmp_path / "s") as served, connect(served.path) as client:
            await gpu.aclose()
            with pytest.raises(ServiceStopped):
                while True:
                    await client.ping()


async def test_a_workers_death_is_latency_alone(tmp_path: Path) -> None:
    async with spawn(device="cpu", isolation="process", max_restarts=20) as gpu:
        async with (
            serve_socket(gpu, tmp_path / "s") as served,
            client_process("work", served.path, 40) as process,
        ):
            assert gpu.worker_pid is not None
            os.kill(gpu.worker_pid, signal.SIGKILL)
            assert await said_by(process) == "done\n"
        assert (await gpu.statistics()).restarts == 1


async def test_threads_attach_without_asyncio(served: ServedSocket) -> None:
    results: list[np.ndarray] = []

    def use() -> None:
        with blocking.connect(f"unix:{served.path}") as gpu:
            x = gpu.upload(X)
            results.append(gpu.download(gpu.conv_fwd(x, gpu.upload(W))))
            given: Any = gpu.actor_ref.ask(Download(src=x))
            results.append(given)

    thread = threading.Thread(target=use)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert results[0].shape == (2, 4, 6, 6)
    assert np.array_equal(results[1], X)


async def test_bounds_are_refused_by_name(gpu: CudnnRef, tmp_path: Path) -> None:
    async with serve_socket(gpu, tmp_path / "s", clients=1, requests=2, nbytes=1 << 20) as served:
        async with connect(served.path) as client:
            with pytest.raises(OutOfMemory) as caught:
                await client.empty((1, 1, 1024, 1024))
            assert caught.value.limit == 1 << 20
            kept = await client.empty((1, 1, 512, 400))
            await client.free(kept)
            await client.empty((1, 1, 512, 400))  # what is freed counts no more
            with pytest.raises(InvalidRequest, match="clients=1"):
                await connect(served.path)
            assert await asyncio.gather(*[client.ping() for _ in range(20)])  # those over the window wait


async def test_the_socket_is_the_users_own(gpu: CudnnRef, tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with serve_socket(gpu, path) as served:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(InvalidRequest, match="another process"):
            async with serve_socket(gpu, path):
                pass
        path.rename(tmp_path / "left")  # as a killed server leaves it, without its lock
        assert served.clients == 0
    (tmp_path / "left").rename(path)
    async with serve_socket(gpu, path) as again, connect(again.path) as client:
        assert await client.ping() == 1
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="is no socket"):
        async with serve_socket(gpu, tmp_path / "file"):
            pass


async def test_without_a_path_a_service_is_found_that_has_no_name_of_its_own(
    gpu: CudnnRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with serve_socket(gpu) as served, connect() as client:
        assert served.path == tmp_path / "cudnn-actor" / "cudnn.sock"
        assert await client.ping() == 1


async def test_failed_requests_of_a_client_are_counted_as_the_services_own_are(
    client: CudnnRef, gpu: CudnnRef
) -> None:
    """A request that is refused when it is sent is not counted: nothing was admitted."""
    for failed, handle in enumerate((gpu, client), 1):
        ref = await handle.upload(X)
        with pytest.raises(InvalidRequest):  # by the service, which counts it
            await handle.ask(Upload(dst=ref, data=np.ones((1, 1), np.float32)))
        await handle.free(ref)
        with pytest.raises(StaleBufferError):
            await handle.ask(Download(src=ref))
        assert gpu.metrics().failed == failed
    services = await gpu.upload(X)
    service_behind(client).state.memory.add(services)  # or the client itself would refuse it
    with pytest.raises(StaleBufferError, match="foreign"):
        await client.download(services)
    assert (gpu.metrics().failed, (await gpu.statistics()).failed) == (2, 2)


async def test_a_withdrawn_request_and_a_deadline(client: CudnnRef, gpu: CudnnRef) -> None:
    x = await client.upload(X)
    task = asyncio.ensure_future(client.download(x))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    lost = asyncio.ensure_future(client.empty((1, 1, 8, 8)))
    await asyncio.sleep(0)
    lost.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lost
    await client.drain()
    await client.drain()
    assert (await gpu.statistics()).live_buffers == 1


async def test_a_client_without_room_for_an_answer_tells_its_caller_once(
    client: CudnnRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, told = service_behind(client).state.mailbox, list[object]()

    class Observer:
        def sent(self, _: object) -> None:
            """Nothing to add."""

        def answered(self, *what: object) -> None:
            told.append(what[2])

        def not_run(self, *_: object) -> None:
            """Nothing to note."""

    def no_room(nbytes: int) -> None:
        raise OutOfMemory(requested=nbytes, in_use=0, limit=0)

    src = await client.upload(np.zeros(1 << 20, np.uint8))
    await client.drain()
    monkeypatch.setattr(Outcomes, "make_room", lambda *_: None)
    with monkeypatch.context() as patched:
        patched.setattr(link.staging, "take", no_room)
        link.observer = Observer()
        with pytest.raises(OutOfMemory):
            await client.download(src)
        await client.drain()
    assert [type(error) for error in told] == [OutOfMemory, NoneType]
    assert LoopBridge.of_running_loop().awaited == 0
    assert np.array_equal(await client.download(src), np.zeros(1 << 20, np.uint8))
