"""The chaos harness with attached clients: what it would notice."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from cudnn_actor.trials.chaos import attached_program
from cudnn_actor.trials.chaos.answers import Answers
from cudnn_actor.trials.chaos.attached import AttachedCallers
from cudnn_actor.trials.chaos.load import Ground
from cudnn_actor.trials.chaos.oracle import Oracle
from cudnn_actor.trials.chaos.settings import FaultKind, LoadKind, Settings
from cudnn_actor.trials.chaos.tally import Tally

from .chaos_rigs import Asked, buffer, download


class Alive(NamedTuple):
    alive: bool = True


@pytest.fixture
def callers(tmp_path: Path) -> AttachedCallers:
    gpu: Any = Alive()
    ground = Ground(
        gpu=gpu,
        answers=Answers(0),
        oracle=Oracle(),
        tally=Tally(),
        ending=threading.Event(),
        abandoned=threading.Event(),
        problems=(),
    )
    return AttachedCallers(ground, Settings(), tmp_path)


async def test_what_a_client_process_says_is_wrong_is_counted_and_it_may_be_killed_when_it_is_ready(
    callers: AttachedCallers,
) -> None:
    said = asyncio.StreamReader()
    said.feed_data(b"ready\nanother result: 3\n")
    said.feed_eof()
    process: Any = SimpleNamespace(stdout=said, pid=7)
    await callers._hear(process)
    assert callers.victims == {FaultKind.KILL_CLIENT: 7}
    tally = callers._ground.tally
    assert (tally.wrong, "another result: 3" in tally.wrongs[0].got) == (1, True)


async def test_a_process_that_ends_by_itself_is_a_mistake(
    callers: AttachedCallers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached_program, "__name__", "sys")  # which has no `main`
    with pytest.raises(RuntimeError, match="the client process has ended by itself, with status 1"):
        await callers._keep_a_client()


async def test_an_attached_client_that_loses_a_living_service_is_a_mistake(
    callers: AttachedCallers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from cudnn_actor import ServiceStopped, spawn
    from cudnn_actor.attached import serve_socket

    async with spawn(device="cpu", isolation="thread") as gpu, serve_socket(gpu, callers.path) as served:

        async def cut(*_: object) -> None:
            next(iter(served._sessions)).end()
            raise ServiceStopped(reason="it was cut")

        monkeypatch.setattr(callers, "_run_tasks", cut)
        with pytest.raises(RuntimeError, match="lost a service that goes on"):
            await callers._attached()


def test_answers_of_another_server_say_nothing_of_the_service() -> None:
    tally = Tally()
    tally.begin()
    tally.note_fault(FaultKind.MEMORY)
    for kind, open_faults in ((LoadKind.DOOMED, 1), (LoadKind.ATTACHED, 0)):
        request = Asked()
        tally.sent(request, download(buffer(1)), kind, 1, 1)
        tally.ended(request, None)
        assert tally.unrecovered == open_faults
    assert (tally.finished, tally.elsewhere, tally.lives()[0].finished, tally.answered) == (1, 1, 1, 2)
