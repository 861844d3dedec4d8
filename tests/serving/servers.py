"""Models for the tests, and servers of their own: in this process, or in one of their own."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Final

import gevent
import grpc.aio
import onnx

from cudnn_actor.isolation.process.child.main import NAME

from ..forked_programs import Program
from ..onnx.small_models import FLOAT, model_of, node
from ..patience import PATIENCE_S

__all__ = [
    "PATIENCE_S",
    "PLAIN",
    "descendants",
    "name_of",
    "running",
    "square_model",
    "until",
    "workers_of",
    "write_square",
]


def _begin_grpc() -> asyncio.AbstractEventLoop:
    """Have gRPC begin on an event loop, which it wants to exist, and which stays: gRPC wakes it up."""
    loop = asyncio.new_event_loop()

    async def begin() -> None:
        grpc.aio.init_grpc_aio()

    loop.run_until_complete(begin())
    return loop


# What these have open, they have for as long as the process lives: tritonclient's loop over HTTP, and what
# looks after the shared memory that it makes; and gRPC's thread, whose end an event loop would wait for.
_GRPC_LOOP = _begin_grpc()
resource_tracker.ensure_running()
gevent.get_hub().loop.update_now()


PLAIN: Final[Any] = {"trust_env": False, "verify": False, "timeout": PATIENCE_S}
"""For a client of httpx without TLS: else each client reads the machine's certificates, which takes 20 ms."""


def square_model() -> onnx.ModelProto:
    """Numbers of (N, 3), squared."""
    dims = {"x": (FLOAT, ("N", 3))}
    return model_of([node("Mul", "x x", "y")], dims, {"y": (FLOAT, ("N", 3))})


def write_square(folder: Path, name: str = "square") -> Path:
    path = folder / f"{name}.onnx"
    onnx.save(square_model(), path)
    return path


@contextlib.contextmanager
def running(
    *words: str, program: Sequence[str] = ("-m", "cudnn_actor.cli"), **options: Any
) -> Iterator[tuple[Program, dict[str, int]]]:
    """`cudnn-actor serve` in a process of its own, and the ports that it says it listens on.

    `program`: what the interpreter runs. `options` are those of `Program`.
    """
    command = [*program, "serve", *words, "--device", "cpu"]
    with Program(command, stdout=subprocess.PIPE, spare=True, **options) as process:
        try:
            said = process.stdout.readline().removeprefix("serving: ").strip()
            assert said, f"it has ended with {process.wait(PATIENCE_S)}"
            words_of = [part.split(" on ") for part in said.split(", ")]
            yield process, {face.lower(): int(at.rpartition(":")[2]) for face, at in words_of}
        finally:
            process.kill()


_ENDED = (FileNotFoundError, ProcessLookupError)
"""What /proc says of a process that has ended: where its file is opened, and where an open one is read."""


def workers_of(pid: int) -> list[int]:
    """The process ids of the workers of a server's process: of the one that serves, and of a standby."""
    return [each for each in descendants(pid) if name_of(each) == NAME]


def descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(*_ENDED):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from descendants(child)


def name_of(pid: int) -> str:
    with contextlib.suppress(*_ENDED):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until a condition holds, which nothing tells of."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)  # other processes, which start or end, have the processor meanwhile
