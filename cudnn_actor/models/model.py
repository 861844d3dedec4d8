"""A model: graphs with weights in buffers of a service, one graph for each set of dims of its inputs.

The file is long because users hold one object, and its parts share a lock: the graphs and weights that are
kept, runs, writes of weights, the replacement by another file, and the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from cudnn_actor.actors import Deadline, forks, within
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.models.inputs import Values, checked_inputs, named_once, spec_of
from cudnn_actor.models.kept_graphs import KeptGraphs
from cudnn_actor.models.loop_locks import LoopLocks
from cudnn_actor.models.rounding import rounded
from cudnn_actor.models.sizes import Sizes, one_set_of_specs, sets_of_specs
from cudnn_actor.models.source import (
    Feature,
    NeedsValues,
    Origin,
    Source,
    Specialised,
    SwappableSource,
    fixed_specs,
)
from cudnn_actor.models.weights import checked_weights, derived, specs_of
from cudnn_actor.plan_store.cache import CAPACITY
from cudnn_actor.protocol.errors import CudnnActorError, InvalidRequest, NotDeployed, OutOfMemory, Words
from cudnn_actor.protocol.graphs.explanation import Explanation
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.messages.messages import (
    Allocate,
    LendStaging,
    RunModel,
    WarmModel,
    WriteWeights,
)
from cudnn_actor.protocol.messages.model_messages import ModelGraph, ModelRef
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Model"]

Unload = Callable[[ModelRef, tuple[str, ...] | None], None]
"""Has the service forget graphs of a model by their names, or all, without waiting."""

_MOST_DEPLOYED = 8
"""How often a run may find that its graph has been forgotten."""
_Method = TypeVar("_Method", bound=Callable[..., Coroutine[Any, Any, Any]])

MOST_KEPT = 64
"""How many specialised graphs a model keeps."""


class _Replaced(Exception):
    """Raised where a model has been replaced, before anything was sent for a call: it is made anew."""


class _Outdated(Exception):
    """Raised when weights were overwritten while a graph was imported with the earlier ones."""


def _of_latest(method: _Method) -> _Method:
    """A method that the model which has replaced this one runs instead."""

    @functools.wraps(method)
    async def call(self: Model, *args: Any, **kwargs: Any) -> Any:
        while True:
            with contextlib.suppress(_Replaced):
                return await method(self._latest(), *args, **kwargs)

    return call  # type: ignore[return-value]  # it has the same signature


@dataclass(eq=False)
class _Kept:
    """A specialised graph that a model keeps, and how many runs use it now.

    Parameters
    ----------
    of
        Without the weights' values, which are in buffers.
    names
        The keys of its weights, one for each port that has one.
    specs, values
        The inputs that it is for, and the values of those that decide over shapes.
    weights
        Ports → buffers.
    name
        Its name in the service's model.
    places
        Ports → the buffers of a run's inputs and outputs.
    sent
        What the service is sent of it; None until it has places.
    deployed
        Whether the service has it.
    """

    of: Specialised
    names: tuple[str, ...]
    name: str
    specs: dict[str, TensorSpec]
    values: dict[str, np.ndarray]
    weights: dict[str, BufferRef] = field(default_factory=dict)
    places: dict[str, BufferRef] = field(default_factory=dict)
    sent: ModelGraph | None = None
    deployed: bool = False
    runs: int = 0

    @property
    def graph(self) -> Graph | None:
        return self.of.graph

    def place(self, places: dict[str, BufferRef]) -> None:
        """Give it places."""
        of, graph = self.of, self.graph
        assert graph is not None
        self.places = places
        buffers = {**self.weights, **places}
        self.sent = ModelGraph(
            name=self.name,
            graph=graph,
            buffers=tuple(buffers[port] for port in graph.places),
            specs=self.specs,
            inputs=dict(of.inputs),
            outputs=dict(of.outputs),
            values=self.values,
            constants=dict(of.constants),
            draws=of.random,
        )

    @property
    def nbytes(self) -> int:
        """About the bytes of host memory that it takes."""
        graph = 0 if self.graph is None else self.graph.footprint
        return graph + sum(array.nbytes for array in self.of.constants.values())


class Model:
    """A model that a service runs. Made by `CudnnRef.load`, and run by `CudnnRef.run`.

    Any number of tasks may run it at a time. Its weights stay in buffers of the service until `close`. If it
    is collected before that, they are freed too, with a `ResourceWarning`.

    Parameters
    ----------
    gpu
        The `CudnnRef` of the service.
    ref
        The model in the service, by which messages name it.
    source
        What it is made from.
    unload
        Has the service forget graphs of a model, or all, without waiting.
    discard
        Frees a buffer without waiting.
    values
        Makes an array of what a user gives. Raises `InvalidRequest`.
    most_operations
        How many a graph of the service may have.
    graphs
        The graphs of all models of the service, and how much this one's may take.
    """

    def __init__(
        self,
        gpu: Any,
        ref: ModelRef,
        source: Source,
        values: Values,
        *,
        discard: Callable[[BufferRef], None],
        unload: Unload,
        most_operations: int,
        graphs: KeptGraphs,
    ) -> None:
        self._most_operations = most_operations
        self._ref = ref
        self._successor: Model | None = None
        """What has replaced it and does all that it is asked for; None for nothing."""
        self._gpu = gpu
        self._source = source
        self._discard = discard
        self._unload = unload
        self._values = values
        self._graphs = graphs
        self._lock = threading.RLock()
        """Guards what follows; held for moments only."""
        self._kept: OrderedDict[object, _Kept] = OrderedDict()
        self._past: deque[str] = deque(maxlen=CAPACITY)
        """Digests of the graphs that it has dropped lately to make room. The service may have their plans."""
        self._weights: dict[str, tuple[BufferRef, int]] = {}
        """Weights by key: the buffer, and how many of the kept graphs use it."""
        self._numbers = itertools.count(1)
        """Numbers for the names of its graphs."""
        self._deciding: set[str] = set()
        """Inputs whose values have decided over shapes."""
        self._locks = LoopLocks()
        """To import and upload: what one task of an event loop has made, the next ones use. Tasks of other
        loops may do the same work at the same time; see `_keep`."""
        self._origins: dict[str, Origin] = {}
        """Keys of weights that may be overwritten → what they are computed from."""
        self._decided: set[str] = set()
        """Initialisers whose values are part of a graph."""
        self._writing: Future[None] | None = None
        """The write that is under way, of any event loop; None for none. Graphs are not added meanwhile."""
        self._writes = 0
        """How many writes have begun."""
        self._unsure: dict[str, np.ndarray] = {}
        """What a write has sent whose caller was cancelled, or waited no longer: the service may have taken
        it, or not. It is sent again before a graph is added, and with the next write."""
        self._closed = False
        forks.watch(self)
        graphs.add(self._kept)
        given = (self._weights, self._kept, self._past, repr(self))
        forks.finalize(self, _dropped, gpu, ref, (discard, unload), graphs, given).atexit = False

    def forget_parent(self) -> None:
        """Take a new lock in a forked child. The service refuses its requests there."""
        self._lock = threading.RLock()

    @property
    def ref(self) -> ModelRef:
        """Its reference, for messages: `RunModel(model=model.ref, ...)`, from pykka actors for example. It
        gets another when it is replaced."""
        return self._latest()._ref

    @property
    def inputs(self) -> tuple[Feature, ...]:
        """The inputs that have to be given, in order."""
        return self._source.inputs

    @property
    def defaults(self) -> tuple[Feature, ...]:
        """The inputs that may be given, and have a default in the model, in order."""
        return self._source.defaults

    @property
    def outputs(self) -> tuple[Feature, ...]:
        """The outputs, in order."""
        return self._source.outputs

    def __repr__(self) -> str:
        return f"<model: {', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}>"

    def belongs_to(self, service: object) -> bool:
        """Whether a service has loaded it."""
        return self._gpu.is_of(service)  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """Bytes that its weights take in the service now; 0 before the first run, warm-up or explanation."""
        latest = self._latest()
        with latest._lock:
            return sum(ref.nbytes for ref, _ in latest._weights.values())

    @property
    def fixed(self) -> bool:
        """Whether each dim of each input is a number."""
        return fixed_specs(self.inputs) is not None

    async def __aenter__(self) -> Model:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @_of_latest
    async def prepare(self, deadline: Deadline) -> None:
        """Import the model and upload its weights now, if its inputs have fixed dims. Raises as `run`."""
        specs = fixed_specs(self.inputs)
        if specs is None:
            return
        try:
            kept = await self._acquire(specs, {}, deadline)
        except NeedsValues:
            return
        self._release(kept)

    async def run(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        keep: Collection[str] = (),
        timeout: float | None = None,
        **named: Any,
    ) -> dict[str, Any]:
        """See `CudnnRef.run`: `run(image=x)`, or `run({"image": x})`."""
        given = self.validated(named_once(inputs, named), keep)
        with within(timeout) as deadline:
            return await self.run_checked(given, deadline, keep=keep)

    def validated(
        self, inputs: Mapping[str, Any], keep: Collection[str] = ()
    ) -> dict[str, BufferRef | np.ndarray]:
        """The inputs of a run as references and arrays, by name. Raises `InvalidRequest`."""
        return checked_inputs(self._source, self._values, inputs, keep)

    @_of_latest
    async def run_checked(
        self,
        given: Mapping[str, BufferRef | np.ndarray],
        deadline: Deadline,
        *,
        keep: Collection[str] = (),
        again: bool = True,
        crashes: int = 0,
    ) -> dict[str, Any]:
        """Run it with inputs that `validated` has returned. `again` and `crashes` are those of `RunModel`."""
        specs = {name: spec_of(value) for name, value in given.items()}
        kept = await self._acquire(specs, given, deadline)
        try:
            return await self._run(kept, given, keep, deadline, again=again, crashes=crashes)
        finally:
            self._release(kept)

    async def lend(self, specs: Mapping[str, TensorSpec]) -> dict[str, np.ndarray]:
        """Arrays in memory that the device reads without another copy: see `LendStaging`."""
        return {name: await self._gpu.ask(LendStaging(spec=spec)) for name, spec in specs.items()}

    @_of_latest
    async def reserve(self, specs: Mapping[str, TensorSpec], deadline: Deadline) -> Callable[[], None]:
        """Warm it for inputs of these specs, and keep the graph. Returns what ends that, once called.

        Raises as `warm`.
        """
        kept = await self._acquire_or_refuse(specs, {}, deadline)
        try:
            await self._deploy(kept, deadline)
        except BaseException:
            self._release(kept)
            raise
        return partial(self._release, kept)

    async def warm(
        self, sizes: Mapping[str, Sizes] | None = None, /, *, timeout: float | None = None, **named: Sizes
    ) -> int:
        """Import the model for these sizes of its named dims, upload its weights, and build the plans.

        `warm(N=8)`, or `warm(N=(1, 8, 32))` for several; of several dims, every combination. A run with such
        dims then imports and builds nothing. Returns how many plans were newly built.

        Parameters
        ----------
        sizes, named
            Sizes of all the named dims of its inputs: whole numbers from 0 on. A dim that is named `timeout`
            stands in `sizes`. None for a model whose inputs have numbers alone.
        timeout
            Seconds for all of it.

        Raises
        ------
        InvalidRequest
            A name is missing or unknown, a size is no whole number, an input has dims without a name or
            decides over shapes by its values, or there are more than 64 combinations.
        UnsupportedModel
            Nodes cannot be run with these dims.
        CudnnActorError
            As `CudnnRef.warm`. A plan that cannot be built is reported by the first run.
        """
        sets = sets_of_specs(self.inputs, named_once(sizes, named), MOST_KEPT)
        with within(timeout) as deadline:
            return sum([await self._warmed(specs, deadline) for specs in sets])

    @_of_latest
    async def _warmed(self, specs: Mapping[str, TensorSpec], deadline: Deadline) -> int:
        kept = await self._acquire_or_refuse(specs, {}, deadline)
        try:
            return await self._deploy(kept, deadline)
        finally:
            self._release(kept)

    @property
    def weights(self) -> dict[str, TensorSpec]:
        """The weights that `write` takes: names and specs, as in the file. Raises as `write`.

        Those whose values are found to decide over shapes, axes or factors, as graphs are imported, are not
        among them.
        """
        source, latest = self._swappable(), self._latest()
        with latest._lock:
            return specs_of(source.tensors, latest._decided)

    @_of_latest
    async def write(self, weights: Mapping[str, Any], *, timeout: float | None = None) -> None:
        """Overwrite weights, all of them or none, between two runs: no run sees a mixture.

        Runs that were sent before are answered with the old weights, and later ones with the new, for all
        dims. What the model computes from constants alone is computed again. A crash changes none of this.

        Parameters
        ----------
        weights
            Arrays on the host by the names of the file's initialisers, of their dims and dtypes. They are
            copied. In a model that was loaded with a dtype, they are rounded as by `load`.
        timeout
            Seconds for all of it. After `DeadlineExceeded` that says that it had started, or if it is
            cancelled, the weights may be overwritten yet.

        Raises
        ------
        InvalidRequest
            The model was not loaded with `swappable=True`, a name is no weight or decides over shapes, or
            dims or dtype are others. Nothing was written.
        CudnnActorError
            As `ask`. A write that ends two workers leaves the weights torn: load the model again.
        """
        source = self._swappable()
        given = checked_weights(source.tensors, self._decided, self._values, weights)
        with within(timeout) as deadline:
            await self._write(given, deadline)

    @property
    def swappable(self) -> bool:
        """Whether its weights may be overwritten."""
        return bool(getattr(self._source, "swappable", False))

    def _swappable(self) -> SwappableSource:
        if not self.swappable:
            raise InvalidRequest(
                field="model",
                value=self,
                problem="was loaded without swappable=True, so its weights are not kept apart",
                fix="load it so: await gpu.load(path, swappable=True)",
            )
        return self._source  # type: ignore[return-value]

    async def _write(self, given: Mapping[str, np.ndarray], deadline: Deadline) -> None:
        async with self._writing_alone(deadline):
            with self._lock:
                kept = tuple(self._kept.values())
                for each in kept:  # it, and its weights, are not given back meanwhile
                    each.runs += 1
            try:
                await self._write_all({**self._unsure, **given}, deadline)
            finally:
                for each in kept:
                    self._release(each)

    @contextlib.asynccontextmanager
    async def _writing_alone(self, deadline: Deadline) -> AsyncIterator[None]:
        """Wait for the write that is under way, if there is one, and let no other begin within the block."""
        while True:
            with self._lock:
                self._check_open()
                other = self._writing
                if other is None:
                    mine = self._writing = Future()
                    self._writes += 1
                    break
            await self._ended(other, deadline)
        try:
            yield
        finally:
            with self._lock:
                self._writing = None
            mine.set_result(None)

    async def _ended(self, writing: Future[None], deadline: Deadline) -> None:
        async with deadline.limiting():
            await asyncio.shield(asyncio.wrap_future(writing))

    async def _write_all(self, given: Mapping[str, np.ndarray], deadline: Deadline) -> None:
        source = self._swappable().with_tensors(given)
        chosen = [
            (self._weights[key][0], origin)
            for key, origin in self._origins.items()
            if not origin.names.isdisjoint(given)
        ]
        arrays = await in_own_thread(_computed, chosen, source.tensors)
        if chosen:
            refs = tuple(ref for ref, _ in chosen)
            message = WriteWeights(model=self._ref, buffers=refs, values=tuple(arrays))
            try:
                await self._gpu.ask(message, timeout=deadline.left_s)
            except BaseException as error:
                if not isinstance(error, CudnnActorError) or error.ran is not False:
                    self._unsure = dict(given)
                raise
        self._source, self._unsure = source, {}

    @contextlib.asynccontextmanager
    async def _unwritten(self, deadline: Deadline, *, alone: bool) -> AsyncIterator[int]:
        """Wait until no write is under way, and finish one that may have been taken or not. Gives `_writes`.

        `alone`: no write begins within the block. Else many writes could make a long import outdated again
        and again.
        """
        while True:
            with self._lock:
                writing, unsure = self._writing, self._unsure
                if writing is None and not unsure:
                    writes = self._writes
                    break
            if writing is not None:
                await self._ended(writing, deadline)
            else:
                await self._write({}, deadline)
        if alone:
            async with self._writing_alone(deadline):
                if self._unsure:
                    await self._write_all(self._unsure, deadline)
                yield self._writes
        else:
            yield writes

    @_of_latest
    async def explain(
        self,
        inputs: Mapping[str, Any] | None = None,
        *,
        measure: bool = False,
        timeout: float | None = None,
        **sizes: int,
    ) -> Explanation:
        """How the service runs the model, and with `measure` how long each piece takes: `CudnnRef.explain`.

        Parameters
        ----------
        inputs
            As for `run`. Not needed if no input's values decide over shapes, and if each input's dims are
            numbers, or names whose sizes are given.
        measure, timeout
            As for `CudnnRef.explain`.
        sizes
            Sizes of the named dims in place of inputs: `explain(N=8)`.

        Raises the same as `CudnnRef.explain`, and as `run` for inputs.
        """
        given: dict[str, Any] = {}
        if inputs is None and (sizes or self.fixed):
            specs = one_set_of_specs(self.inputs, sizes)
        else:
            given = checked_inputs(self._source, self._values, {} if inputs is None else inputs)
            specs = {name: spec_of(value) for name, value in given.items()}
        with within(timeout) as deadline:
            kept = await self._acquire_or_refuse(specs, given, deadline)
            try:
                return await self._explained(kept.of, deadline, measure=measure)
            finally:
                self._release(kept)

    async def _acquire_or_refuse(
        self, specs: Mapping[str, TensorSpec], given: Mapping[str, Any], deadline: Deadline
    ) -> _Kept:
        """The same as `_acquire`; raises `InvalidRequest` if values of inputs are needed."""
        try:
            return await self._acquire(specs, given, deadline)
        except NeedsValues as needs:
            raise InvalidRequest(
                field="inputs", value=None, problem=f"must be given: {needs}", fix="pass them as for run"
            ) from needs

    async def _explained(self, of: Specialised, deadline: Deadline, *, measure: bool) -> Explanation:
        if of.graph is None:
            raise InvalidRequest(
                field="model",
                value=self,
                problem="has outputs that are constants, so that nothing is computed",
                fix="run it: there is nothing to explain",
            )
        explanation: Explanation = await self._gpu.explain(of.graph, measure=measure, timeout=deadline.left_s)
        return explanation

    async def close(self) -> None:
        """Free the weights, and drop the graphs and their plans, once no run needs them.

        Idempotent; running it afterwards is an error.
        """
        self.end()

    def end(self) -> None:
        """The same as `close`, from any thread, also by the collector."""
        self._latest()._end()

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            unused = self._evicted()
        self._give_back(*unused)

    # Its replacement.

    def _latest(self) -> Model:
        """What has replaced it last; else it itself."""
        return self if self._successor is None else self._successor._latest()

    async def replaceable_by(self, other: Model, deadline: Deadline) -> None:
        """Warm another model for all dims that this one has graphs for.

        Raises `InvalidRequest` if inputs or outputs differ, and as `run`.
        """
        for what in ("inputs", "defaults", "outputs"):
            mine, given = getattr(self, what), getattr(other, what)
            if mine != given:
                raise InvalidRequest(
                    field="model",
                    value=Words(", ".join(map(str, given)) or f"no {what}"),
                    problem=f"are not the {what} of the model that is to be replaced, "
                    f"{', '.join(map(str, mine)) or 'none'}",
                    fix="load it as a model of its own",
                )
        latest = self._latest()
        with latest._lock:
            latest._check_open()
            wanted = [(kept.specs, kept.values) for kept in latest._kept.values()]
        for specs, values in wanted:
            kept = await other._acquire(specs, values, deadline)
            try:
                await other._deploy(kept, deadline)
            finally:
                other._release(kept)

    def replace_by(self, other: Model) -> None:
        """Have another model do all that this one is asked for from now on. Runs that have begun finish, and
        then what this one has is given back. Any thread."""
        latest = self._latest()
        with latest._lock:
            latest._check_open()
            # One step for whoever asks from now on: it finds the other, which is warm.
            latest._successor = other
        self._successor = other  # so that nothing in between is kept
        self._source = other._source
        latest._end()

    # One run.

    async def _run(
        self,
        kept: _Kept,
        given: Mapping[str, Any],
        keep: Collection[str],
        deadline: Deadline,
        *,
        again: bool,
        crashes: int,
    ) -> dict[str, Any]:
        constants, graph, ask = kept.of.constants, kept.graph, self._gpu.ask
        made: dict[str, BufferRef] = {}
        try:
            for name in keep:
                if name in constants:
                    made[name] = await self._gpu.upload(constants[name], timeout=deadline.left_s)
                else:
                    assert graph is not None
                    spec = graph.ports[graph.places[kept.of.outputs[name]]].spec
                    made[name] = await ask(Allocate(spec=spec), timeout=deadline.left_s)
            if graph is None:
                results = {name: array.copy() for name, array in constants.items()}
            else:
                into = {name: ref for name, ref in made.items() if name not in constants}
                message = RunModel.of(self._ref, {**given, **kept.values}, into, again=again, crashes=crashes)
                results = await self._answer(kept, message, deadline)
            kept_ones, made = made, {}
            return {each.name: {**results, **kept_ones}[each.name] for each in self.outputs}
        finally:
            for ref in made.values():
                self._discard(ref)

    async def _answer(self, kept: _Kept, message: RunModel, deadline: Deadline) -> dict[str, np.ndarray]:
        """The answer to a run.

        If the service had to forget the graph, because a worker that could not be ended may still write its
        places, the graph gets new ones and is deployed again.
        """
        tries = 0
        while True:
            tries += 1
            if not kept.deployed:
                await self._deploy(kept, deadline)
            deployed = kept.sent
            try:
                results: dict[str, np.ndarray] = await self._gpu.ask(message, timeout=deadline.left_s)
            except NotDeployed as error:
                if error.unloaded or tries == _MOST_DEPLOYED:
                    raise
                with self._lock:
                    places: dict[str, BufferRef] = {}
                    if kept.sent is deployed:  # else another task has deployed it again
                        kept.deployed, kept.sent = False, None
                        places, kept.places = kept.places, {}
                for ref in places.values():
                    self._discard(ref)
            else:
                return results

    async def _deploy(self, kept: _Kept, deadline: Deadline) -> int:
        """Allocate the places of a graph if it has none, and have the service build its plan.

        Returns how many plans were built.
        """
        if kept.graph is None:
            return 0
        if kept.sent is None:
            async with deadline.limiting(), self._locks.of_running_loop():
                if kept.sent is None:
                    await self._allocate(kept, deadline)
        sent = kept.sent
        assert sent is not None
        built: int = await self._gpu.ask(WarmModel(model=self._ref, graphs=(sent,)), timeout=deadline.left_s)
        kept.deployed = kept.sent is sent
        return built

    async def _allocate(self, kept: _Kept, deadline: Deadline) -> None:
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
                    made[port.name] = await self._gpu.ask(Allocate(spec=port.spec), timeout=deadline.left_s)
                except OutOfMemory as error:
                    raise error.at(error.operations, names.get(port.name, port.name)) from error
            with self._lock:
                if kept.sent is None:  # a task of another loop may have been faster
                    kept.place(made)
                    made = {}
        finally:
            for ref in made.values():
                self._discard(ref)

    # Specialised graphs and weights.
    #
    # A run counts from `_found` or `_bound` until `_release`, and awaits nothing between them but in a
    # `try`: so it is released however it ends. A weight belongs to `made` from the moment `upload` returns
    # it until `_bound` takes it out; else it is discarded. `upload` itself frees what it cannot return. What
    # is awaited may change all else, so `_found` and `_bound` look again, under the lock.

    async def _acquire(
        self, specs: Mapping[str, TensorSpec], given: Mapping[str, Any], deadline: Deadline
    ) -> _Kept:
        """The graph for these inputs, with its weights uploaded. It is kept until `_release` at least."""
        outdated = False
        while True:
            with self._lock:
                self._check_open()
                deciding = frozenset(self._deciding)
            left_out = {each.name for each in self.defaults} - specs.keys()
            values = {name: await self._value(given, name, deadline) for name in deciding - left_out}
            key = _key(specs, values)
            if (kept := self._found(key)) is not None:
                return kept
            async with deadline.limiting(), self._locks.of_running_loop():
                if (kept := self._found(key)) is not None:
                    return kept
                try:
                    async with self._unwritten(deadline, alone=outdated) as writes:
                        of = await in_own_thread(
                            self._source.specialised, specs, values, self._most_operations
                        )
                        return await self._keep(key, of, specs, values, writes)
                except _Outdated:
                    outdated = True
                except NeedsValues as needs:
                    if not needs.names <= given.keys() or needs.names <= deciding:
                        raise
                    with self._lock:
                        self._deciding |= needs.names

    def _found(self, key: object) -> _Kept | None:
        """The graph that is kept for a key, for one more run; None if there is none."""
        with self._lock:
            self._check_open()
            kept = self._kept.get(key)
            if kept is not None:
                kept.runs += 1
                self._kept.move_to_end(key)
            return kept

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
    ) -> _Kept:
        """Upload the weights that are not there yet, and keep the graph.

        Raises `OutOfMemory` that says how many bytes they take together, and `_Outdated`. `writes`: how many
        had begun when the source of these weights was looked up.
        """
        made: dict[str, BufferRef] = {}
        ports = {} if of.graph is None else {port.name: port.spec for port in of.graph.inputs}
        try:
            while (kept := self._bound(key, of, made, specs, values, writes=writes)) is None:
                for port, (name, array) in of.weights.items():
                    if name not in made and name not in self._weights:
                        made[name] = await self._upload_weight(array, ports[port])
        except OutOfMemory as error:
            missing = {name: port for port, (name, _) in of.weights.items() if name not in self._weights}
            nbytes = sum(ports[port].nbytes for port in missing.values())
            others = error.in_use - sum(ref.nbytes for ref in made.values())
            raise error.as_part_of(nbytes, in_use=max(0, others), where="the model's weights") from error
        finally:  # what another run uploaded as well is left
            for ref in made.values():
                self._discard(ref)
        return kept

    async def _upload_weight(self, array: np.ndarray, spec: TensorSpec) -> BufferRef:
        if array.dtype != spec.dtype.numpy:
            array = await in_own_thread(rounded, array, spec.dtype)
        ref: BufferRef = await self._gpu.upload(array, layout=spec.layout)
        return ref

    def _bound(
        self,
        key: object,
        of: Specialised,
        made: dict[str, BufferRef],
        specs: Mapping[str, TensorSpec],
        values: Mapping[str, np.ndarray],
        *,
        writes: int,
    ) -> _Kept | None:
        """Keep the graph, with weights that are there or in `made`; None if one is missing."""
        with self._lock:
            self._check_open()
            if writes != self._writes:
                raise _Outdated
            if key not in self._kept:
                if any(name not in self._weights and name not in made for name, _ in of.weights.values()):
                    return None
                names = tuple(name for name, _ in of.weights.values())
                kept = self._kept[key] = _Kept(
                    replace(of, weights={}, origins={}),
                    names,
                    str(next(self._numbers)),
                    dict(specs),
                    dict(values),
                )
                for port, (name, _) in of.weights.items():
                    ref, users = self._weights.get(name) or (made.pop(name), 0)
                    self._weights[name] = ref, users + 1
                    kept.weights[port] = ref
                self._origins.update(of.origins)
                self._decided |= of.decided_by
            return self._found(key)

    def _release(self, kept: _Kept) -> None:
        with self._lock:
            kept.runs -= 1
            unused = self._evicted()
        self._give_back(*unused)

    def _evicted(self) -> tuple[list[_Kept], list[BufferRef]]:
        """Forget idle graphs over the bounds, or all once closed. Returns them, and the buffers that none
        needs."""
        evicted: list[_Kept] = []
        unused: list[BufferRef] = []
        nbytes = sum(kept.nbytes for kept in self._kept.values())
        for key in [key for key, kept in self._kept.items() if not kept.runs]:
            if not self._closed and (
                len(self._kept) == 1 or (len(self._kept) <= MOST_KEPT and nbytes <= self._graphs.limit)
            ):
                break
            kept = self._kept.pop(key)
            nbytes -= kept.nbytes
            evicted.append(kept)
            unused += kept.places.values()
            for name in kept.names:
                ref, users = self._weights[name]
                self._weights[name] = ref, users - 1
                if users == 1:
                    self._origins.pop(name, None)
                    unused.append(self._weights.pop(name)[0])
        return evicted, unused

    def _give_back(self, evicted: list[_Kept], refs: list[BufferRef]) -> None:
        """Free buffers, and drop graphs from the service's caches; those of a closed model with their
        plans."""
        if self._closed and not self._kept:
            self._unload(self._ref, None)
        elif evicted:
            self._unload(self._ref, tuple(kept.name for kept in evicted))
        for ref in refs:
            self._discard(ref)
        graphs = [kept.graph for kept in evicted if kept.graph is not None]
        digests = [graph.body.digest() for graph in graphs]
        if not self._closed:
            self._past.extend(digests)
            self._graphs.release(graphs, ())
            return
        if not self._kept:
            self._graphs.remove(self._kept)
        self._graphs.release(graphs, [*digests, *self._past])
        self._past.clear()

    def _check_open(self) -> None:
        if self._successor is not None:
            raise _Replaced
        if self._closed:
            raise InvalidRequest(field="model", value=self, problem="is closed", fix="load it again")


def _dropped(
    gpu: Any,
    ref: ModelRef,
    give_back: tuple[Callable[[BufferRef], None], Unload],
    graphs: KeptGraphs,
    left: tuple[Mapping[str, tuple[BufferRef, int]], Mapping[object, _Kept], Collection[str], str],
) -> None:
    """Give back what a model kept that nobody can close any more. Any thread, also by the collector."""
    discard, unload = give_back
    weights, kept, past, shown = left
    unload(ref, None)
    for buffer, _ in weights.values():
        discard(buffer)
    for each in kept.values():
        for buffer in each.places.values():
            discard(buffer)
    graphs.remove(kept)
    left_graphs = [each.graph for each in kept.values() if each.graph is not None]
    graphs.release(left_graphs, [*(graph.body.digest() for graph in left_graphs), *past])
    if weights and gpu.alive:
        warnings.warn(f"unclosed {shown}: use `await model.close()`", ResourceWarning, stacklevel=2)


def _key(specs: Mapping[str, TensorSpec], values: Mapping[str, np.ndarray]) -> object:
    return (
        tuple(specs.items()),
        tuple((name, values[name].tobytes()) for name in sorted(values)),
    )


def _computed(
    chosen: Collection[tuple[BufferRef, Origin]], tensors: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
    """The values of weights, each in its buffer's dtype. Raises `InvalidRequest`."""
    known: dict[str, Any] = {}
    return [rounded(derived(origin, ref.spec, tensors, known), ref.spec.dtype) for ref, origin in chosen]
