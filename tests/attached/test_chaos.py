"""Kills of clients, of the worker and of the server: nothing is lost, wrong or left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import numpy as np

from cudnn_actor import CudnnRef, ServiceStopped, connect, spawn
from cudnn_actor.attached import serve_socket

from .client_program import W, X
from .conftest import client_process, eventually, said_by

SEED = 20261127


async def kill_worker(gpu: CudnnRef) -> None:
    """Kill the worker that serves, and wait until its successor has answered what was running: a request that
    is running at two crashes is quarantined."""
    before = gpu.generation
    assert gpu.worker_pid is not None
    os.kill(gpu.worker_pid, signal.SIGKILL)

    async def replaced() -> bool:
        return gpu.generation > before and gpu.ready

    await eventually(replaced)
    await gpu.ping()  # it waits until the request that was running has run alone


async def test_clients_are_killed_and_the_worker_too_and_others_get_right_answers(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    async with (
        spawn(device="cpu", isolation="process", max_restarts=20) as gpu,
        serve_socket(gpu, tmp_path / "s") as served,
        client_process("work", served.path, 120) as one,
        client_process("work", served.path, 120) as two,
    ):
        for step in rng.sample(("client", "worker", "client", "worker"), 4):
            if step == "worker":
                await kill_worker(gpu)
            else:
                async with client_process("hold", served.path) as victim:
                    victim.kill()
        for process in (one, two):  # each has compared every result of its own
            assert await said_by(process) == "done\n", f"seed {SEED}"

        async def nothing_is_left() -> bool:
            return served.clients == 0 and (await gpu.statistics()).live_buffers == 0

        await eventually(nothing_is_left)
        assert (await gpu.statistics()).restarts == 2


async def test_a_killed_server_ends_its_clients_and_a_new_one_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with client_process(path, module="server_program") as server:
        client = await connect(path)
        x, w = await client.upload(X), await client.upload(W)
        pending = [asyncio.ensure_future(client.conv_fwd(x, w)) for _ in range(20)]
        await asyncio.sleep(0)  # they are sent
        server.kill()
        outcomes = await asyncio.gather(*pending, return_exceptions=True)
        assert {type(each) for each in outcomes if isinstance(each, BaseException)} <= {type(stopped())}
        with contextlib.suppress(ServiceStopped):
            while True:
                await client.ping()
        assert not client.alive
        await client.aclose()
    async with client_process(path, module="server_program"), connect(path) as again:
        assert np.array_equal(await again.download(await again.upload(X)), X)


def stopped() -> ServiceStopped:
    """The error that mailboxes raise: it is pykka's, too."""
    from cudnn_actor.actors import ActorStopped

    return ActorStopped(reason="")
