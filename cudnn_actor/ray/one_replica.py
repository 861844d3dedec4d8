"""`OneReplica`: one replica of a pool, for buffers, and requests with them, that must stay together."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from cudnn_actor.actors import within
from cudnn_actor.protocol.errors import OutcomeUnknown, ServiceStopped
from cudnn_actor.ray.held import Held
from cudnn_actor.ray.watching import Watched
from cudnn_actor.service.client import CudnnRef

__all__ = ["OneReplica", "Work"]

T = TypeVar("T")
Work = Callable[[CudnnRef, Callable[[Held], Any]], Awaitable[T]]
"""A function that `call` runs in a replica."""


class OneReplica:
    """One replica of a pool, for buffers, and requests with them. `RayPool.on` makes it.

    Parameters
    ----------
    replica
        The replica.
    """

    def __init__(self, replica: Watched) -> None:
        self._replica = replica
        self._numbers = itertools.count(1)

    def __repr__(self) -> str:
        return f"<{self._replica.name!r} of a pool>"

    async def call(self, work: Work[T], *, timeout: float | None = None) -> T:
        """Run an asynchronous function in this replica. Unlike `RayPool.call`, this never runs it again in
        another one.

            x = await pool.on(0).call(lambda gpu, own: gpu.upload(array))

        References that the function returns are valid only in this replica, until its process ends.

        Raises
        ------
        ServiceStopped
            The replica does not run now, so `work` has not been called.
        OutcomeUnknown
            The replica ended, or could not be reached any more, while it had the call.
        DeadlineExceeded
            No answer within `timeout` seconds. `work` is then cancelled.
        BaseException
            `work` has raised it.
        """
        number = next(self._numbers)
        with within(timeout) as deadline:
            try:
                found: T = await self._replica.request(deadline, "call", work)
            except ServiceStopped as error:
                if not error.interrupted:
                    raise
                raise OutcomeUnknown(
                    request_id=number, cause=error.reason, why="it was meant for one replica alone"
                ) from None
        return found
