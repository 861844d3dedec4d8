"""Pools of members on GPUs: two devices where there are two, else two members on one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from cudnn_actor.engines import visible_gpus
from cudnn_actor.errors import StaleBufferError
from cudnn_actor.pool import Pool, moving, spawn_pool

from ..pool.chaos import chaos


@pytest.fixture
def gpus() -> list[str]:
    """The devices of this machine: a look at its files, which no event loop should wait for."""
    found, _ = visible_gpus()
    return [*found]


@pytest.fixture
async def pool(gpus: list[str]) -> AsyncIterator[Pool]:
    async with spawn_pool([*gpus, *gpus][:2], isolation="process", max_restarts=100) as members:
        yield members


async def test_buffers_move_both_ways_between_devices(pool: Pool) -> None:
    values = np.random.default_rng(0).integers(0, 256, 5 << 20, np.uint8)
    for member in (0, 1):
        old = await pool.on(member).upload(values)
        moved = await pool.move(old, to=1 - member)
        assert pool.member_of(moved) == 1 - member
        np.testing.assert_array_equal(await pool.download(moved), values)
        with pytest.raises(StaleBufferError):
            await pool.on(member).download(old)
        back = await pool.move(moved, to=member)
        np.testing.assert_array_equal(await pool.download(back), values)
        await pool.free(back)
    for member in (0, 1):
        assert (await pool.on(member).statistics()).live_buffers == 0
    found = pool.statistics()
    assert found.direct_moves + found.host_moves == 4  # it depends on the machine which


async def test_buffers_go_directly_between_two_members_of_one_gpu(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "DIRECT_BYTES", 0)
    async with spawn_pool([gpus[0]] * 2, isolation="process", max_restarts=100) as pool:
        for values in (
            np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4),
            np.arange(70 << 20, dtype=np.uint8),
        ):
            ref = await pool.on(0).upload(values, layout="NHWC" if values.ndim > 1 else "NCHW")
            for to in (1, 0, 1):
                ref = await pool.move(ref, to=to)
            np.testing.assert_array_equal(await pool.download(ref), values)
            await pool.free(ref)
        for member in (0, 1):
            await pool.on(member).drain()
            found = await pool.on(member).statistics()
            assert found.live_buffers == 0
        assert (pool.statistics().direct_moves, pool.statistics().host_moves) == (6, 0)


@pytest.mark.timeout(100)
async def test_kills_of_members_and_of_workers_lose_nothing(pool: Pool) -> None:
    found = await chaos(pool, 1, lambda kills: kills["member"] >= 2 and kills["worker"] >= 2)
    assert all(found.answers.values())
    assert set(found.answers) == {"compute", "call", "run", "batched"}
