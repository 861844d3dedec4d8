from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cudnn_actor.engines.remote import RemoteBuilder

from .craft import MAKE, Craft, Stage

NewBuilder = Callable[..., RemoteBuilder]


def processes() -> set[str]:
    """The children of this process, zombies too."""
    tasks = Path("/proc/self/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text().split()}


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = processes()
    yield
    gc.collect()
    assert processes() <= before


@pytest.fixture
def stage(no_process_is_left: None, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "stage")
    yield stage
    stage.close()


@pytest.fixture
def new_builder(stage: Stage) -> Iterator[NewBuilder]:
    """Opens a builder whose children appear on the stage."""
    builders: list[RemoteBuilder] = []

    def new(*arguments: object, make: str = MAKE, **options: float) -> RemoteBuilder:
        told = (stage.address, *arguments)
        builder = RemoteBuilder(make, told, Craft(), **options)  # type: ignore[arg-type]
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
