"""Makes graphs of a model ready for runs: imports them, uploads their weights, and has their plans built."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np

from cudnn_actor.actors import Deadline
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.models.keeping import Keeping, Kept, Outdated
from cudnn_actor.models.loop_locks import LoopLocks
from cudnn_actor.models.rounding import round_to
from cudnn_actor.models.source import NeedsValues, Specialised, Step, Weight, values_of
from cudnn_actor.models.writing import Writing
from cudnn_actor.protocol.errors import OutOfMemory, StaleBufferError
from cudnn_actor.protocol.messages.messages import Allocate, Warm, WarmModel
from cudnn_actor.protocol.messages.model_messages import ModelGraph
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.protocol.types.tune import Tune

__all__ = ["Preparing"]

_MOST_AT_A_TIME = 8
"""The most weights that are uploaded at a time. Each upload is a request that waits for its answer."""
_MOST_BYTES_AT_A_TIME = 256 << 20
"""The most bytes of these weights together, if there are several. Each is read from the file, or computed,
just before it is uploaded."""


class Preparing:
    """Makes graphs, has them kept, and deploys them in the service.

    A graph is in use from `Keeping.find` or `keep` until `release`. Every `await` between them is in a
    `try`, so the graph is released however the run ends. A weight is in `made` from when `upload` returns it
    until `keep` takes it out; if `keep` never does, it is discarded. If `upload` cannot return a buffer, it
    frees it itself. While one task awaits, other tasks may change which graphs are kept, so `find` and `keep`
    look again, under the lock.

    Parameters
    ----------
    gpu
        The `CudnnRef` of the service.
    keeping, writing
        The model's graphs and weights, and the object that overwrites the weights.
    most_operations
        How many operations a graph of the service may have.
    tune
        Whether plans are tuned, unless an argument of `deploy` says otherwise.
    """

    def __init__(
        self, gpu: Any, keeping: Keeping, writing: Writing, most_operations: int, tune: Tune = False
    ) -> None:
        self.tune = tune
        self._gpu = gpu
        self._keeping = keeping
        self._writing = writing
        self._most_operations = most_operations
        self._defaults = frozenset(each.name for each in keeping.source.defaults)
        self._deciding: set[str] = set()
        """The names of inputs whose values have decided over shapes."""
        self._latest: tuple[Mapping[str, TensorSpec], object] = {}, None
        """The specs of the latest run for which `ready` had a graph, and the graph's key. Any thread may
        replace it."""
        self._locks = LoopLocks()
        """A task holds its loop's lock while it imports and uploads, so that the loop's other tasks use its
        graph and weights. Tasks of other loops may do the same work at the same time; see `_keep`."""

    def ready(self, specs: Mapping[str, TensorSpec]) -> Kept | None:
        """The graph for these inputs, if it is kept, and no values decide over shapes; else None.

        The graph is in use until `Keeping.release`. This is quicker than `acquire`, and quickest if `specs`
        is the same object as before. Raises as `Keeping.check_open`.
        """
        if self._deciding:
            return None
        known, key = self._latest
        if specs is not known:
            key = _key(specs, {})
            self._latest = specs, key
        return self._keeping.find(key)

    async def acquire(
        self,
        specs: Mapping[str, TensorSpec],
        given: Mapping[str, Any],
        deadline: Deadline,
        *,
        soon: bool = False,
    ) -> Kept:
        """Import the graph for these inputs and upload its weights, if that is not done yet, and return it.
        It is in use until `Keeping.release`.

        With `soon`, the service gets its plan ready while weights are uploaded, as `deploy` does with `soon`.
        """
        outdated = False
        while True:
            with self._keeping.lock:
                self._keeping.check_open()
                deciding = frozenset(self._deciding)
            left_out = self._defaults - specs.keys()
            values = {name: await self._value(given, name, deadline) for name in deciding - left_out}
            key = _key(specs, values)
            if (kept := self._keeping.find(key)) is not None:
                return kept
            async with deadline.limiting(), self._locks.of_running_loop():
                if (kept := self._keeping.find(key)) is not None:
                    return kept
                try:
                    async with self._writing.after_writes(deadline, alone=outdated) as writes:
                        specialise = self._keeping.source.specialise
                        of = await in_own_thread(specialise, specs, values, self._most_operations)
                        # Nothing is awaited once the graph is in use: see the class's docstring.
                        return await self._keep(key, of, specs, values, writes, soon=soon)
                except Outdated:
                    outdated = True
                except NeedsValues as needs:
                    if not needs.names <= given.keys() or needs.names <= deciding:
                        raise
                    with self._keeping.lock:
                        self._deciding |= needs.names

    async def deploy(
        self, kept: Kept, deadline: Deadline, tune: Tune | None = None, *, soon: bool = False
    ) -> int:
        """Allocate the places of a graph if it has none, and have the service build its plan, and tune it.

        With `soon`, wait only until the graph can run, perhaps by a provisional plan. Returns how many plans
        were built.
        """
        tune = self.tune if tune is None else tune
        if kept.of.steps:
            return await self._warm_steps(kept.of.steps, deadline, tune, soon=soon)
        if kept.graph is None:
            return 0
        while True:
            sent = await self._place(kept, deadline)
            message = WarmModel(model=self._keeping.ref, graphs=(sent,), tune=tune, soon=soon)
            try:
                built: int = await self._gpu.ask(message, timeout=deadline.left_s)
            except StaleBufferError:
                # Else a thread with another loop has given these places back before the message was admitted:
                # it had deployed them, and the service has had to forget them.
                if kept.outdated or kept.sent is sent:
                    raise
            else:
                self._keeping.note_deployed(kept, sent)
                return built

    async def _warm_steps(self, steps: Sequence[Step], deadline: Deadline, tune: Tune, *, soon: bool) -> int:
        """Let the service build the plans of the graphs and bodies. Each run allocates the cells."""
        built = 0
        for step in steps:
            message = Warm(graphs=(step.graph,), tune=tune, soon=soon)
            built += await self._gpu.ask(message, timeout=deadline.left_s)
        return built

    async def _place(self, kept: Kept, deadline: Deadline) -> ModelGraph:
        """The description of a graph for the service. Allocates places if the graph has none.

        Another loop may place the graph as well, or give its places back, at any moment. So `kept.sent` is
        read once.
        """
        while (sent := kept.sent) is None:
            async with deadline.limiting(), self._locks.of_running_loop():
                if kept.sent is None:
                    await self._allocate(kept, deadline)
        return sent

    async def _allocate(self, kept: Kept, deadline: Deadline) -> None:
        """Allocate the places of a graph's inputs and outputs."""
        made: dict[str, BufferRef] = {}
        assert kept.graph is not None
        names = {port: f"input {name!r}" for name, port in kept.of.inputs.items()}
        names |= {port: f"output {name!r}" for name, port in kept.of.outputs.items()}
        try:
            for port in kept.graph.ports:
                if port.name in kept.weights:
                    continue
                try:
                    allocate = partial(self._gpu.ask, Allocate(spec=port.spec), timeout=deadline.left_s)
                    made[port.name] = await self._with_room(port.spec.nbytes, allocate)
                except OutOfMemory as error:
                    raise error.at(error.operations, names.get(port.name, port.name)) from error
            if self._keeping.place(kept, made):
                made = {}
        finally:
            for ref in made.values():
                self._keeping.discard(ref)

    async def _value(self, given: Mapping[str, Any], name: str, deadline: Deadline) -> np.ndarray:
        if name not in given:
            raise NeedsValues([name])
        value = given[name]
        if not isinstance(value, BufferRef):
            return np.array(value)
        values: np.ndarray = await self._gpu.download(value, timeout=deadline.left_s)
        return values

    async def _keep(
        self,
        key: object,
        of: Specialised,
        specs: Mapping[str, TensorSpec],
        values: Mapping[str, np.ndarray],
        writes: int,
        *,
        soon: bool,
    ) -> Kept:
        """Upload the weights that are missing, and keep the graph. `soon`: as in `acquire`.

        Raises `Outdated`, and `OutOfMemory`, which says how many bytes the weights take together. `writes`:
        how many writes had begun when the source of these weights was looked up.
        """
        made: dict[str, BufferRef] = {}
        ports = of.ports
        try:
            while (kept := self._keeping.keep(key, of, made, specs, values, writes=writes)) is None:
                missing = {
                    name: (elements, ports[port])
                    for port, (name, elements) in of.weights.items()
                    if name not in made and name not in self._keeping.weights
                }
                async with self._planning(of, soon=soon):
                    await self._upload_weights(missing, made)
        except OutOfMemory as error:
            wanted = {
                name: port for port, (name, _) in of.weights.items() if name not in self._keeping.weights
            }
            nbytes = sum(ports[port].nbytes for port in wanted.values())
            others = error.in_use - sum(ref.nbytes for ref in made.values())
            raise error.as_part_of(nbytes, in_use=max(0, others), where="the model's weights") from error
        finally:  # weights that another run has uploaded, too, are left in `made`
            for ref in made.values():
                self._keeping.discard(ref)
        return kept

    @asynccontextmanager
    async def _planning(self, of: Specialised, *, soon: bool) -> AsyncIterator[None]:
        """If `soon`, have the service build the graph's plan during the `with` block.

        If that fails, `deploy` fails with the same error. If the plan is not ready at the end of the block,
        the service goes on building it.
        """
        if not soon or of.steps or of.graph is None:
            yield
            return
        warming = asyncio.ensure_future(self._gpu.ask(Warm(graphs=(of.graph,), tune="cached", soon=True)))
        try:
            yield
        finally:
            warming.cancel()
            await asyncio.gather(warming, return_exceptions=True)

    async def _upload_weights(
        self, wanted: Mapping[str, tuple[Weight, TensorSpec]], made: dict[str, BufferRef]
    ) -> None:
        """Upload weights into `made`, some at a time. When this raises an error, no upload is under way any
        more."""
        running: dict[asyncio.Task[None], int] = {}

        async def upload(name: str, elements: Weight, spec: TensorSpec) -> None:
            made[name] = await self._upload_weight(elements, spec)

        try:
            for name, (elements, spec) in wanted.items():
                while len(running) >= _MOST_AT_A_TIME or (
                    running and sum(running.values()) + spec.nbytes > _MOST_BYTES_AT_A_TIME
                ):
                    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.gather(*done)  # raises the error of the upload that failed
                    running = {task: nbytes for task, nbytes in running.items() if task not in done}
                running[asyncio.ensure_future(upload(name, elements, spec))] = spec.nbytes
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _upload_weight(self, weight: Weight, spec: TensorSpec) -> BufferRef:
        array = await in_own_thread(values_of, weight) if callable(weight) else weight
        if array.dtype != spec.dtype.numpy:
            array = await in_own_thread(round_to, array, spec.dtype)
        shared = not getattr(self._keeping.source, "swappable", False)
        upload = partial(self._gpu._upload_weight, array, spec, shared=shared)
        return await self._with_room(spec.nbytes, upload)

    async def _with_room(self, nbytes: int, make: Callable[[], Awaitable[BufferRef]]) -> BufferRef:
        """Call `make`, which allocates a buffer. If memory is short, give back the places of graphs that no
        run uses, and call it again."""
        while True:
            try:
                return await make()
            except OutOfMemory:
                if not self._keeping.make_room(nbytes):
                    raise


def _key(specs: Mapping[str, TensorSpec], values: Mapping[str, np.ndarray]) -> object:
    return (
        tuple(specs.items()),
        tuple((name, values[name].tobytes()) for name in sorted(values)),
    )
