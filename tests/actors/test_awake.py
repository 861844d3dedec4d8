"""A loop that stays awake looks for what is near, and its other callbacks have their turns."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from cudnn_actor.actors.awake import Awake, look_at

LONG_S = 3600.0
_CALLER: ContextVar[str] = ContextVar("_CALLER", default="nobody")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        yield near, far


class Looking:
    """Looks at a socket, from which nobody else reads, until something has come."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._looks = end, look_at(end.fileno())
        self.found: list[bytes] = []
        self.callers: set[str] = set()

    def goes_on(self) -> bool:
        return not self.found

    def look(self) -> bool:
        self.callers.add(_CALLER.get())
        if not self._looks():
            return False
        self.found.append(self._end.recv(16))
        return True


async def test_it_finds_what_comes_without_a_reader_of_the_loop(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    looking = Looking(pair[0])
    Awake(asyncio.get_running_loop()).stay(LONG_S, looking.goes_on, looking.look)
    for _ in range(3):
        await asyncio.sleep(0)  # other callbacks have their turns meanwhile
    assert looking.found == []
    pair[1].send(b"near")
    await asyncio.sleep(0)
    assert looking.found == [b"near"]


async def test_what_it_finds_may_raise(pair: tuple[socket.socket, socket.socket]) -> None:
    loop, looking, raised = asyncio.get_running_loop(), Looking(pair[0]), []
    loop.set_exception_handler(lambda _, facts: raised.append(facts["exception"]))
    error = RuntimeError("of a reader")

    def look() -> bool:
        if not raised:
            raise error
        return looking.look()

    Awake(loop).stay(LONG_S, looking.goes_on, look)
    pair[1].send(b"near")
    for _ in range(3):
        await asyncio.sleep(0)
    assert raised == [error]
    assert looking.found == [b"near"]


async def test_it_looks_in_its_own_context(pair: tuple[socket.socket, socket.socket]) -> None:
    looking, awake = Looking(pair[0]), Awake(asyncio.get_running_loop())
    _CALLER.set("the one who has sent")
    awake.stay(LONG_S, looking.goes_on, looking.look)
    pair[1].send(b"near")
    await asyncio.sleep(0)
    assert looking.found == [b"near"]
    assert looking.callers == {"nobody"}


async def test_a_later_call_says_what_to_look_for(pair: tuple[socket.socket, socket.socket]) -> None:
    earlier, later = Looking(pair[0]), Looking(pair[0])
    awake: Any = Awake(asyncio.get_running_loop())
    awake.stay(LONG_S, earlier.goes_on, earlier.look)
    await asyncio.sleep(0)
    awake.stay(LONG_S, later.goes_on, later.look)
    pair[1].send(b"near")
    await asyncio.sleep(0)
    assert (earlier.found, later.found) == ([], [b"near"])


async def test_one_callback_goes_on_however_often_the_time_ends_between_its_turns() -> None:
    loop: Any = asyncio.get_running_loop()
    awake, looks, time = Awake(loop), [], loop.time()

    def look() -> bool:
        looks.append(time)
        return True  # so each callback looks once in a turn

    loop.time = lambda: time
    try:
        for _ in range(20):
            awake.stay(LONG_S, lambda: True, look)
            await asyncio.sleep(0)
            time += 2 * LONG_S  # another callback has taken so long
        awake.stay(LONG_S, lambda: True, look)
        looks.clear()
        await asyncio.sleep(0)
        assert len(looks) == 1
    finally:
        time += 2 * LONG_S
        await asyncio.sleep(0)
        del loop.time


async def test_other_callbacks_have_their_turns_once_a_look_has_taken_all_the_time() -> None:
    loop: Any = asyncio.get_running_loop()
    looks, time = [], loop.time()

    def look() -> bool:
        nonlocal time
        time += 2 * LONG_S  # another thread has had the lock
        looks.append(time)
        return False

    loop.time = lambda: time
    try:
        Awake(loop).stay(LONG_S, lambda: True, look)
        await asyncio.sleep(0)
        assert len(looks) == 1
    finally:
        time += 2 * LONG_S
        await asyncio.sleep(0)
        del loop.time


async def test_what_it_finds_has_the_next_turn(pair: tuple[socket.socket, socket.socket]) -> None:
    """A callback of the loop that only ends the looking would hold it up."""
    loop: Any = asyncio.get_running_loop()
    looking, called = Looking(pair[0]), list[object]()
    call_soon = loop.call_soon

    def noting(callback: Any, *args: Any, **named: Any) -> Any:
        called.append(callback)
        return call_soon(callback, *args, **named)

    awake = Awake(loop)
    pair[1].send(b"near")
    loop.call_soon = noting
    try:
        awake.stay(LONG_S, looking.goes_on, looking.look)
        await asyncio.sleep(0)
    finally:
        del loop.call_soon
    assert looking.found == [b"near"]
    assert len([each for each in called if getattr(each, "__self__", None) is awake]) == 1
    assert not awake.stays
