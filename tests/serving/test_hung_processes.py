"""A serving process that hangs, or has only begun: no client finds there what was before a change."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cudnn_actor.serving import fronts
from cudnn_actor.serving.control_link import ControlLink
from cudnn_actor.serving.front_wire import Begin, Listen, Listens
from cudnn_actor.serving.server import InferenceServer, serve

from .servers import until
from .test_processes import INFER, REQUEST, connections, everywhere, options_for, statuses

pytestmark = pytest.mark.usefixtures("forked_fronts")

LONG_S = 600.0


async def all_answer(server: InferenceServer, status: int) -> None:
    """Require that two processes serve, and that each answers an inference with a status."""
    await until(lambda: len(server.processes) == 2)
    async with connections(server) as clients:
        assert statuses(await everywhere(clients, INFER, **REQUEST)) == {status}


async def test_a_process_that_hangs_is_killed_and_one_that_begins_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fronts, "_ANSWER_S", LONG_S)
    monkeypatch.setattr(fronts, "_LOOK_S", LONG_S)
    withheld: list[tuple[Any, Any]] = []
    take = fronts.Fronts.take

    def take_but(self: fronts.Fronts, front: Any, frame: Any) -> None:
        if isinstance(frame, Listens):
            withheld.append((front, frame))
            os.kill(front.pid, signal.SIGSTOP)
        else:
            take(self, front, frame)

    async with serve(options_for(tmp_path, service={"device": "cpu"})) as server:
        asked = server.host.administration
        # One that hangs while it is told of a change. (If the other one is slow, too, it ends as well.)
        hung = server.processes[0]
        os.kill(hung, signal.SIGSTOP)
        monkeypatch.setattr(fronts, "_ANSWER_S", 0.5)
        await asked.unload("square")
        await until(lambda: hung not in server.processes)
        monkeypatch.setattr(fronts, "_ANSWER_S", LONG_S)
        await all_answer(server, 404)
        # One that listens, which the owner has not heard: clients may reach it, so it must know of a change.
        with monkeypatch.context() as patch:
            patch.setattr(fronts.Fronts, "take", take_but)
            os.kill(server.processes[0], signal.SIGKILL)
            await until(lambda: bool(withheld))
        ((front, listens),) = withheld
        loading = asyncio.ensure_future(asked.load("square"))
        await until(lambda: bool(front.waited_for))
        os.kill(front.pid, signal.SIGCONT)
        await loading
        take(server.fronts, front, listens)  # type: ignore[arg-type]
        await all_answer(server, 200)


async def test_a_process_that_hangs_is_noticed_although_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fronts, "_LOOK_S", 0.0)
    monkeypatch.setattr(fronts, "_ANSWER_S", 1.0)
    async with serve(options_for(tmp_path, service={"device": "cpu"})) as server:
        hung = server.processes[0]
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: hung not in server.processes)
        monkeypatch.setattr(fronts, "_ANSWER_S", LONG_S)
        await all_answer(server, 200)


async def test_a_process_listens_when_it_is_told_to_and_is_killed_if_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fronts, "_ANSWER_S", LONG_S)
    begun: list[Begin] = []
    withheld: list[tuple[ControlLink, Listen]] = []
    send = ControlLink.send

    def send_but(self: ControlLink, frame: Any, descriptors: Any = ()) -> None:
        if isinstance(frame, Begin):
            begun.append(frame)
        if isinstance(frame, Listen):
            withheld.append((self, frame))
        else:
            send(self, frame, descriptors)

    async with serve(options_for(tmp_path, service={"device": "cpu"})) as server:
        monkeypatch.setattr(ControlLink, "send", send_but)
        for each in server.processes:
            os.kill(each, signal.SIGKILL)
        await until(lambda: len(withheld) == 2)
        # Each answers this behind the step in which it has said that it could listen.
        await server.host.administration.statistics("", "")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", server.http_port)
        for link, frame in withheld:
            send(link, frame)
        monkeypatch.setattr(ControlLink, "send", send)
        await all_answer(server, 200)
        with monkeypatch.context() as patch:
            patch.setattr(ControlLink, "send", send_but)
            patch.setattr(fronts, "_START_S", 0.0)
            begun.clear()
            os.kill(server.processes[0], signal.SIGKILL)
            await until(lambda: len(begun) == 2)  # the second in the place of the first
        await all_answer(server, 200)
