"""Members of a pool that read and compute nothing: each keeps a batch for a given time.

Each is a process of its own, which sleeps for each batch, one after the other. So what a rate depends on is
the process that calls, also on a machine with few cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping
from typing import Any

import numpy as np

from cudnn_actor.actors import Deadline
from cudnn_actor.attached.client.shared_segments import gather_at_once
from cudnn_actor.models import BatchedModel, Feature
from cudnn_actor.models.batch_arrays import Gather, concatenate
from cudnn_actor.models.batch_rules import BatchRules
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.pool.batches import Everywhere
from cudnn_actor.pool.dispatching import Dispatching
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["GATHERS", "timed_endpoint"]

GATHERS: dict[str, Gather] = {"numpy": concatenate, "system": gather_at_once}
"""Functions that copy the pictures of a batch."""

_PROGRAM = """
import socket, sys, time
with socket.socket(fileno=int(sys.argv[1])) as given:
    while batch := given.recv(1):
        time.sleep(float(sys.argv[2]))
        given.send(batch)
"""


class _Member:
    """A process that answers each byte after a given time, and the futures of those answers."""

    def __init__(self, process: asyncio.subprocess.Process, own: socket.socket) -> None:
        self._process, self._own = process, own
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(own, self._answer)

    @classmethod
    async def start(cls, seconds: float) -> _Member:
        """A member that keeps each batch for so long."""
        own, others = socket.socketpair()
        with others:
            arguments = ["-c", _PROGRAM, str(others.fileno()), str(seconds)]
            process = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, pass_fds=[others.fileno()]
            )
        own.setblocking(False)
        return cls(process, own)

    def run(self) -> asyncio.Future[None]:
        """A future that is done once the member has kept a batch for its time."""
        done = self._loop.create_future()
        self._waiting.append(done)
        self._own.send(b"x")
        return done

    def _answer(self) -> None:
        for _ in self._own.recv(64):
            done = self._waiting.popleft()
            if not done.done():
                done.set_result(None)

    async def aclose(self) -> None:
        """End the process, and wait until it has ended."""
        self._loop.remove_reader(self._own)
        self._own.close()
        await self._process.wait()


class _TimedModel(Everywhere):
    """A model whose runs such members answer with zeros."""

    def __init__(self, source: Any, dispatching: Dispatching, members: list[_Member]) -> None:
        self._model, self._dispatching, self._members = source, dispatching, members

    def _kind(self, given: Mapping[str, Any]) -> Hashable:
        return len(next(iter(given.values())))

    async def _sender(
        self,
        given: Mapping[str, BufferRef | np.ndarray],
        deadline: Deadline,
        *,
        again: bool,
        crashes: int,
    ) -> Callable[[int, float | None], Awaitable[dict[str, Any]]]:
        del deadline, again, crashes
        samples = len(next(iter(given.values())))  # type: ignore[arg-type]

        async def work(member: int, _left_s: float | None) -> dict[str, Any]:
            await self._members[member].run()
            return {each.name: np.zeros((samples, *_rest(each)), np.float32) for each in self.outputs}

        return work

    async def reserve(self, _specs: Mapping[str, TensorSpec], _deadline: Deadline) -> Callable[[], None]:
        return lambda: None


def _rest(feature: Feature) -> list[int]:
    return [dim for dim in (feature.dims or ())[1:] if isinstance(dim, int)]


@contextlib.asynccontextmanager
async def timed_endpoint(
    path: Any, members: int, ran_s: float, *, batch: int, gather: Gather
) -> AsyncIterator[BatchedModel]:
    """Batches of a model, as a pool of so many members forms them, of which each runs for `ran_s`. `gather`:
    the function that copies pictures."""
    source = await asyncio.to_thread(OnnxModel, path)
    dispatching = Dispatching(members)
    async with contextlib.AsyncExitStack() as stack:
        timed = list[_Member]()
        for _ in range(members):
            timed.append(await _Member.start(ran_s))
            stack.push_async_callback(timed[-1].aclose)
        for member in range(members):
            dispatching.up(member)
        rules = BatchRules.of(
            source.inputs,
            source.outputs,
            max_batch=batch,
            sizes=None,
            dims=None,
            max_delay_us=2000,
            max_waiting=1 << 16,
            in_flight=2 * members,
        )
        async with BatchedModel(
            _TimedModel(source, dispatching, timed),
            rules,
            quarantined=lambda _digest: False,
            note_batch=lambda _samples: None,
            name=None,
            timeout=None,
            devices=members,
            gather=gather,
        ) as endpoint:
            yield endpoint
