"""A program that raises at every place in turn where CPython could run a signal's handler in our code.

Run as `python -m tests.service.injection_program ISOLATION ENTRIES [BUFFERS]`; writes what has come of each
entry, with a service of its own, as JSON. The main thread makes one call again and again, of a convolution; a
listener raises at the n-th place (the entry of a function of ours, or the instruction behind a call or a
back-edge) of the n-th call, until calls have no n-th place. After each, another thread must get an answer,
and so must the main thread.

With BUFFERS, each call is a graph with so many, and no other thread asks: so the main thread has the socket.
The entry "alone" needs that: it takes the straight path, as requests of attached processes do.
With "model", each call is a run of a model, from an array to an array. With "upload" and "download", each is
that copy to or from a device, for which the CPU engine's arenas pass. The array that is uploaded is copied
behind its request. With "new", it is uploaded to a new buffer, for which a slot is ready, and which is freed.
"upload here" and "new here" are the same, and the main thread waits for the answer without a turn of its
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import faulthandler
import functools
import json
import logging
import select
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

import cudnn_actor
from cudnn_actor import BufferRef, ConvFwd, ConvSpec, CudnnRef, CudnnService, GraphBuilder, RunGraph
from cudnn_actor.actors import Envelope, LoopBridge
from cudnn_actor.broker.request_checks import check_message
from cudnn_actor.engines import WorkerEngine, choose_engine
from cudnn_actor.messages import (
    Allocate,
    DeployModel,
    Download,
    ModelGraph,
    Ping,
    RunModel,
    UnloadModel,
    Upload,
)
from cudnn_actor.options import make_options
from cudnn_actor.protocol import TensorSpec
from cudnn_actor.protocol.messages.messages import Compute

from ..instructions import functions_in, instructions
from ..isolation.device_engine import __name__ as device_engine
from ..patience import PATIENCE_S
from ..staging_use import segments_in_use

ONES = np.ones(3, np.float32)
LARGE = np.arange(100_000, dtype=np.float32)
_LOOK_MS = 20
"""For how long a look for an answer waits: few looks are many places where a handler may raise."""
_OURS = tuple(f"{cudnn_actor.__path__[0]}/{part}/" for part in ("actors", "broker", "isolation", "processes"))


class Injected(Exception):
    """What a handler would have raised."""


class Injector:
    """Raises at the n-th place of a call in code of ours, or in that of some folders."""

    def __init__(self, *folders: str) -> None:
        self.places = 0
        self.where = ""
        self.files: set[str] = set()
        """The files of ours that it has been in."""
        self._at = 0
        self._functions = functions_in(*(folders or _OURS))
        self._looks: dict[int, frozenset[int]] = {}
        """By the identity of the code, all of which lives as long as its module."""

    def armed(self, at: int) -> contextlib.AbstractContextManager[None]:
        """Have it raise at the `at`-th place, on this thread, while in the block."""
        self.places, self._at, self.where = 0, at, ""
        return instructions(self._functions, self._step)

    def _step(self, code: CodeType, offset: int) -> None:
        looks = self._looks.get(id(code))
        if looks is None:
            looks = self._looks[id(code)] = self._behind(code)
            self.files.add(Path(code.co_filename).name)
        if offset in looks:
            self.places += 1
            if self.places == self._at:
                self.where = f"{code.co_qualname}:{offset}"
                raise Injected

    def _behind(self, code: CodeType) -> frozenset[int]:
        """Offsets of the instructions before which the interpreter has looked at signals."""
        found, last = set(), None
        for step in dis.get_instructions(code):
            if last is not None and (last.opname.startswith("CALL") or last.opname == "RESUME"):
                found.add(step.offset)
            if "JUMP_BACKWARD" in step.opname and isinstance(step.argval, int):
                found.add(step.argval)
            last = step
        return frozenset(found)


def grown(x: BufferRef, w: BufferRef, y: BufferRef, buffers: int) -> Compute:
    """A request that adds 1 to y. A graph reads x and w as often as it takes to name so many buffers."""
    if not buffers:
        return ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2), beta=1.0)
    g, dims = GraphBuilder(), (1, 1, 1, 1)
    refs = {"y": y} | {f"x{number}": (x, w)[number % 2] for number in range(buffers - 2)}
    total, *terms = [g.input(name, dims) for name in refs]
    for number, term in enumerate(terms):
        total = total + term if number % 2 else total - term
    return RunGraph.bind(g.build(updates={"y": total + 1.0}), refs)


async def deployed(gpu: CudnnRef) -> RunModel:
    """A run of a model that gives 1 more than its input."""
    g = GraphBuilder()
    graph = g.build(y=g.input("x", (3,)) + 1.0)
    x, y = await gpu.empty((3,)), await gpu.empty((3,))
    of = ModelGraph(
        name="", graph=graph, buffers=(x, y), specs={"x": x.spec}, inputs={"x": "x"}, outputs={"y": "y"}
    )
    model = await gpu.ask(DeployModel(graphs=(of,)))
    await gpu.ask(RunModel.of(model, {"x": ONES}))  # so that the worker knows it
    return RunModel.of(model, {"x": ONES})


async def copy_of(gpu: CudnnRef, way: str, here: CudnnService | None) -> Upload | Download | Allocate:
    """An upload to a buffer that exists, or to another one, or a download of one. `here`: the service whose
    loop is to wait for the answer."""
    if way == "new":
        await gpu.free(await gpu.upload(LARGE))
    old = await gpu.upload(ONES if way == "download" else np.zeros_like(LARGE)) if way != "new" else None
    if here is not None:
        let_wait_here(here)
    if old is None:
        return Allocate(spec=TensorSpec.packed(LARGE.shape, "float32"), data=LARGE)
    return Upload(dst=old, data=LARGE) if way == "upload" else Download(src=old)


async def check(gpu: CudnnRef, message: Any) -> None:
    """Check that an array has been uploaded, or is; that a model gives what it should, and unload that."""
    if isinstance(message, Allocate):
        new = await gpu.ask(message)
        np.testing.assert_array_equal(await gpu.download(new), LARGE)
        await gpu.free(new)
    elif isinstance(message, Upload):
        np.testing.assert_array_equal(await gpu.download(message.dst), LARGE)
    elif isinstance(message, RunModel):
        np.testing.assert_array_equal((await gpu.ask(message))["y"], 2 * ONES)
        await gpu.ask(UnloadModel(model=message.model))


async def sent_alone(service: CudnnService, message: Any) -> Any:
    """The answer to a request that runs a plan, and is sent as those of attached processes are."""
    future, mailbox = asyncio.get_running_loop().create_future(), service.state.mailbox
    found = check_message(service.state, message, {})
    envelope = Envelope(message, future=future, bridge=LoopBridge.of_running_loop(), found=found)
    if not mailbox.admit_alone(envelope):
        mailbox.admit(envelope)
    return await future


async def free_all(gpu: CudnnRef, refs: Sequence[BufferRef]) -> None:
    """Free buffers."""
    for ref in refs:
        await gpu.free(ref)


def started(isolation: Any, *, host_arenas: bool, device: bool) -> CudnnService:
    """A service on the CPU engine. `device`: whether its worker answers uploads where their values arrive, as
    with a device."""
    choice = choose_engine("cpu", apart=isolation == "process")._replace(host_arenas=host_arenas)
    if device:
        choice = choice._replace(worker=WorkerEngine(f"{device_engine}:DeviceEngine"))
    service = CudnnService(make_options({"device": "cpu", "isolation": isolation}), engine=choice)
    service.launch()
    service.started.result(PATIENCE_S)
    return service


def let_wait_here(service: CudnnService) -> None:
    """Let the loop that has sent a request wait for the answers to its uploads, in few steps."""
    mailbox: Any = service.state.mailbox
    mailbox.loops_may_stay_awake = True
    poll = select.poll()
    poll.register(mailbox.channel.fileno(), select.POLLIN)
    mailbox.owner.looks = functools.partial(poll.poll, _LOOK_MS)


def staging_in_use(service: CudnnService) -> int:
    """Segments of staging memory of which any block is in use, or is among the unused ones twice."""
    mailbox: Any = service.state.mailbox
    staging = mailbox.host.staging
    twice = len(staging.pieces) - len(set(staging.pieces))
    return twice + segments_in_use(staging)


def bytes_taken(service: CudnnService) -> int:
    """Bytes of arenas that are in use."""
    service.state.memory.give_up_ready()
    return sum(arena.nbytes - arena.free.free_bytes for arena in service.state.memory.arenas())


def main(isolation: Any, entry: str, buffers: str = "0") -> dict[str, Any]:
    logging.getLogger("asyncio").setLevel(logging.CRITICAL + 1)
    way, _, here = buffers.partition(" ")
    copies, is_new, of_model = way in ("upload", "download", "new"), way == "new", way == "model"
    service = started(isolation, host_arenas=not copies, device=bool(here))
    gpu, ref, loop = CudnnRef(service), service.actor_ref, asyncio.new_event_loop()
    other = asyncio.new_event_loop()
    thread = threading.Thread(target=other.run_forever, daemon=True)
    thread.start()
    one = np.ones((1, 1, 1, 1), "float32")
    x, w, y = (loop.run_until_complete(gpu.upload(one * value)) for value in (1.0, 1.0, 0.0))
    grow: Any
    if copies:
        grow = loop.run_until_complete(copy_of(gpu, way, service if here else None))
    else:
        grow = loop.run_until_complete(deployed(gpu)) if of_model else grown(x, w, y, int(buffers))
    slots = [service.state.memory.resolve(ref) for ref in (x, w, y)]
    injector, idle = Injector(), threading.Event()

    async def answered(ask: Callable[[], Any]) -> Any:
        # The wait has an end of its own: what asyncio itself loses is no fault of the service.
        done, pending = await asyncio.wait([asyncio.ensure_future(ask())], timeout=0.5)
        for task in pending:
            task.cancel()
        return [task.result() for task in done]

    async def told() -> None:
        gpu.tell(grow)

    async def submitted() -> Any:
        return await gpu.submit(grow)

    entries: dict[str, Callable[[], Any]] = {
        "ref.ask": lambda: ref.ask(grow, timeout=PATIENCE_S),
        "ref.tell": lambda: ref.tell(grow),
        "ask": lambda: loop.run_until_complete(answered(lambda: gpu.ask(grow))),
        "tell": lambda: loop.run_until_complete(answered(told)),
        "submit": lambda: loop.run_until_complete(answered(submitted)),
        "alone": lambda: loop.run_until_complete(answered(lambda: sent_alone(service, grow))),
    }
    call, raised, swallowed, clean, at, calls = entries[entry], 0, 0, 0, 0, 0
    while clean < 3:  # how many places a call has depends on who reads the answer
        at, calls = at + 1, calls + 1
        idle.wait(0.002)  # long enough, mostly, for whoever works to sleep again: he is to be woken
        try:
            with injector.armed(at):
                answers = call()
            loop.run_until_complete(free_all(gpu, answers if is_new else ()))
            clean += not injector.where
            swallowed += bool(injector.where)  # by asyncio, which logs what a callback raises
        except Injected:
            raised += 1
        if buffers == "0":
            asyncio.run_coroutine_threadsafe(gpu.ping(), other).result(PATIENCE_S)
            ref.ask(Ping(), timeout=PATIENCE_S)
        loop.run_until_complete(asyncio.wait_for(gpu.ping(), PATIENCE_S))
    loop.run_until_complete(gpu.drain())
    applied = float(loop.run_until_complete(gpu.download(y)).item())
    loop.run_until_complete(check(gpu, grow))
    if of_model or copies:
        applied = calls - raised - swallowed  # nothing counts them
    statistics = loop.run_until_complete(gpu.statistics())
    outcome = {
        "places": at,
        "calls": calls,
        "raised": raised,
        "swallowed": swallowed,
        "applied": applied,
        "queued": statistics.queued,
        "failed": statistics.failed,
        "live_buffers": statistics.live_buffers,
        "buffers": 3 + 2 * of_model + copies - is_new,
        "bytes_taken": bytes_taken(service) if is_new else 0,
        "restarts": statistics.restarts,
        "staging_in_use": staging_in_use(service) if isolation == "process" else 0,
        "held": sum(slot.users for slot in slots),
        "files": sorted(injector.files),
    }
    service.stop(PATIENCE_S)
    other.call_soon_threadsafe(other.stop)
    thread.join(PATIENCE_S)
    return outcome


if __name__ == "__main__":
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    isolation, entries, *buffers = sys.argv[1:]
    outcomes = {entry: main(isolation, entry, *buffers) for entry in entries.split(",")}
    sys.stdout.write(json.dumps(outcomes) + "\n")
