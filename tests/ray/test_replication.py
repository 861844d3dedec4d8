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
