"""Models of the server's process are run by clients by their names, and are there once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from cudnn_actor import CudnnRef, InvalidRequest, Model, blocking, connect, spawn
from cudnn_actor.attached import ServedModel, ServedSocket, serve_socket, served_model
from cudnn_actor.blocking import BlockingServedModel
from cudnn_actor.errors import NotDeployed
from cudnn_actor.messages import RunModel

from ..inside import gpu_behind, sessions_of
from ..onnx.small_models import image_model
from ..patience import PATIENCE_S

IMAGE = np.linspace(-1.0, 1.0, 192, dtype=np.float32).reshape(1, 3, 8, 8)


@pytest.fixture
async def own(gpu: CudnnRef, tmp_path: Path) -> AsyncIterator[Model]:
    async with await gpu.load(image_model().SerializeToString(), dims={"N": 1}) as model:
        yield model


@pytest.fixture
async def lending(gpu: CudnnRef, own: Model, tmp_path: Path) -> AsyncIterator[ServedSocket]:
    async with serve_socket(gpu, tmp_path / "s", models={"images": own}) as served:
        yield served


@pytest.fixture
async def images(lending: ServedSocket) -> AsyncIterator[ServedModel]:
    async with connect(lending.path) as client:
        yield served_model(client, "images")


Arrays = dict[str, np.ndarray]


def same(found: Arrays, expected: Arrays) -> bool:
    return list(found) == list(expected) and all(
        np.array_equal(found[name], expected[name]) for name in found
    )


async def test_a_client_runs_the_servers_model_and_takes_no_memory_for_it(
    images: ServedModel, own: Model, gpu: CudnnRef
) -> None:
    expected = await gpu.run(own, image=IMAGE)
    before = await gpu.statistics()
    assert same(await images.run(image=IMAGE), expected)
    assert same(await images.run({"image": IMAGE}, timeout=PATIENCE_S), expected)
    after = await gpu.statistics()
    assert (after.live_bytes, after.live_buffers) == (before.live_bytes, before.live_buffers)
    assert [str(each) for each in images.inputs] == [str(each) for each in own.inputs]
    assert [str(each) for each in images.outputs] == [str(each) for each in own.outputs]
    assert images.defaults == own.defaults
    assert repr(images) == "<model 'images' of the server>"


async def test_the_server_imports_other_dims(images: ServedModel, own: Model, gpu: CudnnRef) -> None:
    several = np.concatenate([IMAGE, 2 * IMAGE, -IMAGE])
    found = await asyncio.gather(*[images.run(image=several) for _ in range(3)])
    expected = await gpu.run(own, image=several)
    assert all(same(each, expected) for each in found)


def test_a_process_without_the_file_and_without_onnx_runs_it(tmp_path: Path) -> None:
    program = (
        "import sys, asyncio, numpy as np\n"
        "from cudnn_actor import connect\n"
        "from cudnn_actor.attached import served_model\n"
        "async def main():\n"
        "    async with connect(sys.argv[1]) as gpu:\n"
        "        found = await served_model(gpu, 'images').run(image=np.ones((2, 3, 8, 8), np.float32))\n"
        "        print(sorted(found), 'onnx' in sys.modules)\n"
        "asyncio.run(main())\n"
    )

    async def serve() -> tuple[str, list[str]]:
        async with spawn(device="cpu", isolation="thread") as gpu:
            model = await gpu.load(image_model().SerializeToString())
            async with model, serve_socket(gpu, tmp_path / "s", models={"images": model}) as served:
                ran = await asyncio.to_thread(
                    subprocess.run,
                    [sys.executable, "-c", program, str(served.path)],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                return ran.stdout, sorted(each.name for each in model.outputs)

    said, names = asyncio.run(serve())
    assert said.strip() == f"{names} False"


async def test_a_model_that_the_server_replaces_is_the_new_one_for_clients(
    images: ServedModel, own: Model, gpu: CudnnRef
) -> None:
    await gpu.load(image_model().SerializeToString(), replace=own)
    assert same(await images.run(image=IMAGE), await gpu.run(own, image=IMAGE))


async def test_what_a_served_model_does_not_do_is_refused(
    images: ServedModel, own: Model, gpu: CudnnRef, lending: ServedSocket, tmp_path: Path
) -> None:
    client = gpu_behind(images)
    with pytest.raises(InvalidRequest, match="use one of images"):
        served_model(client, "other")
    with pytest.raises(InvalidRequest, match="service's own process"):
        served_model(gpu, "images")
    ref = await client.upload(IMAGE)
    with pytest.raises(InvalidRequest, match="takes arrays"):
        await images.run(image=ref)
    with pytest.raises(InvalidRequest, match="buffers of a client"):
        await client.ask(RunModel(model=own.ref, buffers={"image": ref}))
    with pytest.raises(InvalidRequest, match="missing"):
        await images.run()
    with pytest.raises(InvalidRequest, match="missing"):  # the server checks it, too
        await client.ask(RunModel(model=own.ref))
    async with spawn(device="cpu", isolation="thread") as other:
        with pytest.raises(InvalidRequest, match="another service"):
            async with serve_socket(other, tmp_path / "other", models={"images": own}):
                pass
    with pytest.raises(InvalidRequest, match="another service"):
        async with (
            spawn(device="cpu", isolation="thread") as other,
            serve_socket(other, tmp_path / "o") as them,
        ):
            them.lend("images", own)
    await own.close()
    with pytest.raises(InvalidRequest, match="closed"):
        await images.run(image=IMAGE)


async def test_a_name_may_get_another_model_and_lose_it(
    images: ServedModel, own: Model, gpu: CudnnRef, lending: ServedSocket
) -> None:
    several = np.concatenate([IMAGE, 2 * IMAGE])
    async with await gpu.load(image_model().SerializeToString()) as successor:
        expected = await gpu.run(successor, image=IMAGE)
        running = asyncio.ensure_future(images.run(image=several))
        (session,) = sessions_of(lending)
        while not session.tasks:  # noqa: ASYNC110 - until the server imports it for these dims
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        lending.lend("images", successor)
        await own.close()
        assert same(await running, await gpu.run(successor, image=several))
        assert same(await images.run(image=IMAGE), expected)
        lending.lend("more", successor)
        await gpu_behind(images).ping()  # it comes behind what the client is told
        assert same(await served_model(gpu_behind(images), "more").run(image=IMAGE), expected)
        for name in ("images", "more"):
            lending.lend(name, None)
        with pytest.raises(NotDeployed):
            await images.run(image=IMAGE)
        with pytest.raises(InvalidRequest, match="give loaded models"):
            served_model(gpu_behind(images), "images")
    assert lending.lent.records == {}


async def test_a_model_with_two_names_is_lent_by_one_when_the_other_has_lost_it(
    images: ServedModel, own: Model, gpu: CudnnRef, lending: ServedSocket
) -> None:
    expected = await gpu.run(own, image=IMAGE)
    lending.lend("more", own)
    await gpu_behind(images).ping()  # it comes behind what the client is told
    more = served_model(gpu_behind(images), "more")
    assert same(await more.run(image=IMAGE), expected)
    lending.lend("more", None)
    with pytest.raises(NotDeployed):
        await more.run(image=IMAGE)
    assert same(await images.run(image=IMAGE), expected)


@pytest.mark.parametrize("turns", [0, 1, 2, 4])
async def test_a_run_that_is_withdrawn_is_answered_and_leaves_no_share(
    images: ServedModel, lending: ServedSocket, turns: int
) -> None:
    running = asyncio.ensure_future(images.run(image=IMAGE))
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await gpu_behind(images).drain()
    assert (lending.share.count, lending.share.outstanding_us) == (0, 0.0)
    assert await images.run(image=IMAGE)


async def test_a_run_that_is_withdrawn_ends(
    images: ServedModel, lending: ServedSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(lending.lent, "run", never)
    running = asyncio.ensure_future(images.run(image=IMAGE))
    (session,) = sessions_of(lending)
    while not session.tasks:  # noqa: ASYNC110 - until the server has it
        await asyncio.sleep(0)
    running.cancel()
    await gpu_behind(images).drain(timeout=PATIENCE_S)


async def test_a_client_that_goes_in_a_run_leaves_no_share(
    images: ServedModel, lending: ServedSocket
) -> None:
    running = asyncio.ensure_future(images.run(image=np.concatenate([IMAGE] * 5)))
    (session,) = sessions_of(lending)
    while not session.asked:  # noqa: ASYNC110 - until the server has it
        await asyncio.sleep(0)
    session.end()
    await asyncio.gather(running, *session.tasks, return_exceptions=True)
    await asyncio.sleep(0)  # what a task that has ended calls
    assert (lending.share.count, lending.share.outstanding_us) == (0, 0.0)


async def test_threads_run_it_without_asyncio(lending: ServedSocket, own: Model, gpu: CudnnRef) -> None:
    def use() -> tuple[Arrays, BlockingServedModel]:
        with blocking.connect(lending.path) as attached:
            model = blocking.served_model(attached, "images")
            return model.run(image=IMAGE), model

    found, model = await asyncio.to_thread(use)
    assert same(found, await gpu.run(own, image=IMAGE))
    assert (model.name, model.inputs, model.defaults, model.outputs) == (
        "images",
        own.inputs,
        own.defaults,
        own.outputs,
    )
    assert repr(model) == "<model 'images' of the server>"
