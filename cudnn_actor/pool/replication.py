"""Gives all members of a pool its models and buffers, also members that start later, and swaps models.

Only the pool's event loop calls this. One task at a time gives copies to a member, under the member's lock: a
task that adds a model or a buffer, or the member's own start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from cudnn_actor.actors import Deadline
from cudnn_actor.pool.member import Member
from cudnn_actor.pool.replicas import PoolModel, Replica, Version
from cudnn_actor.protocol.errors import CudnnActorError, InvalidRequest, ServiceStopped
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.service.client import CudnnRef

__all__ = ["Replication"]


class Replication:
    """The models and buffers that all members of a pool have.

    Parameters
    ----------
    members
        The members.
    holding
        See `Dispatching.holding`.
    """

    def __init__(
        self, members: Sequence[Member], holding: Callable[[int], AbstractContextManager[None]]
    ) -> None:
        self._members, self._holding = members, holding
        self._all: list[Replica[Any]] = []
        self._giving = [asyncio.Lock() for _ in members]

    def __contains__(self, replica: object) -> bool:
        return replica in self._all

    def require(self, model: object, field: str = "model") -> None:
        """Raise `InvalidRequest` unless `model` is a model that all members have."""
        if not isinstance(model, PoolModel) or model not in self._all:
            raise InvalidRequest(
                field=field,
                value=model,
                problem="is no model that this pool has loaded, or was unloaded",
                fix="pass what pool.load gave",
            )

    async def add(self, replica: Replica[Any]) -> None:
        """Make a copy on all members. Raises `CudnnActorError`; then no member has a copy."""
        self._all.append(replica)  # first: a member that starts meanwhile gets a copy, too
        try:
            for member in self._members:
                async with self._handle_of(member) as gpu:
                    if gpu is not None:
                        await self._give_missing(member, gpu)
        except BaseException:
            await asyncio.shield(self.drop(replica))
            raise

    async def drop(self, replica: Replica[Any]) -> None:
        """Free the copies of all members."""
        if replica in self._all:
            self._all.remove(replica)
        replica.end()
        while replica.at:
            member, copy = replica.at.popitem()
            gpu = self._members[member].gpu
            if gpu is not None:
                with contextlib.suppress(ServiceStopped):  # the member has gone, and its copy with it
                    await replica.drop(gpu, copy)

    def end(self) -> None:
        """Release the values and weights of all copies, once the members have ended."""
        while self._all:
            self._all.pop().end()

    async def give_all(self, member: Member) -> None:
        """Make all copies on a member that has just started. Raises `CudnnActorError`."""
        gpu = member.gpu
        assert gpu is not None, "it has just started"
        async with self._giving[member.number]:
            await self._give_missing(member, gpu)

    def note_loss(self, member: Member) -> None:
        """Note that a member has ended, and has lost its copies."""
        for replica in self._all:
            replica.forget_member(member.number)

    async def swap(self, model: PoolModel, version: Version) -> None:
        """Let the members run another version of a model, one member after the other.

        The member whose turn it is gets no requests meanwhile, as long as another one is up. A member that is
        lost, or that starts, gets the new version by its start. Raises `CudnnActorError` if a member cannot
        run it: then all go back to the version that they had.
        """
        async with model.swapping:
            self.require(model)  # the model may have been unloaded meanwhile
            earlier, model.version = model.version, version
            try:
                for member in self._members:
                    await self._bring_up_to_date(member, model)
            except BaseException:
                model.version = earlier
                await asyncio.shield(self._go_back(model))
                version.release()
                raise
            earlier.release()

    async def reserve(
        self, model: PoolModel, specs: Mapping[str, TensorSpec], deadline: Deadline
    ) -> Callable[[], None]:
        """Warm a model for inputs of these specs on all members, also on those that start later.

        Returns a function that ends this. Raises as `Model.reserve`.
        """
        release = model.reserve(specs)
        try:
            for member in self._members:
                async with self._handle_of(member) as gpu:
                    if gpu is not None and (copy := model.at.get(member.number)) is not None:
                        await model.warm(copy, deadline)
        except BaseException:
            release()
            raise
        return release

    async def _bring_up_to_date(self, member: Member, model: PoolModel) -> None:
        with self._holding(member.number):
            async with self._handle_of(member) as gpu:
                if gpu is not None and (copy := model.at.get(member.number)) is not None:
                    await model.bring_up_to_date(gpu, copy)

    async def _go_back(self, model: PoolModel) -> None:
        """Let all members run a model's current version again. A member that cannot is restarted."""
        for member in self._members:
            try:
                await self._bring_up_to_date(member, model)
            except CudnnActorError:
                member.restart()

    @contextlib.asynccontextmanager
    async def _handle_of(self, member: Member) -> AsyncIterator[CudnnRef | None]:
        """Yield the handle of a member, to make a copy there; None if its process does not run.

        Errors of the block are suppressed if the process has ended: its next process gets all copies.
        """
        gpu = None
        try:
            async with self._giving[member.number]:
                gpu = member.gpu
                yield gpu
        except CudnnActorError:
            if member.gpu is gpu:
                raise

    async def _give_missing(self, member: Member, gpu: CudnnRef) -> None:
        while missing := [each for each in self._all if member.number not in each.at]:
            replica = missing[0]
            copy = replica.at[member.number] = await replica.make(gpu)
            if member.gpu is not gpu:
                replica.forget_member(member.number)
                raise ServiceStopped(reason=f"the process of {member.name} has ended")
            if replica not in self._all:  # it was dropped meanwhile
                del replica.at[member.number]
                await replica.drop(gpu, copy)
