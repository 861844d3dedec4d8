"""Gives all replicas of a pool its models and buffers, also replicas that start later, and swaps models.

Only the pool's event loop calls this. One task at a time gives copies to a replica, under the replica's lock.
The recipes of copies are in Ray's object store, and the pool notes which recipes each replica has followed.
So a model is swapped by a new recipe for it: the next task that prepares a replica makes it follow that.
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
    """The models, buffers and reservations that all replicas of a pool have.

    Parameters
    ----------
    holding
        See `Dispatching.holding`.
    require_alive
        A function that raises `ServiceStopped` if the pool has ended.
    within_s
        Seconds within which a replica must be up, if none is when `add` or `swap` is called.
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
        """All `Held` objects and their current recipes, in the order in which replicas make the copies."""
        self._holding, self._require_alive, self._within_s = holding, require_alive, within_s
        self._unproven: dict[Held, asyncio.Future[None]] = {}
        """Recipes that no replica has followed yet, with a future for the first that does."""
        self._numbers = 0
        self._swapping = asyncio.Lock()

    def next_number(self) -> int:
        """A number for a new `Held`."""
        self._numbers += 1
        return self._numbers

    async def add(self, held: Held, recipe: Recipe, *, of: Held | None = None) -> None:
        """Make a copy on all replicas. Raises `CudnnActorError`; then no replica has one.

        If no replica is up, this waits for the first that is: only a replica that has made the copy shows
        that it can be made. A replica that cannot make it is not given up for that: it restarts without it.

        `of`: the `Held` from which it is made. Drop the new one before that: a replica that starts without
        `of` could not make it, and would be given up.
        """
        self._require_alive()
        stored = await in_own_thread(ray.put, recipe)
        if of is not None:  # it may have been dropped meanwhile
            require_held("model", of, self.held)
        self.held[held] = stored  # first: a replica that starts meanwhile makes a copy, too
        try:
            await asyncio.gather(*map(self._bring_up_to_date, self.members))
            await self._prove(held, stored)
        except BaseException:
            await asyncio.shield(self.drop(held))
            raise

    async def drop(self, held: Held) -> None:
        """Free the copies of all replicas. Idempotent. A task that waits for the first copy gets an error."""
        if self.held.pop(held, None) is None:
            return
        self._settle(held, not_held("replace", held))
        for replica in self.members:
            if held.number in replica.has and replica.life is not None:
                del replica.has[held.number]
                with contextlib.suppress(ServiceStopped):  # the replica has gone, and its copy with it
                    await replica.life.request("drop", held.number)

    async def swap(self, held: Held, recipe: Recipe) -> None:
        """Let the replicas follow a new recipe for a `Held`, one after the other.

        The replica whose turn it is gets no new requests, as long as another one is up. Raises
        `CudnnActorError` if a replica cannot follow the recipe: then all go back to the old one, and a
        replica that cannot go back is restarted. If no replica is up, this waits as `add` does.
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

        Raises the error of the first replica that has tried, `DeadlineExceeded` if none has tried in time,
        and `InvalidRequest` if `held` is dropped first.
        """
        # It may have been dropped while a replica followed the recipe: then nothing settles the proof.
        require_held("replace", held, self.held)
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
        """Tell the task that waits for a recipe's first copy whether a replica could make it."""
        proof = self._unproven.get(held)
        if proof is not None and not proof.done():
            if error is None:
                proof.set_result(None)
            else:
                proof.set_exception(error.again())

    def end(self, reason: str) -> None:
        """End all waits, because the pool has ended."""
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
        """Prepare a replica. A replica that is lost meanwhile, or is not up, is prepared when it is back."""
        if not replica.reachable:
            return
        try:
            await self.prepare(replica)
        except ServiceStopped:
            self._require_alive()

    async def prepare(self, replica: Watched) -> None:
        """Make the copies that a replica lacks, or has by an earlier recipe. Raises `CudnnActorError`."""
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
                if held not in self.held:  # `held` was dropped meanwhile
                    del replica.has[held.number]
                    await life.request("drop", held.number)

    def _missing(self, replica: Watched) -> tuple[Held, object] | None:
        """The first `Held` that a replica lacks, or has by an earlier recipe, with its current recipe; None
        if there is none."""
        has = replica.has
        return next(((held, how) for held, how in self.held.items() if has.get(held.number) is not how), None)
