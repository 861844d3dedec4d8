"""Buffers of members: requests go where they are, and they move."""

from __future__ import annotations

import numpy as np
import pytest

from cudnn_actor.errors import InvalidRequest, OutOfMemory, ServiceStopped, StaleBufferError
from cudnn_actor.messages import Fill
from cudnn_actor.operations import MaxPool, Window
from cudnn_actor.pool import Pool, spawn_pool
from cudnn_actor.protocol.errors import StaleReason
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout

from .conftest import is_back, kill, product, some

POOLED = Window.symmetric(2, size=2, stride=2)


async def test_what_is_applied_runs_where_its_references_are(pool: Pool) -> None:
    w, x = some(8, 8, seed=1), some(4, 8)
    weights = await pool.upload(w)
    for member in (1, 0):
        ref = await pool.on(member).upload(x)
        y = await pool.apply(product(), x=ref, w=weights)
        assert pool.member_of(y) == pool.member_of(ref) == member
        np.testing.assert_allclose(await pool.download(y), np.maximum(x @ w, 0), rtol=1e-5, atol=1e-5)
        await pool.free(y)
        with pytest.raises(StaleBufferError):
            await pool.download(y)
    image = some(1, 1, 4, 4)
    anywhere = await pool.upload(image)
    largest = await pool.apply(MaxPool(x=anywhere, window=POOLED))
    at = pool.member_of(largest)
    assert pool.statistics().members[at].finished == 1
    expected = image.reshape(2, 2, 2, 2).max((1, 3)).reshape(1, 1, 2, 2)
    np.testing.assert_array_equal(await pool.download(largest), expected)
    again = await pool.apply(MaxPool(x=anywhere, y=largest, window=POOLED))
    assert again == largest
    with pytest.raises(InvalidRequest, match="overwritten on one member alone"):
        await pool.apply(MaxPool(x=largest, y=anywhere, window=POOLED))


async def test_references_of_two_members_are_refused_by_name(pool: Pool) -> None:
    x, w = await pool.on(0).upload(some(4, 8)), await pool.on(1).upload(some(8, 8))
    with pytest.raises(
        InvalidRequest, match=r"w=.* is a buffer of pool-1, and x is one of pool-0"
    ) as refused:
        await pool.apply(product(), x=x, w=w)
    assert "pool.move(w, to=0)" in str(refused.value)
    y = await pool.apply(product(), x=x, w=await pool.move(w, to=0))
    assert pool.member_of(y) == 0


async def test_a_buffer_moves_with_its_values_and_the_old_reference_ends(pool: Pool) -> None:
    await moves(pool, Layout.NCHW, DType.FLOAT32)
    await moves(pool, Layout.NHWC, DType.BFLOAT16)


async def moves(pool: Pool, layout: Layout, dtype: DType) -> None:
    values = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5) % 100
    old = await pool.on(0).upload(values, layout=layout, dtype=dtype)
    new = await pool.move(old, to=1)
    assert (new.spec, pool.member_of(new)) == (old.spec, 1)
    np.testing.assert_array_equal((await pool.on(1).download(new)).astype(np.float32), values)
    with pytest.raises(StaleBufferError) as stale:
        await pool.on(0).download(old)
    assert stale.value.reason is StaleReason.FREED
    with pytest.raises(StaleBufferError):
        await pool.move(old, to=1)
    assert await pool.move(new, to=1) is new  # it is there
    back = await pool.move(new, to=0)
    assert pool.member_of(back) == 0
    assert back != old  # a generation of its own
    assert (await pool.on(1).statistics()).live_buffers == 0
    await pool.free(back)


async def test_requests_before_a_move_are_in_what_is_moved(pool: Pool) -> None:
    y = await pool.on(0).upload(np.zeros(4, np.float32))
    filling = pool.on(0).submit(Fill(dst=y, value=7))
    moved = await pool.move(y, to=1)
    await filling
    np.testing.assert_array_equal(await pool.download(moved), np.full(4, 7, np.float32))


async def test_a_buffer_that_has_no_room_elsewhere_stays(pool: Pool) -> None:
    async with spawn_pool(["cpu", "cpu"], memory_limit=4 << 20) as small:
        await small.on(1).empty((3 << 20,), dtype="uint8")
        ref = await small.on(0).upload(np.ones(3 << 20, np.uint8))
        with pytest.raises(OutOfMemory):
            await small.move(ref, to=1)
        assert (await small.download(ref)).all()
        assert small.member_of(ref) == 0


async def test_buffers_of_a_member_that_has_ended_are_nowhere(pool: Pool) -> None:
    ref = await pool.on(0).upload(some(4))
    kill(pool, 0)
    with pytest.raises((ServiceStopped, StaleBufferError)):  # the first while its end is not noticed
        await pool.move(ref, to=1)
    await is_back(pool, 0, 2)
    with pytest.raises(StaleBufferError):
        await pool.move(ref, to=1)
    with pytest.raises(InvalidRequest):
        await pool.move(await pool.on(1).upload(some(4)), to=2)
    with pytest.raises(InvalidRequest):
        pool.member_of(await pool.upload(some(4)))  # type: ignore[arg-type]
