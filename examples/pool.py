"""Two services behind one handle: one of their processes is killed, and no caller sees an error.

python examples/pool.py [DEVICE ...]
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import numpy as np

from cudnn_actor import GraphBuilder
from cudnn_actor.pool import Pool, spawn_pool
from cudnn_actor.supervision import Restarted

g = GraphBuilder()
layer = g.build(y=g.relu(g.matmul(g.input("x", (32, 256)), g.input("w", (256, 256)))))


async def main() -> None:
    """Have eight callers send requests, and kill a member's process under them."""
    async with spawn_pool(sys.argv[1:] or ["cpu", "cpu"]) as pool:
        weights = await pool.upload(np.eye(256, dtype=np.float32))  # on each member; only read
        await asyncio.gather(kill_one(pool), *(caller(pool, weights) for _ in range(8)))
        for member in pool.statistics().members:
            print(f"{member.name} on {member.device}: replaced {member.restarts} times")
        print(f"answered: {sum(member.finished for member in pool.statistics().members)}")


async def caller(pool: Pool, weights: object) -> None:
    """Send forty requests, one after the other, and check each answer."""
    for number in range(40):
        x = np.full((32, 256), number, np.float32)
        assert np.array_equal(await pool.compute(layer, x=x, w=weights), x)


async def kill_one(pool: Pool) -> None:
    """Kill the first member's process once the others have begun, and wait until it is back."""
    await pool.compute(layer, x=np.ones((32, 256), np.float32), w=np.eye(256, dtype=np.float32))
    os.kill(pool.statistics().members[0].pid or 0, signal.SIGKILL)
    async for event in pool.events():
        if isinstance(event, Restarted):
            return


if __name__ == "__main__":
    asyncio.run(main())
