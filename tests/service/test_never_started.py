"""A service that is made and never started holds nothing; one that is dropped while it runs is told of."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from cudnn_actor import CudnnRef, child_spec, spawn, start
from cudnn_actor.errors import NoEventLoop
from cudnn_actor.isolation.selection import isolation_for
from cudnn_actor.messages import Ping
from cudnn_actor.options import Isolation, make_options
from cudnn_actor.service.engine_choice import engine_for
from cudnn_actor.supervision import Stopped

from ..inside import service_behind
from ..patience import PATIENCE_S


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("make", [spawn, child_spec])
def test_one_that_is_dropped_leaves_no_descriptor(make: Callable[..., object]) -> None:
    gc.collect()
    before = descriptors()
    for _ in range(10):
        made = make(device="cpu", isolation="process")
        del made
    gc.collect()
    assert descriptors() <= before


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_isolation_whose_first_life_has_not_begun_can_end(isolation: str) -> None:
    options = make_options({"device": "cpu", "isolation": isolation})
    isolation_for(options, engine_for(options)).end()


@pytest.mark.parametrize("library", [None, "trio"])
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_one_that_is_awaited_without_asyncio_starts_nothing(
    library: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = types.SimpleNamespace(thread_local=types.SimpleNamespace(name=library))
    monkeypatch.setitem(sys.modules, "sniffio", running)
    before = set(threading.enumerate())
    for awaited in (spawn(device=device).__await__(), spawn(device=device).__aenter__()):
        with pytest.raises(NoEventLoop, match=r"asyncio\.run") as raised:
            awaited.send(None)  # as trio does
        assert raised.value.library == library
    assert set(threading.enumerate()) == before


async def test_one_that_is_dropped_while_it_runs_gives_a_warning() -> None:
    kept = [await spawn(device="cpu", name="left")]
    actor = kept[0].actor_ref
    with pytest.warns(ResourceWarning, match=r"unclosed service 'left': .*await gpu\.aclose\(\)"):
        kept.clear()
    assert actor.ask(Ping()) == 1, "it goes on for code that holds its actor's reference"
    actor.stop()


async def test_one_that_is_closed_and_dropped_gives_none() -> None:
    gpu = await spawn(device="cpu")
    await gpu.aclose()
    async with spawn(device="cpu"):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del gpu
        gc.collect()


async def test_one_that_is_dropped_when_its_events_end_gives_none() -> None:
    """Code that reads the events gets the last one before the service has done all that its end takes."""
    gpu = await spawn(device="cpu")
    service, actor = service_behind(gpu), gpu.actor_ref
    handle = [gpu]
    del gpu
    told: list[warnings.WarningMessage] = []
    read = service.events.append

    def append(event: Any) -> None:
        read(event)
        if isinstance(event, Stopped) and event.child is None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                handle.clear()
            told.extend(caught)

    service.events.append = append
    actor.stop()
    service.stopped.result(PATIENCE_S)
    assert not handle
    assert told == []


def test_a_request_that_is_awaited_without_asyncio_is_not_admitted() -> None:
    service = start(device="cpu")
    try:
        with pytest.raises(NoEventLoop):
            CudnnRef(service).ping().send(None)
    finally:
        service.stop(10)


def test_one_that_is_used_says_how_to_start_it() -> None:
    never_started: Any = spawn(device="cpu")
    with pytest.raises(AttributeError, match=r"no 'upload' .* use `async with spawn"):
        never_started.upload()
    with pytest.raises(TypeError, match="plain `with`: use `async with spawn"), never_started:
        pass


def test_one_that_is_run_in_place_of_a_coroutine_says_what_to_write() -> None:
    never_started = spawn(device="cpu")
    assert repr(never_started) == (
        "<the result of spawn(), which starts a service when it is awaited: inside an `async def`, "
        "use `async with spawn(...) as gpu`, or `gpu = await spawn(...)`>"
    )


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_start_does_not_look_for_a_folder_of_temporary_files_on_the_event_loop(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's first look writes a file to each folder that it tries."""
    threads, look = [], tempfile.gettempdir

    def noted() -> str:
        threads.append(threading.current_thread())
        return look()

    monkeypatch.setattr(tempfile, "gettempdir", noted)
    async with spawn(device="cpu", isolation=isolation) as gpu:
        await gpu.ping()
    assert threading.main_thread() not in threads
