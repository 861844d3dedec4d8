"""The chaos harness with attached clients: what it would notice."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from cudnn_actor.trials.chaos import attached_program, processes, strikes
from cudnn_actor.trials.chaos.answers import Answers
from cudnn_actor.trials.chaos.attached import AttachedCallers
from cudnn_actor.trials.chaos.faults import FaultKind
from cudnn_actor.trials.chaos.load import Ground
from cudnn_actor.trials.chaos.load_kinds import LoadKind
from cudnn_actor.trials.chaos.oracle import Oracle
from cudnn_actor.trials.chaos.processes import Found
from cudnn_actor.trials.chaos.settings import Settings
from cudnn_actor.trials.chaos.strikes import Striker
from cudnn_actor.trials.chaos.tally import Tally

from ..inside import sessions_of
from ..patience import PATIENCE_S
from .chaos_rigs import Asked, buffer, download


class Alive(NamedTuple):
    alive: bool = True


@pytest.fixture
def tally() -> Tally:
    return Tally()


@pytest.fixture
def callers(tally: Tally, tmp_path: Path) -> AttachedCallers:
    gpu: Any = Alive()
    ground = Ground(
        gpu=gpu,
        answers=Answers(0),
        oracle=Oracle(),
        tally=tally,
        ending=threading.Event(),
        abandoned=threading.Event(),
        problems=(),
    )
    return AttachedCallers(ground, Settings(), tmp_path)


async def test_what_a_client_process_says_is_wrong_is_counted_and_it_may_be_killed_when_it_is_ready(
    callers: AttachedCallers, tally: Tally
) -> None:
    said = asyncio.StreamReader()
    said.feed_data(b"ready\nanother result: 3\n")
    said.feed_eof()
    process: Any = SimpleNamespace(stdout=said, pid=7)
    await callers.hear(process)
    assert callers.victims == {FaultKind.KILL_CLIENT: 7}
    assert (tally.wrong, "another result: 3" in tally.wrongs[0].got) == (1, True)


async def test_a_process_that_ends_by_itself_is_a_mistake(
    callers: AttachedCallers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached_program, "__name__", "sys")  # which has no `main`
    with pytest.raises(RuntimeError, match="the client process has ended by itself, with status 1"):
        await callers.callers()["client"]()


async def test_an_attached_client_that_loses_a_living_service_is_a_mistake(
    callers: AttachedCallers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from cudnn_actor import ServiceStopped, spawn
    from cudnn_actor.attached import serve_socket

    async with spawn(device="cpu", isolation="thread") as gpu, serve_socket(gpu, callers.path) as served:

        async def cut(*_: object) -> None:
            next(iter(sessions_of(served))).end()
            raise ServiceStopped(reason="it was cut")

        monkeypatch.setattr(callers, "run_tasks", cut)
        with pytest.raises(RuntimeError, match="lost a service that goes on"):
            await callers.callers()["attached"]()


class Victims(dict[FaultKind, int]):
    """Notes for which kinds a process was looked for."""

    def __init__(self) -> None:
        self.asked: list[FaultKind] = []

    def get(self, kind: FaultKind, default: Any = None, /) -> Any:
        self.asked.append(kind)
        return super().get(kind, default)


async def test_a_client_that_starts_after_its_turn_is_killed_as_soon_as_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    struck: list[tuple[int, signal.Signals]] = []

    def note(found: Found, number: signal.Signals) -> bool:
        struck.append((found.pid, number))
        return True

    monkeypatch.setattr(processes, "send_signal", note)
    monkeypatch.setattr(strikes, "_PATIENCE_S", 0.0)
    both = (FaultKind.KILL_CLIENT, FaultKind.KILL_SERVER)
    gpu: Any = SimpleNamespace(generation=1, worker_pid=None)
    victims = Victims()
    striker = Striker(gpu, Tally(), Settings(kill_every=0.001, faults=both), victims)
    monkeypatch.setattr(striker.chance, "choices", lambda *_: [FaultKind.KILL_SERVER])
    striking = asyncio.create_task(striker.run())
    async with asyncio.timeout(PATIENCE_S):
        while victims.asked.count(FaultKind.KILL_SERVER) < 4:  # in its turn at most twice  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    victims[FaultKind.KILL_CLIENT] = 7
    async with asyncio.timeout(PATIENCE_S):
        while not struck:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    striking.cancel()
    assert struck[0] == (7, signal.SIGKILL)


def test_answers_of_another_server_say_nothing_of_the_service() -> None:
    tally = Tally()
    tally.begin()
    tally.note_fault(FaultKind.MEMORY)
    for kind, open_faults in ((LoadKind.DOOMED, 1), (LoadKind.ATTACHED, 0)):
        request = Asked()
        tally.note_sent(request, download(buffer(1)), kind, 1, 1)
        tally.note_outcome(request, None)
        assert tally.unrecovered_faults == open_faults
    assert (tally.finished, tally.elsewhere, tally.lives()[0].finished, tally.ended_requests) == (1, 1, 1, 2)
