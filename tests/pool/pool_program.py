"""A process that has a pool, until it is killed. It prints the process id of its member."""

from __future__ import annotations

import asyncio
import signal

from cudnn_actor.pool import spawn_pool

from ..patience import PATIENCE_S


async def serve() -> None:
    """Start the pool, say so, and wait."""
    async with spawn_pool(["cpu"]) as pool:
        print(pool.statistics().members[0].pid, flush=True)  # noqa: T201
        await asyncio.Event().wait()


if __name__ == "__main__":
    signal.alarm(PATIENCE_S)
    asyncio.run(serve())
