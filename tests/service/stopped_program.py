"""A process that is stopped in the middle of a request, as a laptop's is; run in a process of its own."""

from __future__ import annotations

import asyncio
import sys

from cudnn_actor.messages import Ping

from .rigs import Gate, Trio, in_thread, isolated, spawn_gated

HANG_AFTER_S = 2.5


async def main(standby: int) -> None:
    """Say when a request is in work, and what has become of it when it may go on."""
    gate = Gate()
    async with spawn_gated(gate, hang_after_s=HANG_AFTER_S, standby=standby) as gpu:
        trio = await Trio.on(gpu)
        await gpu.warm([trio.sum()])
        with gate.closed():
            added = gpu.submit(trio.sum())
            await in_thread(gate.wait_for_arrival)
            say("in work")
            await asyncio.to_thread(sys.stdin.readline)
            await asyncio.sleep(HANG_AFTER_S / 5)  # long enough for a watchdog that counts wrongly
        receipt = await added
        restarts = (await gpu.statistics()).restarts
        say(f"{await trio.result()} {receipt.generation} {await gpu.ask(Ping())} {restarts}")


def say(line: str) -> None:
    sys.stderr.write(f"said {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    with isolated(sys.argv[1]):
        asyncio.run(main(int(sys.argv[2])))
