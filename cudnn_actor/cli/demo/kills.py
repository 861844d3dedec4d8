"""The demo's crash: kills the worker process while it works, and measures the effects.

SIGKILL cannot be caught, so the worker cleans nothing up. Everything that survives belongs to the parent
process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence

from cudnn_actor.cli.demo.findings import Kill
from cudnn_actor.cli.demo.recorder import Recorder
from cudnn_actor.protocol import Message, Receipt
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.supervision import Restarted, Restarting

__all__ = ["MOST_KILLS", "kill_at_work"]

MOST_KILLS = 5
"""The most kills in a row. A kill that hits between two requests makes none run again, so it is repeated. The
service gets as many restarts, few enough for one that cannot start to raise `StartFailed` within seconds."""


async def kill_at_work(
    gpu: CudnnRef, recorder: Recorder, messages: Sequence[Message], say: Callable[[str], None], *, step: int
) -> Kill:
    """Send all messages at once, kill the worker in the middle of them, and await every answer.

    If a kill interrupts no request that had begun, it is repeated, and all messages are sent again.

    Parameters
    ----------
    gpu
        A service in process isolation, with at least `MOST_KILLS` restarts.
    recorder
        The recorder, which sends and times the messages; the answer to each is a receipt.
    messages
        Pure requests, with enough work that the rest still runs when a quarter has been answered.
    say
        A function that prints the progress.
    step
        The value of `Kill.step`.

    Raises
    ------
    CudnnActorError
        A request failed.
    """
    before, kills = (await gpu.statistics()).replayed, 0
    while True:
        sent_s = recorder.now_s
        asked = [asyncio.create_task(_ask_timed(recorder, message)) for message in messages]
        first, at_s = await asked[len(asked) // 4]
        # Not at once: a worker that has just answered may have to yield its core to this process. The next
        # quarter takes about as long as the first on this machine, so half that time ends in its middle.
        await asyncio.sleep((at_s - sent_s) / 2)
        in_flight = sum(not task.done() for task in asked)
        if not in_flight:  # this process was not scheduled in time
            continue
        pid, killed_s = _kill(gpu), recorder.now_s
        kills += 1
        say(f"  [red]kill -9 {pid}[/]: the worker process, with {in_flight} requests in flight")
        back = await _back(gpu, first.generation, say)
        answers = await asyncio.gather(*asked)
        later = [at_s for receipt, at_s in answers if receipt.generation > first.generation]
        statistics = await gpu.statistics()
        if (run_again := statistics.replayed - before) or kills == MOST_KILLS:
            break
        say("    the kill hit between two requests, so none had to run again: trying once more")
    return Kill(
        pid=pid,
        killed_s=killed_s,
        kills=kills,
        step=step,
        in_flight=in_flight,
        run_again=run_again,
        generation=back.generation,
        downtime_s=back.downtime_s,
        answered_s=min(later, default=recorder.now_s) - killed_s,
        buffers=statistics.live_buffers,
        nbytes=statistics.live_bytes,
    )


async def _ask_timed(recorder: Recorder, message: Message) -> tuple[Receipt, float]:
    """Ask a message. Returns the receipt, and when it arrived, on the recorder's clock."""
    receipt: Receipt = await recorder.ask(message)
    return receipt, recorder.now_s


def _kill(gpu: CudnnRef) -> int:
    pid = gpu.worker_pid
    assert pid is not None, "it has just answered"
    os.kill(pid, signal.SIGKILL)
    return pid


async def _back(gpu: CudnnRef, generation: int, say: Callable[[str], None]) -> Restarted:
    """Follow the service's events until a successor of this generation serves."""
    async for event in gpu.events():
        match event:
            case Restarting() if event.generation >= generation:
                say(f"  [red]✗ generation {event.generation} is lost[/]: {event.cause.cause}")
            case Restarted() if event.generation > generation:
                when = f"{event.downtime_s * 1e3:.0f} ms later, by {gpu.worker_pid}"
                say(f"  [green]✓ generation {event.generation} serves[/] {when}")
                return event
    raise AssertionError("the service has ended, so its requests have failed")
