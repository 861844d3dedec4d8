"""Between the owner and a serving process, something cannot be sent or taken: no client waits for ever."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cudnn_actor.processes import frames
from cudnn_actor.processes.interpreter import start_module
from cudnn_actor.serving import fronts
from cudnn_actor.serving.control_link import ControlLink
from cudnn_actor.serving.failures import NotServed
from cudnn_actor.serving.front_wire import AddRegion
from cudnn_actor.serving.fronts import FrontAdministration
from cudnn_actor.serving.server import InferenceServer, serve

from .servers import PATIENCE_S, until
from .test_processes import BY_REGION, INFER, connections, everywhere, options_for, statuses

pytestmark = pytest.mark.usefixtures("forked_fronts")

UNSENDABLE = "\ud800"


@pytest.fixture
def key() -> Iterator[str]:
    """The name of a file of shared memory with the numbers 3, 4 and 5."""
    path = Path(f"/dev/shm/cudnn_actor_test_links_{os.getpid()}")
    path.write_bytes(np.array([3, 4, 5], np.float32).tobytes())
    yield path.name
    path.unlink()


async def test_a_request_whose_answer_cannot_be_sent_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_long(_: FrontAdministration, **_given: Any) -> list[str]:
        return ["x" * 60_000]

    async def error_with_such_facts(_: FrontAdministration, **_given: Any) -> None:
        raise NotServed(model=UNSENDABLE, version="", problem="is unknown")

    async def error_with_long_facts(_: FrontAdministration, **_given: Any) -> None:
        raise NotServed(model="x" * 60_000, version="", problem="is unknown")

    async def error_with_such_text(_: FrontAdministration) -> None:
        raise RuntimeError(UNSENDABLE)

    monkeypatch.setattr(FrontAdministration, "index", too_long)
    monkeypatch.setattr(FrontAdministration, "unload", error_with_such_facts)
    monkeypatch.setattr(FrontAdministration, "regions", error_with_long_facts)
    monkeypatch.setattr(FrontAdministration, "metrics", error_with_such_text)
    async with (
        serve(options_for(tmp_path, service={"device": "cpu"})) as server,
        connections(server) as (client, *_),
    ):
        monkeypatch.setattr(frames, "LONGEST", 50_000)
        asked = [
            client.post("/v2/repository/index"),
            client.post("/v2/repository/models/square/unload"),
            client.get("/v2/systemsharedmemory/status"),
            client.get("/metrics"),
        ]
        for each, said in zip(asked, ("a frame of", "is unknown", "model 'xxx", "?"), strict=True):
            answer = await each
            assert answer.status_code == 500
            assert said in answer.json()["error"]


async def all_have_the_region(server: InferenceServer) -> None:
    """Require that two processes serve, and that each has the region."""
    await until(lambda: len(server.processes) == 2)
    async with connections(server) as clients:
        assert statuses(await everywhere(clients, INFER, **BY_REGION)) == {200}


async def test_a_process_that_a_region_cannot_reach_is_replaced_by_one_that_has_it(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cudnn_actor.serving.fronts._ANSWER_S", PATIENCE_S)  # it is no hang that ends it
    refused: list[AddRegion] = []
    send = ControlLink.send

    def send_but_one(self: ControlLink, frame: Any, descriptors: Sequence[int] = ()) -> None:
        if isinstance(frame, AddRegion) and not refused:
            refused.append(frame)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        send(self, frame, descriptors)

    async with serve(options_for(tmp_path, service={"device": "cpu"})) as server:
        asked = server.host.administration
        # It can take no descriptor.
        full, _ = server.processes
        _, hard = resource.prlimit(full, resource.RLIMIT_NOFILE)
        resource.prlimit(full, resource.RLIMIT_NOFILE, (3, hard))
        async with asyncio.timeout(PATIENCE_S / 2):
            await asked.register("here", key, 0, 12)
        await until(lambda: full not in server.processes)
        await all_have_the_region(server)
        # It cannot be sent one, while it serves, and when it has begun.
        await asked.unregister("here")
        monkeypatch.setattr(ControlLink, "send", send_but_one)
        async with asyncio.timeout(PATIENCE_S / 2):
            await asked.register("here", key, 0, 12)
        await all_have_the_region(server)
        assert refused.pop().number  # all are there: the next one is the one that is killed
        os.kill(server.processes[0], signal.SIGKILL)
        await until(lambda: bool(refused))
        assert not refused[0].number
        await all_have_the_region(server)


async def test_a_child_that_is_forked_while_a_process_starts_has_not_its_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []
    statuses_of_children: list[int] = []

    def noted_pair() -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair()
        ends.append(ours.fileno())
        return ours, theirs

    def start_behind_a_fork(*given: Any, **options: Any) -> Any:
        if not (child := os.fork()):
            try:
                os.fstat(ends[0])
            except OSError:
                os._exit(0)
            os._exit(1)
        statuses_of_children.append(os.waitpid(child, 0)[1])
        return start_module(*given, **options)

    async with serve(options_for(tmp_path, service={"device": "cpu"})) as server:
        monkeypatch.setattr(fronts, "socket", SimpleNamespace(socketpair=noted_pair))
        monkeypatch.setattr(fronts, "start_module", start_behind_a_fork)
        os.kill(server.processes[0], signal.SIGKILL)
        await until(lambda: bool(statuses_of_children))
        assert statuses_of_children == [0]
        await until(lambda: len(server.processes) == 2)
