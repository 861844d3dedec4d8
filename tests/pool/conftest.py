"""A pool of two members on the CPU, which the tests of a module share: a start costs processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import numpy as np
import pytest

from cudnn_actor import GraphBuilder
from cudnn_actor.pool import MemberState, Pool, spawn_pool
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.supervision import Restarted


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    async with spawn_pool(["cpu", "cpu"], max_restarts=20) as members:
        yield members


def product(rows: int = 4) -> Graph:
    """y = relu(x @ w)."""
    g = GraphBuilder()
    return g.build(y=g.relu(g.matmul(g.input("x", (rows, 8)), g.input("w", (8, 8)))))


def some(*dims: int, seed: int = 0) -> np.ndarray:
    """Random values, float32."""
    return np.random.default_rng(seed).standard_normal(dims).astype(np.float32)


def send(pool: Pool, member: int, number: signal.Signals) -> None:
    """Send a signal to a member's process, which runs now."""
    pid = pool.statistics().members[member].pid
    assert pid is not None
    os.kill(pid, number)


def kill(pool: Pool, member: int) -> None:
    """Kill a member's process, which runs now."""
    send(pool, member, signal.SIGKILL)


async def is_back(pool: Pool, member: int, generation: int) -> None:
    """Wait until a member has been restarted for this incarnation."""
    name = pool.statistics().members[member].name
    async for event in pool.events():
        if isinstance(event, Restarted) and event.child == name and event.generation >= generation:
            break
    while pool.statistics().members[member].state is not MemberState.UP:  # noqa: ASYNC110 - in the next turn
        await asyncio.sleep(0)
