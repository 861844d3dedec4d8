"""Members and workers are killed under load: see `chaos`, which runs longer by hand."""

from __future__ import annotations

from cudnn_actor.pool import spawn_pool

from .chaos import chaos


async def test_nothing_is_lost_or_wrong_and_each_is_answered_once() -> None:
    async with spawn_pool(["cpu", "cpu"], isolation="process", max_restarts=100) as pool:
        found = await chaos(pool, seed=1, ends=lambda kills: len(kills) == 2)
    assert set(found.answers) == {"compute", "call", "run", "batched"}
    alone = sum(count for kind, count in found.answers.items() if kind != "batched")
    assert found.finished == alone + found.batches - found.divided
