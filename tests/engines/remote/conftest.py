from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cudnn_actor.engines.remote import BuilderHost, RemoteBuilder
from cudnn_actor.engines.remote.serving import NAME

from .craft import MAKE, Craft, Stage, wait_for_exit

NewBuilder = Callable[..., RemoteBuilder]


def processes() -> set[str]:
    """The builder processes of this process: forks of its forkservers."""
    ours, found = set(), set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            ours.update((task / "children").read_text().split())
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (place / "comm").read_text() == f"{NAME}\n":
                found.add((place.name, (place / "stat").read_text().rpartition(")")[2].split()[1]))
    return {pid for pid, parent in found if parent in ours}


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = processes()
    yield
    gc.collect()
    for pid in processes() - before:  # its forkserver has yet to reap it
        wait_for_exit(int(pid))


@pytest.fixture
def stage(no_process_is_left: None, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "stage")
    yield stage
    stage.close()


@pytest.fixture
def host() -> Iterator[BuilderHost]:
    """Has a builder process when one is wanted."""
    with BuilderHost() as host:
        yield host


@pytest.fixture
def new_builder(stage: Stage, host: BuilderHost) -> Iterator[NewBuilder]:
    """Opens a builder whose process appears on the stage."""
    builders: list[RemoteBuilder] = []

    def new(
        *arguments: object, make: str = MAKE, access: BuilderHost = host, **options: float
    ) -> RemoteBuilder:
        told = (stage.address, *arguments)
        builder = RemoteBuilder(make, told, Craft(), access, **options)  # type: ignore[arg-type]
        builders.append(builder)
        builder.open()
        return builder

    yield new
    for builder in builders:
        builder.close()


@pytest.fixture
def builder(new_builder: NewBuilder) -> RemoteBuilder:
    return new_builder()


@pytest.fixture
def thread(builder: RemoteBuilder) -> Iterator[ThreadPoolExecutor]:
    """A thread to build on; its builds are over before the builder is closed."""
    with ThreadPoolExecutor(1) as thread:
        yield thread
        builder.interrupt()
