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
from cudnn_actor.client import CudnnRef
from cudnn_actor.protocol import Message, Receipt
from cudnn_actor.supervision import Restarted, Restarting

__all__ = ["kill_at_work"]


async def kill_at_work(
    gpu: CudnnRef, recorder: Recorder, messages: Sequence[Message], say: Callable[[str], None], *, step: int
) -> Kill:
    """Send all messages at once, kill the worker in the middle of them, and await every answer.

    Parameters
    ----------
    gpu
        A service in process isolation.
    recorder
        Sends and times the messages; each is answered with a receipt.
    messages
        So much work that it is not done when the first answer comes.
    say
        Tells people, as it happens.
    step
        What `Kill.step` is to be.

    Raises
    ------
    CudnnActorError
        A request was not answered after all.
    """
    asked = [asyncio.create_task(_timed(recorder, message)) for message in messages]
    done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    first, _ = done.pop().result()
    await asyncio.sleep(first.run_us / 2e6)  # the next takes as long: this is the middle of it
    waiting = {task for task in waiting if not task.done()}
    pid, killed_s = _kill(gpu), recorder.now_s
    say(f"  [red]kill -9 {pid}[/]: the worker process, with {len(waiting)} requests in its hands")
    back = await _back(gpu, first.generation, say)
    answers = await asyncio.gather(*asked)
    later = [at_s for receipt, at_s in answers if receipt.generation > first.generation]
    statistics = await gpu.statistics()
    return Kill(
        pid=pid,
        killed_s=killed_s,
        step=step,
        in_flight=len(waiting),
        run_again=statistics.replayed,
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
            case Restarting():
                say(f"  [red]✗ generation {event.generation} is lost[/]: {event.cause.cause}")
            case Restarted() if event.generation > generation:
                when = f"{event.downtime_s * 1e3:.0f} ms later, by {gpu.worker_pid}"
                say(f"  [green]✓ generation {event.generation} serves[/] {when}")
                return event
    raise AssertionError("the service has ended, so its requests have failed")
