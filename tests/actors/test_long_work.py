"""Blocking work in a thread of its own."""

from __future__ import annotations

import functools

from cudnn_actor.actors.long_work import in_own_thread


async def test_work_may_be_any_callable() -> None:
    assert await in_own_thread(functools.partial(max, 2), 3) == 3
