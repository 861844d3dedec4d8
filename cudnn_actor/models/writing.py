"""Overwrites the weights of a model: one write at a time, and no graph is added during a write.

Why no answer mixes old and new weights:

- A write of any number of weights is one message, `WriteWeights`. The broker lets it begin only when all runs
  that read these weights have been answered, and holds later runs of the model back until then
  (`broker.held_back`).
- All loops of such a model are unrolled, so each of its runs is one message, too.
- An engine that has computed something from the weights alone is told of the write
  (`execution.expected_runs`).
- A write that fails has written nothing, or has torn the weights: then no run reads them, and their values
  are uploaded again.
- A graph that is added has the values of all writes before: see `after_writes`.

A model that is replaced by another file has other buffers: each run is sent for one of both models
(`Model.replace_by`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from cudnn_actor.actors import Deadline
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.models.inputs import Values
from cudnn_actor.models.keeping import Keeping
from cudnn_actor.models.rounding import round_to
from cudnn_actor.models.source import Origin, SwappableSource
from cudnn_actor.models.weights import checked_weights, derive, specs_of
from cudnn_actor.protocol.errors import CudnnActorError, DeadlineExceeded, StaleBufferError
from cudnn_actor.protocol.messages.messages import WriteWeights
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Writing"]


class Writing:
    """Writes the weights that a model keeps. All methods but `after_writes` need a model whose source is a
    `SwappableSource`.

    Parameters
    ----------
    gpu
        The `CudnnRef` of the service.
    keeping
        The graphs and weights of the model.
    """

    def __init__(self, gpu: Any, keeping: Keeping) -> None:
        self._gpu = gpu
        self._keeping = keeping
        self._under_way: Future[None] | None = None
        """The write that is under way, on any event loop; None for none. No graph is added meanwhile."""
        self._unsure: dict[str, np.ndarray] = {}
        """The values of a write whose caller was cancelled or timed out: the service may have written them,
        or not. They are sent again before a graph is added, and with the next write."""

    @property
    def _source(self) -> SwappableSource:
        return self._keeping.source  # type: ignore[return-value]  # the model has looked

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The weights that may be overwritten, as far as is known: name → spec."""
        with self._keeping.lock:
            return specs_of(self._source.tensors, self._keeping.decided)

    def check(self, values: Values, weights: object) -> dict[str, np.ndarray | BufferRef]:
        """The new values of weights, by name: copies of arrays, and references as they are.

        Raises `InvalidRequest` if a name or a value does not fit.
        """
        return checked_weights(self._source.tensors, self._keeping.decided, values, weights)

    async def fetch(
        self, given: Mapping[str, np.ndarray | BufferRef], deadline: Deadline
    ) -> dict[str, np.ndarray]:
        """The result of `check`, with downloaded values in place of references: graphs that are imported
        later need the values, too."""
        return {
            name: await self._gpu.download(each, timeout=deadline.left_s)
            if isinstance(each, BufferRef)
            else each
            for name, each in given.items()
        }

    async def write(self, given: Mapping[str, np.ndarray], deadline: Deadline) -> None:
        """Overwrite weights with the values that `fetch` has returned."""
        async with self._alone(deadline):
            await self._write_kept(given, deadline)

    @contextlib.asynccontextmanager
    async def after_writes(self, deadline: Deadline, *, alone: bool) -> AsyncIterator[int]:
        """Wait until no write is under way, and send a write of unknown outcome again. Yields how many writes
        have begun.

        With `alone`, no write begins within the block. Without it, many writes could make a long import
        outdated again and again.
        """
        keeping = self._keeping
        if alone:
            async with self._alone(deadline):
                if self._unsure:
                    await self._write_kept({}, deadline)
                yield keeping.writes
            return
        while True:
            with keeping.lock:
                other, unsure = self._under_way, self._unsure
                writes = keeping.writes
            if other is not None:
                await self._wait_for(other, deadline)
            elif unsure:
                await self.write({}, deadline)
            else:
                break
        yield writes

    @contextlib.asynccontextmanager
    async def _alone(self, deadline: Deadline) -> AsyncIterator[None]:
        """Wait for the write that is under way, if there is one, and let no other write begin within the
        block.

        Tasks of any event loops may call this, on any threads. The task that sets `_under_way` is alone until
        it clears it; it does both under the lock. So the next task sees what it has left in `_unsure` and in
        the source.
        """
        keeping = self._keeping
        while True:
            with keeping.lock:
                keeping.check_open()
                other = self._under_way
                if other is None:
                    mine = self._under_way = Future()
                    mine.set_running_or_notify_cancel()  # so that no task that waits for it can cancel it
                    keeping.writes += 1
                    break
            await self._wait_for(other, deadline)
        try:
            yield
        finally:
            with keeping.lock:
                self._under_way = None
            mine.set_result(None)

    async def _wait_for(self, write: Future[None], deadline: Deadline) -> None:
        async with deadline.limiting():
            await asyncio.wrap_future(write)

    async def _write_kept(self, given: Mapping[str, np.ndarray], deadline: Deadline) -> None:
        """Write to all weights that are kept, including the values in `_unsure`. No other task writes
        meanwhile."""
        kept = self._keeping.hold_all()  # these graphs, and their weights, are not given back meanwhile
        try:
            await self._write_all({**self._unsure, **given}, deadline)
        except StaleBufferError as error:  # an earlier write, whose outcome is unknown, tore them
            if not any(self._keeping.forget_torn(each, error) for each in kept):
                raise
            await self._write_all({**self._unsure, **given}, deadline)
        finally:
            for each in kept:
                self._keeping.release(each)

    async def _write_all(self, given: Mapping[str, np.ndarray], deadline: Deadline) -> None:
        keeping, source = self._keeping, self._source.with_tensors(given)
        with keeping.lock:  # a run on another thread may find the weights torn, and forget them
            chosen = [
                (keeping.weights[key][0], origin)
                for key, origin in keeping.origins.items()
                if not origin.names.isdisjoint(given)
            ]
        arrays = await in_own_thread(_compute, chosen, source.tensors)
        if chosen:
            refs = tuple(ref for ref, _ in chosen)
            message = WriteWeights(model=keeping.ref, buffers=refs, values=tuple(arrays))
            try:
                await self._gpu.ask(message, timeout=deadline.left_s)
            except BaseException as error:
                # A failed write has written nothing, or has torn the weights.
                waited_no_longer = isinstance(error, DeadlineExceeded) and error.ran is not False
                if waited_no_longer or not isinstance(error, CudnnActorError):
                    self._unsure = dict(given)
                raise
        keeping.source, self._unsure = source, {}


def _compute(
    chosen: Collection[tuple[BufferRef, Origin]], tensors: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
    """The values of weights, each in its buffer's dtype. Raises `InvalidRequest`."""
    known: dict[str, Any] = {}
    return [round_to(derive(origin, ref.spec, tensors, known), ref.spec.dtype) for ref, origin in chosen]
