"""What all replicas are to have, while none is up: without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import pytest
import ray

from cudnn_actor import InvalidRequest
from cudnn_actor.ray.held import Held, Recipe
from cudnn_actor.ray.replication import Replication

from ..patience import PATIENCE_S


async def test_what_is_dropped_is_waited_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda _: object())
    replication = Replication(lambda _: contextlib.nullcontext(), lambda: None, within_s=PATIENCE_S)
    held, recipe = Held(pool="pool", number=1), cast("Recipe", object())
    replication.held[held] = earlier = cast("Any", object())
    swapping = asyncio.ensure_future(replication.swap(held, recipe))
    async with asyncio.timeout(PATIENCE_S):
        while replication.held[held] is earlier:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)
    assert not swapping.done(), "no replica is up"
    await replication.drop(held)
    with pytest.raises(InvalidRequest, match="is nothing that this pool has"):
        await asyncio.wait_for(swapping, PATIENCE_S)


class Life:
    """The life of a replica whose copies are made once `goes_on` is set."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.makes, self.goes_on = asyncio.Event(), asyncio.Event()

    async def request(self, method: str, *_: object) -> None:
        """Take a request of the pool."""
        self.asked.append(method)
        if method != "drop":
            self.makes.set()
            await self.goes_on.wait()


class Replica:
    """A replica that is up."""

    number, name, reachable = 0, "pool-0", True

    def __init__(self) -> None:
        self.life, self.has, self.preparing = Life(), dict[int, object](), asyncio.Lock()


async def test_what_is_dropped_while_its_first_copy_is_made_is_waited_for_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "put", lambda _: object())
    replication = Replication(lambda _: contextlib.nullcontext(), lambda: None, within_s=PATIENCE_S)
    replica, held = Replica(), Held(pool="pool", number=1)
    replication.members = cast("Any", (replica,))
    adding = asyncio.ensure_future(replication.add(held, cast("Recipe", object())))
    async with asyncio.timeout(PATIENCE_S):
        await replica.life.makes.wait()
    await replication.drop(held)
    replica.life.goes_on.set()
    with pytest.raises(InvalidRequest, match="is nothing that this pool has"):
        await asyncio.wait_for(adding, PATIENCE_S)
    assert (replica.life.asked, replica.has) == (["make", "drop"], {})
