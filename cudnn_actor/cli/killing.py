"""The demo's crash: the worker process is killed while it works, and what comes of that is measured.

SIGKILL cannot be caught, so nothing is tidied up: what survives does so because it never was the worker's.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence

from cudnn_actor.cli.findings import Kill
from cudnn_actor.cli.recorder import Recorder
from cudnn_actor.protocol import Message, Receipt
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.supervision import Restarted, Restarting

__all__ = ["MOST_KILLS", "kill_at_work"]

MOST_KILLS = 5
"""Kills in a row: one may come in the moment between two requests, and then nothing has to run again. As many
restarts still end in `StartFailed` within seconds where no worker can start at all."""


async def kill_at_work(
    gpu: CudnnRef, recorder: Recorder, messages: Sequence[Message], say: Callable[[str], None], *, step: int
) -> Kill:
    """Send all messages at once, kill the worker in the middle of them, and await every answer.

    A kill that interrupts no request that had begun is repeated, with all messages sent anew.

    Parameters
    ----------
    gpu
        A service in process isolation, with at least `MOST_KILLS` restarts.
    recorder
        Sends and times the messages; each is answered with a receipt.
    messages
        Pure, and so much work that it is not done when a quarter of it has been answered.
    say
        Tells people, as it happens.
    step
        What `Kill.step` is to be.

    Raises
    ------
    CudnnActorError
        A request was not answered after all.
    """
    before, kills = (await gpu.statistics()).replayed, 0
    while True:
        sent_s = recorder.now_s
        asked = [asyncio.create_task(_timed(recorder, message)) for message in messages]
        first, at_s = await asked[len(asked) // 4]
        # Not at once: a worker that has just answered may have to leave its core to this process. The next
        # quarter takes as long as the first, whatever else the machine does, so this is the middle of it.
        await asyncio.sleep((at_s - sent_s) / 2)
        in_flight = sum(not task.done() for task in asked)
        if not in_flight:  # this process had to wait for its turn meanwhile
            continue
        pid, killed_s = _kill(gpu), recorder.now_s
        kills += 1
        say(f"  [red]kill -9 {pid}[/]: the worker process, with {in_flight} requests in its hands")
        back = await _back(gpu, first.generation, say)
        answers = await asyncio.gather(*asked)
        later = [at_s for receipt, at_s in answers if receipt.generation > first.generation]
        statistics = await gpu.statistics()
        if (run_again := statistics.replayed - before) or kills == MOST_KILLS:
            break
        say("    it came between two requests, and none had to run again: once more")
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


async def _timed(recorder: Recorder, message: Message) -> tuple[Receipt, float]:
    """The answer, and when it was there."""
    receipt: Receipt = await recorder.ask(message)
    return receipt, recorder.now_s


def _kill(gpu: CudnnRef) -> int:
    pid = gpu.worker_pid
    assert pid is not None, "it has just answered"
    os.kill(pid, signal.SIGKILL)
    return pid


async def _back(gpu: CudnnRef, generation: int, say: Callable[[str], None]) -> Restarted:
    """Follow the service until a successor of this generation serves."""
    async for event in gpu.events():
        match event:
            case Restarting() if event.generation >= generation:
                say(f"  [red]✗ generation {event.generation} is lost[/]: {event.cause.cause}")
            case Restarted() if event.generation > generation:
                when = f"{event.downtime_s * 1e3:.0f} ms later, by {gpu.worker_pid}"
                say(f"  [green]✓ generation {event.generation} serves[/] {when}")
                return event
    raise AssertionError("the service has ended, so its requests have failed")
