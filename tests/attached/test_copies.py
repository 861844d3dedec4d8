"""Copies of values that clients want to share are bounded by their bytes; what is over the bound waits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudnn_actor import connect
from cudnn_actor.attached import serve_socket
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec

from ..inside import service_behind, sessions_of
from ..patience import PATIENCE_S
from ..service.rigs import Gate, Trio, in_thread, isolated, spawn_gated
from .conftest import eventually


@pytest.mark.parametrize("rows", [150, 384])  # copied at once, and by a thread
@pytest.mark.parametrize("ends", [False, True])
async def test_copies_over_the_bound_are_made_when_there_is_room(
    tmp_path: Path, rows: int, ends: bool
) -> None:
    gate = Gate()
    values = [np.full((1, 1, rows, 1024), number, np.float32) for number in range(5)]
    spec = TensorSpec.packed(values[0].shape, DType.FLOAT32, Layout.NCHW)
    limit = 2 * spec.nbytes + 100
    with isolated("thread"):
        async with spawn_gated(gate) as gpu, serve_socket(gpu, tmp_path / "s", copies=limit) as served:
            trio = await Trio.on(gpu)
            client = await connect(served.path)
            service: Any = service_behind(client)
            (session,) = sessions_of(served)
            copies = session.copies

            async def two_are_there() -> bool:
                return (copies.nbytes, copies.waiting) == (2 * spec.nbytes, 3)

            with gate.closed():
                first = gpu.submit(trio.product())
                await in_thread(gate.wait_for_arrival)
                sharing = [asyncio.ensure_future(service.share_weight(each, spec)) for each in values]
                async with asyncio.timeout(PATIENCE_S):
                    await eventually(two_are_there)
                if ends:
                    session.end()
            await first
            if not ends:
                refs = await asyncio.gather(*sharing)
                for ref, expected in zip(refs, values, strict=True):
                    assert np.array_equal(await client.download(ref), expected)
                assert (copies.nbytes, copies.waiting) == (0, 0)
            else:
                await asyncio.gather(*sharing, return_exceptions=True)
                assert not session.tasks
            await client.aclose()
            await gpu.drain()
            assert (await gpu.statistics()).live_buffers == 3


async def test_a_copy_larger_than_the_bound_goes_alone(tmp_path: Path) -> None:
    values = np.ones((1, 1, 64, 64), np.float32)
    spec = TensorSpec.packed(values.shape, DType.FLOAT32, Layout.NCHW)
    with isolated("thread"):
        async with spawn_gated(Gate()) as gpu, serve_socket(gpu, tmp_path / "s", copies=1) as served:
            async with connect(served.path) as client:
                service: Any = service_behind(client)
                ref, other = await asyncio.gather(
                    service.share_weight(values, spec), service.share_weight(values + 1, spec)
                )
                assert np.array_equal(await client.download(ref), values)
                assert np.array_equal(await client.download(other), values + 1)
