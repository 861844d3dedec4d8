"""A replica as the pool sees it: its actor, which Ray starts again, and whether it can be reached.

A replica sends a sign of life every quarter of `lost_after_s` (`Replica.beat`). If it sends none within
`lost_after_s`, its requests run on other replicas, whatever Ray knows by then. Ray notices the end of a
process, but gives up a node that does not answer only after its own health check. A replica that answers
again gets requests again.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from cudnn_actor.actors import Deadline
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.pool.listener import Listener
from cudnn_actor.protocol.errors import CudnnActorError, DeadlineExceeded, ServiceStopped
from cudnn_actor.ray.life import Life
from cudnn_actor.ray.node_memory import MemoryName
from cudnn_actor.ray.replica import Beat, Hello
from cudnn_actor.ray.values import RequestValues
from cudnn_actor.supervision import Escalated, ExitReason, Restarted, Restarting, Started

__all__ = ["Watched"]

_PARTS = 4
"""Into how many parts `lost_after_s` is divided. A replica sends a sign of life after each part."""
_AGAIN_S = 0.1
"""Seconds between questions whether Ray has started an actor again."""
_FAILURES = 3
"""How often in a row a replica may fail to make the pool's copies."""


class Watched:
    """A replica, which a task of the pool's event loop watches: `watch`.

    Parameters
    ----------
    number, name
        The replica's number in the pool, from 0, and its name in log lines and events.
    actor
        Ray's handle of the actor.
    mailbox
        How many requests the replica is sent at a time.
    lost_after_s
        Seconds without a sign of life after which the replica counts as lost.
    listener
        The receiver of the replica's events.
    memory
        The name of the pool's memory, which the replica maps if it is on the same node; None without one.
    """

    def __init__(
        self,
        number: int,
        name: str,
        actor: Any,
        *,
        mailbox: int,
        lost_after_s: float,
        listener: Listener[Watched],
        memory: MemoryName | None = None,
    ) -> None:
        self.number, self.name, self.actor = number, name, actor
        self._memory = memory
        self.life: Life | None = None
        """The living incarnation, as far as is known; None for none."""
        self.generation = 0
        """How many incarnations there have been."""
        self.reachable = False
        self.prepared = False
        """Whether the replica has all copies. Before that, a request might miss one."""
        self.worker_pid: int | None = None
        self.has: dict[int, object] = {}
        """The copies of this incarnation: for each number, the recipe that it has followed."""
        self.preparing = asyncio.Lock()
        self._mailbox, self._lost_after_s, self._listener = mailbox, lost_after_s, listener
        self._down_since = time.monotonic()
        self._failures = 0

    def __repr__(self) -> str:
        return f"<replica {self.name!r}>"

    async def request(
        self, deadline: Deadline, method: str, *args: Any, values: RequestValues | None = None
    ) -> Any:
        """Call a method of the replica, which counts as a request, and return its answer. For `values`, see
        `Life.request`.

        Raises `ServiceStopped` as `Life.request` does, also if the replica is not up or lacks copies;
        `DeadlineExceeded`; and the errors of the method.
        """
        life = self.life
        if life is None or not self.reachable or not self.prepared:
            raise ServiceStopped(reason=f"{self.name} does not run, or cannot be reached")
        left_s = deadline.left_s
        try:
            async with asyncio.timeout(left_s) as limit:
                return await life.request(method, *args, values=values)
        except TimeoutError as error:
            if left_s is None or not limit.expired() or isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded(timeout_s=left_s, started=True) from None  # as far as is known here

    async def watch(self) -> None:
        """Follow the actor through all its incarnations, until it is given up."""
        try:
            await self._follow_all()
        except Exception as error:  # noqa: BLE001 - else requests would wait for it forever
            self._give_up(repr(error))

    async def _follow_all(self) -> None:
        while True:
            try:
                hello = await self.actor.hello.remote(self._memory)
            except ActorUnavailableError:
                await asyncio.sleep(_AGAIN_S)
                continue
            except RayError as error:
                self._give_up(str(error).strip().rpartition("\n")[2])
                return
            life = self._begin(hello)
            try:
                await self._follow(life)
            except CudnnActorError as error:
                if not life.over and not await self._start_again(life, str(error)):
                    return

    def _begin(self, hello: Hello) -> Life:
        if hello.near and (hello.process is None or hello.process.has_ended()):
            hello = replace(hello, near=False)  # this process does not see it, and so would not see its end
        life = Life(
            self.actor,
            hello,
            most=self._mailbox,
            found_ended=lambda why: self._note_end(life, ExitReason.crash(why)),
        )
        self.life, self.reachable, self.prepared, self.has = life, True, False, {}
        self.generation += 1
        return life

    async def _follow(self, life: Life) -> None:
        """Make the copies of an incarnation, then wait for its signs of life. Raises when the incarnation has
        ended."""
        await self._prepare()
        self._failures = 0
        if self.generation == 1:
            self._listener.happened(Started(child=self.name, generation=1))
        else:
            downtime_s = time.monotonic() - self._down_since
            self._listener.happened(
                Restarted(child=self.name, generation=self.generation, downtime_s=downtime_s)
            )
        known: Beat | None = None
        while True:
            found = await self._next_beat(life, known)
            self.worker_pid = found.worker_pid
            if known is None or found.ready != known.ready:
                (self._listener.up if found.ready else self._listener.pauses)(self)
            known = found

    async def _next_beat(self, life: Life, known: Beat | None) -> Beat:
        """Wait for the next sign of life of an incarnation, however long that takes.

        The wait has parts: an event loop that was blocked for long finds one part over, and not all.
        """
        part_s = self._lost_after_s / _PARTS
        beat: asyncio.Task[Beat] = asyncio.ensure_future(life.ask("beat", known, part_s))
        missed = 0
        try:
            while not (await asyncio.wait({beat}, timeout=part_s))[0]:
                missed += 1
                if missed == _PARTS:
                    self._unreachable(life)
            if missed >= _PARTS:
                await beat
                await self._back()
            return await beat
        finally:
            beat.cancel()

    def _unreachable(self, life: Life) -> None:
        self.reachable = self.prepared = False
        life.withdraw(f"{self.name} has not answered for {self._lost_after_s:g} s")
        self._listener.lost(self)

    async def _back(self) -> None:
        self.reachable = True
        await self._prepare()
        self._listener.up(self)

    async def _prepare(self) -> None:
        await self._listener.prepare(self)
        self.prepared = True

    def _note_end(self, life: Life, why: ExitReason) -> None:
        """Note that an incarnation has ended. Idempotent."""
        if life.over:
            return
        life.end(f"{self.name}: {why.cause}")
        self.life, self.reachable, self.worker_pid = None, False, None
        self._down_since = time.monotonic()
        self._listener.happened(
            Restarting(child=self.name, generation=self.generation, cause=why, delay_s=0.0, attempt=1)
        )
        self._listener.lost(self)

    async def _start_again(self, life: Life, why: str) -> bool:
        """Let Ray start an actor again that cannot make the pool's copies. Returns False if the replica is
        given up."""
        self._failures += 1
        self._note_end(life, ExitReason.start_failed(why))
        again = self._failures < _FAILURES
        await in_own_thread(lambda: ray.kill(self.actor, no_restart=not again))
        if not again:
            self._give_up(why)
        return again

    def _give_up(self, why: str) -> None:
        if self.life is not None:  # its requests would be waited for
            self.life.end(f"{self.name}: {why}")
            self.life, self.reachable, self.worker_pid = None, False, None
        cause = ExitReason.start_failed(why) if self.generation == 0 else ExitReason.crash(why)
        self._listener.happened(Escalated(child=self.name, cause=cause, why="Ray does not start it again"))
        self._listener.given_up(self)
