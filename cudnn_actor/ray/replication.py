"""Gives all replicas what they have in common, also those that start later, and swaps models.

On the pool's event loop, which alone calls it. A replica is given things by one task at a time, under its
lock. How each thing is made lies in Ray's object store, as a recipe, and of each replica is noted which
recipes it has followed. So to swap a model is to have another recipe for it: whoever prepares a replica
brings it up to date.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import ray

from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.protocol.errors import CudnnActorError, DeadlineExceeded, ServiceStopped
from cudnn_actor.ray.held import Held, Recipe
from cudnn_actor.ray.values import not_held, require_held
from cudnn_actor.ray.watching import Watched

__all__ = ["Replication"]


class Replication:
    """What all replicas of a pool have.

    Parameters
    ----------
    holding
        Gives a replica nothing new within a block, as long as another one is up.
    require_alive
        Raises `ServiceStopped` if the pool has ended.
    within_s
        Seconds in which a replica has to be up again, if none is when something is given.
    """

    def __init__(
        self,
        holding: Callable[[int], AbstractContextManager[None]],
        require_alive: Callable[[], None],
        within_s: float,
    ) -> None:
        self.members: Sequence[Watched] = ()
        """The replicas, once they are placed."""
        self.held: dict[Held, ray.ObjectRef[Recipe]] = {}
        """What all replicas have, and how it is made now; the order is that in which they make it."""
        self._holding, self._require_alive, self._within_s = holding, require_alive, within_s
        self._unproven: dict[Held, asyncio.Future[None]] = {}
        """What no replica has made yet, and the wait for the first that does."""
        self._numbers = 0
        self._swapping = asyncio.Lock()

    def next_number(self) -> int:
        """A number for something that all replicas are to have."""
        self._numbers += 1
        return self._numbers

    async def add(self, held: Held, recipe: Recipe, *, of: Held | None = None) -> None:
        """Give something to all replicas. Raises `CudnnActorError`; then none has it.

        If none is up, it waits for the first that is: before a replica has made it, nobody knows that one
        can. A replica that cannot is not given up for it: it starts anew without it.

        `of`: what it is made of, which they have. It must be dropped first: a replica that starts without
        that could not make it, and would be given up.
        """
        self._require_alive()
        stored = await in_own_thread(ray.put, recipe)
        if of is not None:  # it may have been dropped meanwhile
            require_held("model", of, self.held)
        self.held[held] = stored  # first: a replica that starts meanwhile makes it, too
        try:
            await asyncio.gather(*map(self._bring_up_to_date, self.members))
            await self._prove(held, stored)
        except BaseException:
            await asyncio.shield(self.drop(held))
            raise

    async def drop(self, held: Held) -> None:
        """Take something from all replicas. Idempotent. Whoever waits for the first that makes it is told."""
        if self.held.pop(held, None) is None:
            return
        self._settle(held, not_held("replace", held))
        for replica in self.members:
            if held.number in replica.has and replica.life is not None:
                del replica.has[held.number]
                with contextlib.suppress(ServiceStopped):  # it has gone, and its own with it
                    await replica.life.request("drop", held.number)

    async def swap(self, held: Held, recipe: Recipe) -> None:
        """Have the replicas follow another recipe for something, one after the other.

        The one whose turn it is gets nothing new meanwhile, as long as another one is up. Raises
        `CudnnActorError` if one cannot: then all go back to the recipe that they had. One that cannot go back
        starts anew. If none is up, it waits as `add`.
        """
        self._require_alive()
        stored = await in_own_thread(ray.put, recipe)
        async with self._swapping:
            require_held("replace", held, self.held)  # it may have been dropped meanwhile
            earlier, self.held[held] = self.held[held], stored
            try:
                await self._bring_all_up_to_date()
                await self._prove(held, stored)
            except BaseException:
                if held in self.held:
                    self.held[held] = earlier
                    await asyncio.shield(self._go_back())
                raise

    async def _prove(self, held: Held, stored: object) -> None:
        """Wait until a replica has followed a recipe.

        Raises what the first has raised, and `DeadlineExceeded` if none has begun in time.
        """
        if any(each.has.get(held.number) is stored for each in self.members):
            return
        self._require_alive()
        proof = self._unproven[held] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._within_s):
                await proof
        except TimeoutError:
            raise DeadlineExceeded(timeout_s=self._within_s, started=False) from None
        finally:
            del self._unproven[held]

    def _settle(self, held: Held, error: CudnnActorError | None) -> None:
        """Tell who waits for it whether a replica could follow a recipe."""
        proof = self._unproven.get(held)
        if proof is not None and not proof.done():
            if error is None:
                proof.set_result(None)
            else:
                proof.set_exception(error.again())

    def end(self, reason: str) -> None:
        """Have nobody wait any more: the pool has ended."""
        for held in self._unproven:
            self._settle(held, ServiceStopped(reason=reason))

    async def _bring_all_up_to_date(self) -> None:
        for replica in self.members:
            with self._holding(replica.number):
                await self._bring_up_to_date(replica)

    async def _go_back(self) -> None:
        for replica in self.members:
            try:
                with self._holding(replica.number):
                    await self._bring_up_to_date(replica)
            except CudnnActorError:
                await in_own_thread(partial(ray.kill, replica.actor, no_restart=False))

    async def _bring_up_to_date(self, replica: Watched) -> None:
        """Prepare a replica. One that is lost meanwhile, or not up, is prepared when it is back."""
        if not replica.reachable:
            return
        try:
            await self.prepare(replica)
        except ServiceStopped:
            self._require_alive()

    async def prepare(self, replica: Watched) -> None:
        """Make on a replica what it lacks, and what it has by an earlier recipe. Raises `CudnnActorError`."""
        async with replica.preparing:
            while (missing := self._missing(replica)) is not None:
                (held, stored), life = missing, replica.life
                if life is None:
                    raise ServiceStopped(reason=f"{replica.name} does not run")
                method = "replace" if held.number in replica.has else "make"
                try:
                    await life.request(method, held.number, stored)
                except CudnnActorError as error:
                    if not isinstance(error, ServiceStopped):  # else the replica has ended: the next may tell
                        self._settle(held, error)
                    raise
                replica.has[held.number] = stored
                self._settle(held, None)
                if held not in self.held:  # it was dropped meanwhile
                    del replica.has[held.number]
                    await life.request("drop", held.number)

    def _missing(self, replica: Watched) -> tuple[Held, object] | None:
        """The first that a replica lacks, or has by an earlier recipe, and how it is made."""
        has = replica.has
        return next(((held, how) for held, how in self.held.items() if has.get(held.number) is not how), None)
