"""The models of a service: which graphs each has, and the buffers that these run on.

Written by the broker alone, in its turns. Any sender's thread may look up what a run needs (`run_of`): each
change of what it reads there is one step. What was found may have been unloaded by the time the request
starts, so the broker looks at `Deployed.ended` then.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import numpy as np

from cudnn_actor.broker.footprints import Footprint, compute_footprint
from cudnn_actor.broker.message_cache import Bound, CachedMessage
from cudnn_actor.memory import MemoryTable, SharedHold, Slot
from cudnn_actor.protocol.errors import InvalidRequest, NotDeployed, StaleBufferError, StaleReason, Words
from cudnn_actor.protocol.messages.message_checks import check_model_graph, check_run_model, check_write
from cudnn_actor.protocol.messages.messages import Compute, RunGraph, RunModel, WriteWeights
from cudnn_actor.protocol.messages.model_messages import ModelGraph, ModelRef
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import require_type
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["MOST_GRAPHS", "Deployed", "Deployments", "ModelRun", "not_deployed"]

MOST_GRAPHS = 4096
"""Graphs that all models of a service may have together. Each has buffers of its own, and a record in the
worker."""

Key = frozenset[tuple[str, tuple[int, ...], DType]]
"""The inputs of a run: name, dims and dtype of each."""


class Deployed(msgspec.Struct, eq=False):
    """A graph of a model, with its buffers.

    Parameters
    ----------
    number
        Its number, which no other graph of the service gets.
    of
        The graph as it was given.
    cached
        The `RunGraph` that each run amounts to.
    hold
        The hold on all its buffers.
    inputs, outputs
        Names of inputs and outputs → where their buffers stand among those of the plan.
    state
        Where the buffer of the random numbers' state stands; None if the graph draws none.
    writes
        The slot numbers of the buffers that each run writes.
    ended
        Whether it was unloaded.
    spoiled
        Whether an ended worker may still write its places for inputs and outputs, so that no run may use
        them.
    checked_losses
        `MemoryTable.losses` when its weights were last found whole.
    finished
        Whether a run of it has finished.
    crashes
        At how many crashes runs of it were running since one has finished.
    """

    number: int
    of: ModelGraph
    cached: CachedMessage
    hold: SharedHold
    inputs: dict[str, int]
    outputs: dict[str, int]
    state: int | None
    writes: frozenset[int]
    ended: bool = False
    spoiled: bool = False
    checked_losses: int = -1
    finished: bool = False
    crashes: int = 0
    kinds: tuple[tuple[str, tuple[int, ...], np.dtype[Any], DType], ...] = ()
    """Name, dims and dtype of each input: what `of.specs` says, in the form in which runs are compared with
    it."""
    uses: frozenset[int] = frozenset()
    """The slot numbers of all its buffers."""

    def __post_init__(self) -> None:
        """Note what inputs it is for, and what it uses."""
        self.uses = frozenset([ref.slot for ref in self.of.buffers])
        self.kinds = tuple(
            (name, spec.dims, spec.dtype.numpy, spec.dtype) for name, spec in self.of.specs.items()
        )

    @property
    def copied(self) -> frozenset[int]:
        """Where the buffers stand among those of the plan to which runs copy what they are given."""
        return frozenset(self.inputs.values()) | (frozenset() if self.state is None else {self.state})

    @property
    def weights(self) -> frozenset[int]:
        """The slot numbers of the buffers that runs only read."""
        return frozenset(slot.index for slot in self.hold.slots) - self.writes

    def is_for(self, message: RunModel) -> bool:
        """Whether a run with these inputs runs this graph, unless another one is for the same inputs."""
        arrays, buffers = message.arrays, message.buffers
        if len(arrays) + len(buffers) != len(self.kinds):
            return False
        for name, dims, dtype, member in self.kinds:
            if (array := arrays.get(name)) is not None:
                if array.shape != dims or array.dtype != dtype:
                    return False
            elif (ref := buffers.get(name)) is None or ref.spec.dims != dims or ref.spec.dtype is not member:
                return False
        return not self.of.values or self.accepts(arrays)

    def accepts(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Whether it is the graph for these values, of those that are for inputs of the same specs.

        They are compared by their bits: a NaN is equal to itself.
        """
        return all(
            name in arrays and arrays[name].tobytes() == value.tobytes()
            for name, value in self.of.values.items()
        )

    def spec_at(self, place: int) -> TensorSpec:
        """The spec of the buffer that stands at a place among those of the plan."""
        graph = self.of.graph
        return graph.ports[graph.places[self.cached.lowered.buffers[place]]].spec

    def bind(self, memory: MemoryTable) -> None:
        """Set what its graph runs on: the slots that it holds. They stay, whatever becomes of their
        references."""
        if self.cached.bound is None or self.cached.bound.epoch != memory.epoch:
            by_port = dict(zip(self.of.graph.places, self.hold.slots, strict=True))
            slots = [by_port[port] for port in self.cached.lowered.buffers]
            self.cached.bound = Bound(memory.epoch, slots, [])

    def arrays_of(self, message: RunModel, drawn: int | None) -> list[tuple[int, np.ndarray]]:
        """What a run copies from the host: where each buffer stands among the plan's, and its values.

        Raises `InvalidRequest` for an array that does not fit any more: it, or the message, was changed after
        it was sent.
        """
        arrays: list[tuple[int, np.ndarray]] = []
        given = message.buffers
        for name, place in self.inputs.items():
            if name not in given:
                array, spec = message.arrays.get(name), self.of.specs[name]
                if not isinstance(array, np.ndarray) or not _fits(array, spec):
                    raise _changed(name, array, spec)
                arrays.append((place, array))
        if self.state is not None:
            assert self.of.draws is not None
            arrays.append((self.state, np.array([self.of.draws.seed, drawn])))
        return arrays

    def finish(self, computed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Note that a run has finished. Returns its answer: what was computed, and copies of constants."""
        self.finished, self.crashes = True, 0
        for name, array in self.of.constants.items():
            computed[name] = array.copy()
        return computed


class ModelRun(msgspec.Struct, eq=False):
    """What is known of a `RunModel` before it runs: kept in `Envelope.found`, so also when it runs again.

    Parameters
    ----------
    cached
        The `RunGraph` that it amounts to.
    reads, writes
        Slot numbers of the buffers that it names itself: inputs, and outputs with buffers of the caller's.
    deployed
        The graph; None in a worker, which knows it by its number.
    buffers, into
        The inputs that lie in buffers, and the outputs that go to some, by name.
    drawn
        How many random numbers the model's earlier runs have drawn; None until it first begins.
    epoch, slots
        What `Deployments.slots` has found, and the epoch of the memory in which that holds.
    """

    cached: CachedMessage
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    deployed: Deployed | None = None
    buffers: tuple[tuple[str, BufferRef], ...] = ()
    into: tuple[tuple[str, BufferRef], ...] = ()
    drawn: int | None = None
    epoch: int = -1
    slots: tuple[Slot, ...] = ()

    @property
    def copy_in(self) -> tuple[tuple[int, BufferRef], ...]:
        """What it copies from buffers: where each goes among the plan's."""
        assert self.deployed is not None
        places = self.deployed.inputs
        return tuple([(places[name], ref) for name, ref in self.buffers if name in places])

    @property
    def copy_out(self) -> tuple[tuple[int, BufferRef], ...]:
        """What it copies to buffers, likewise."""
        assert self.deployed is not None
        places = self.deployed.outputs
        return tuple([(places[name], ref) for name, ref in self.into])

    @property
    def returned(self) -> dict[str, int]:
        """The outputs that its caller gets as arrays: where the buffer of each stands."""
        assert self.deployed is not None
        outputs = self.deployed.outputs
        if not self.into:
            return outputs
        kept = {name for name, _ in self.into}
        return {name: place for name, place in outputs.items() if name not in kept}

    @property
    def spoiled(self) -> bool:
        """Whether its graph's places may not be used any more."""
        return self.deployed is not None and self.deployed.spoiled

    @property
    def hazards(self) -> Footprint:
        """What it reads and writes, its graph's own places for inputs and outputs included."""
        reads, writes = compute_footprint(self.cached.message, self.cached.lowered)
        return Footprint({*reads, *self.reads}, {*writes, *self.writes})

    @property
    def footprint(self) -> Footprint:
        """What it reads and writes of buffers with lasting contents: a second run depends on these alone."""
        assert self.deployed is not None
        return Footprint(self.deployed.weights.union(self.reads), self.writes)


class _Model:
    def __init__(self, ref: ModelRef) -> None:
        self.ref = ref
        self.graphs: dict[str, Deployed] = {}
        self.by_key: dict[Key, tuple[Deployed, ...]] = {}
        """Replaced in one step whenever `graphs` changes."""
        self.likely: tuple[object, Deployed] | None = None
        """The graph of the latest run, with the `by_key` that it was found in. Any thread replaces it."""
        self.drawn = 0


class Deployments:
    """The models of one service.

    Parameters
    ----------
    memory
        The service's table.
    find
        Checks and lowers a message. Raises `InvalidRequest`.
    """

    def __init__(self, memory: MemoryTable, find: Callable[[Compute], CachedMessage]) -> None:
        self._memory = memory
        self._find = find
        self._service = secrets.randbelow(1 << 62)
        self._models: dict[int, _Model] = {}
        self._model_numbers = itertools.count(1)
        self._graph_numbers = itertools.count(1)
        self._ending: list[Deployed] = []
        """Graphs that were unloaded, as long as runs of them have not been answered."""

    # Any thread.

    def run_of(self, message: RunModel) -> ModelRun:
        """The graph that a message runs.

        Raises `NotDeployed`, and `InvalidRequest` for inputs and outputs that are not the model's.
        """
        check_run_model(message)
        model = self._model(message.model)
        deployed = self._deployed(model, message)
        buffers, into, outputs = message.buffers, message.into, deployed.outputs
        for name in into:
            if name not in outputs:
                raise InvalidRequest(
                    field="into",
                    value=name,
                    problem="is no output that the graph computes",
                    fix=f"use {', '.join(outputs)}",
                )
        return ModelRun(
            deployed.cached,
            tuple([ref.slot for ref in buffers.values()]),
            tuple([ref.slot for ref in into.values()]),
            deployed,
            tuple(buffers.items()),
            tuple(into.items()),
        )

    def check(self, graphs: tuple[ModelGraph, ...]) -> None:
        """Raise `InvalidRequest` or `StaleBufferError` for graphs that cannot be deployed."""
        require_type("graphs", graphs, tuple)
        names: set[str] = set()
        for each in graphs:
            check_model_graph(each)
            if each.name in names:
                raise InvalidRequest(
                    field="graphs",
                    value=Words(f"two graphs {each.name!r}"),
                    problem="have the same name, so that one would replace the other",
                    fix="give each a name of its own",
                )
            names.add(each.name)
            self._find(RunGraph(graph=each.graph, buffers=each.buffers))
            for name, ref in zip(each.graph.places, each.buffers, strict=True):
                self._memory.resolve(ref, name)

    def require(self, ref: ModelRef) -> None:
        """Raise `NotDeployed` unless there is such a model."""
        self._model(ref)

    def _model(self, ref: ModelRef) -> _Model:
        model = self._models.get(ref.number)
        if model is None or ref.service != self._service:
            raise NotDeployed(model=ref.number, inputs="", unloaded=True)
        return model

    @staticmethod
    def _deployed(model: _Model, message: RunModel) -> Deployed:
        by_key, likely = model.by_key, model.likely
        # With another `by_key`, another graph may be for the same inputs.
        if likely is not None and likely[0] is by_key and likely[1].is_for(message):
            return likely[1]
        arrays, buffers = message.arrays, message.buffers
        given = [(name, array.shape, DType.of(array.dtype)) for name, array in arrays.items()]
        given += [(name, ref.spec.dims, ref.spec.dtype) for name, ref in buffers.items()]
        for deployed in by_key.get(frozenset(given), ()):  # type: ignore[arg-type]  # None is in none
            if deployed.accepts(arrays):
                model.likely = by_key, deployed
                return deployed
        raise not_deployed(model.ref, given)

    def all(self) -> tuple[ModelRef, ...]:
        """The models, in the order in which they were made."""
        return tuple(model.ref for model in tuple(self._models.values()))

    # In the broker's turns.

    def deploy(self, graphs: Iterable[ModelGraph]) -> ModelRef:
        """Make a model. Raises as `add`; then there is none."""
        ref = ModelRef(number=next(self._model_numbers), service=self._service)
        self._models[ref.number] = _Model(ref)
        try:
            self.add(ref, graphs)
        except BaseException:
            self._models.pop(ref.number)
            raise
        return ref

    def add(self, ref: ModelRef, graphs: Iterable[ModelGraph]) -> list[Deployed]:
        """Add graphs to a model. Returns those that they replace, which have ended.

        Raises `NotDeployed`, `InvalidRequest`, `StaleBufferError`; then nothing has changed.
        """
        model, graphs = self._model(ref), tuple(graphs)
        fresh = tuple(each for each in graphs if not self._has(model, each))
        self.check(fresh)
        count = sum(len(each.graphs) for each in self._models.values())
        if count + len(fresh) > MOST_GRAPHS:
            raise InvalidRequest(
                field="graphs",
                value=Words(f"{count + len(fresh):,} graphs"),
                problem=f"are more than the {MOST_GRAPHS:,} that models of a service may have together",
                fix="unload some first",
            )
        replaced = [model.graphs[each.name] for each in fresh if each.name in model.graphs]
        self._check_own(fresh, replaced)
        for each in fresh:
            model.graphs[each.name] = self._made(each)
        self._index(model)
        self._end(replaced)
        return replaced

    @staticmethod
    def _has(model: _Model, graph: ModelGraph) -> bool:
        """Whether the model has this very graph: a message that a crash has interrupted is started again."""
        known = model.graphs.get(graph.name)
        return known is not None and known.of is graph

    def deployed(self, ref: ModelRef, graphs: Iterable[ModelGraph]) -> tuple[Deployed, ...]:
        """Those of these graphs that a model has. Raises `NotDeployed`."""
        model = self._model(ref)
        return tuple(model.graphs[each.name] for each in graphs if self._has(model, each))

    def remove(self, ref: ModelRef, names: Iterable[str] | None) -> list[Deployed]:
        """Forget graphs, or the whole model. Returns the graphs that were there, which have ended."""
        model = self._models.get(ref.number)
        if model is None or ref.service != self._service:
            return []
        chosen = tuple(model.graphs) if names is None else names
        removed = [model.graphs.pop(name) for name in chosen if name in model.graphs]
        self._index(model)
        if names is None:
            del self._models[ref.number]
        self._end(removed)
        return removed

    def forget(self, deployed: Deployed) -> bool:
        """Forget a graph. Returns whether it was there."""
        for model in tuple(self._models.values()):
            if model.graphs.get(deployed.of.name) is deployed:
                return bool(self.remove(model.ref, (deployed.of.name,)))
        return False

    def draw(self, run: ModelRun, ref: ModelRef) -> None:
        """Have a run draw its random numbers, if it has not yet. The next runs draw others."""
        assert run.deployed is not None
        if run.drawn is None:
            draws, model = run.deployed.of.draws, self._model(ref)
            run.drawn = model.drawn
            if draws is not None:
                model.drawn = (model.drawn + draws.count) % (1 << 62)

    def check_whole(self, deployed: Deployed) -> None:
        """Raise `StaleBufferError` if a buffer of a graph was torn or lost."""
        losses = self._memory.losses
        if deployed.checked_losses == losses:
            return
        if (number := deployed.hold.first_lost()) is not None:
            ref, name = deployed.of.buffers[number], tuple(deployed.of.graph.places)[number]
            raise StaleBufferError(
                slot=ref.slot, generation=ref.generation, reason=StaleReason.TORN, field=name
            )
        deployed.checked_losses = losses

    def slots(self, run: ModelRun) -> tuple[Slot, ...]:
        """What a request holds: all buffers of its graph, as one hold, and those that it names.

        Unless a buffer has ended since, this is one comparison from the second time on.

        Raises `StaleBufferError`, and `InvalidRequest` for buffers in `into` that do not fit the outputs.
        """
        epoch = self._memory.epoch
        if run.epoch != epoch:
            run.slots = tuple(self._found_slots(run))
            run.epoch = epoch
        return run.slots

    def _found_slots(self, run: ModelRun) -> list[Slot]:
        deployed = run.deployed
        assert deployed is not None
        resolve, ports = self._memory.resolve, deployed.of.graph.ports
        places = deployed.of.graph.places
        slots: list[Slot] = [deployed.hold]
        for name, ref in run.buffers:
            slots.append(resolve(ref, name))
            if ref.slot in deployed.writes:
                raise _of_the_graph(name, ref)
        used = set(run.reads)
        for name, ref in run.into:
            slots.append(resolve(ref, name))
            if ref.slot in used or ref.slot in deployed.uses:
                raise _of_the_graph(name, ref)
            used.add(ref.slot)
            spec = ports[places[deployed.of.outputs[name]]].spec
            if (ref.spec.dims, ref.spec.dtype) != (spec.dims, spec.dtype):
                raise InvalidRequest(
                    field=name,
                    value=Words(ref.spec),
                    problem=f"is not of the output's dims and dtype, {spec.dtype} {spec.dims}",
                    fix="allocate one with these; the layout may differ",
                )
        return slots

    def written_by(self, message: WriteWeights) -> tuple[Slot, ...]:
        """The weights that a message overwrites.

        Raises `NotDeployed`, `InvalidRequest` and `StaleBufferError` for what does not fit.
        """
        check_write(message)
        model = self._model(message.model)
        for number, ref in enumerate(message.buffers):
            if any(ref.slot in deployed.writes for deployed in model.graphs.values()):
                raise InvalidRequest(
                    field=f"buffers[{number}]",
                    value=Words(ref),
                    problem="is no weight: each run of the model writes it",
                    fix="give weights alone",
                )
        resolve = self._memory.resolve
        return tuple(resolve(ref, f"buffers[{number}]") for number, ref in enumerate(message.buffers))

    def are_read(self, slots: AbstractSet[int]) -> bool:
        """Whether a run that reads one of these slots has not been answered.

        A run holds its graph from when it may begin until its answer, also while it waits to be repeated.
        """
        self._ending = [deployed for deployed in self._ending if deployed.hold.users]
        of_models = (deployed for model in self._models.values() for deployed in model.graphs.values())
        return any(
            deployed.hold.users and not slots.isdisjoint(deployed.weights)
            for deployed in (*of_models, *self._ending)
        )

    def _made(self, graph: ModelGraph) -> Deployed:
        message = RunGraph(graph=graph.graph, buffers=graph.buffers)
        cached = self._find(message)
        places: dict[str, int] = {}
        for place, port in enumerate(cached.lowered.buffers):
            places.setdefault(port, place)
        draws = graph.draws
        return Deployed(
            number=next(self._graph_numbers),
            of=graph,
            cached=cached,
            hold=self._memory.hold_together([self._memory.resolve(ref) for ref in graph.buffers]),
            inputs={name: places[port] for name, port in graph.inputs.items() if port in places},
            outputs={name: places[port] for name, port in graph.outputs.items()},
            state=None if draws is None else places.get(draws.port),
            writes=_written(graph),
        )

    def _check_own(self, graphs: Iterable[ModelGraph], replaced: Iterable[Deployed]) -> None:
        """Raise `InvalidRequest` if what a run of one graph writes is used by another graph, of any model."""
        gone = [each.number for each in replaced]
        others = [
            (each.of.name, each.writes, each.uses)
            for model in self._models.values()
            for each in model.graphs.values()
            if each.number not in gone
        ]
        for graph in graphs:
            writes, uses = _written(graph), frozenset([ref.slot for ref in graph.buffers])
            for name, written, used in others:
                if not (writes.isdisjoint(used) and written.isdisjoint(uses)):
                    slot = min((writes & used) | (written & uses))
                    raise InvalidRequest(
                        field="buffers",
                        value=Words(next(ref for ref in graph.buffers if ref.slot == slot)),
                        problem=f"is used by the graphs {name!r} and {graph.name!r}, and each run writes it",
                        fix="give each graph inputs and outputs of its own; they may share weights alone",
                    )
            others.append((graph.name, writes, uses))

    @staticmethod
    def _index(model: _Model) -> None:
        by_key: dict[Any, tuple[Deployed, ...]] = {}
        for deployed in reversed(model.graphs.values()):  # of several for the same inputs, the latest
            key = frozenset((name, spec.dims, spec.dtype) for name, spec in deployed.of.specs.items())
            by_key[key] = (*by_key.get(key, ()), deployed)
        model.by_key = by_key

    def _end(self, removed: Iterable[Deployed]) -> None:
        for deployed in removed:
            deployed.ended = True
            self._memory.end_hold(deployed.hold)
            if deployed.hold.users:
                self._ending.append(deployed)


def _fits(array: np.ndarray, spec: TensorSpec) -> bool:
    return array.shape == spec.dims and array.dtype == spec.dtype.numpy


def _changed(name: str, array: object, spec: TensorSpec) -> InvalidRequest:
    return InvalidRequest(
        field=name,
        value=array,
        problem=f"was changed after it was sent: it had {spec.dtype} {spec.dims}",
        fix="change it after the reply, or give a copy",
    )


def _written(graph: ModelGraph) -> frozenset[int]:
    """The slot numbers of the buffers that each run of a graph writes."""
    refs = dict(zip(graph.graph.places, graph.buffers, strict=True))
    state = () if graph.draws is None else (graph.draws.port,)
    return frozenset(refs[port].slot for port in (*graph.inputs.values(), *graph.outputs.values(), *state))


def _of_the_graph(name: str, ref: BufferRef) -> InvalidRequest:
    return InvalidRequest(
        field=name,
        value=Words(ref),
        problem="is used by this run already: by the model, as an input, or for another output",
        fix="give it a buffer of its own",
    )


def not_deployed(model: ModelRef, inputs: Iterable[tuple[str, tuple[int, ...], DType | None]]) -> NotDeployed:
    """The error for inputs that no graph of a model is for: their names, dims and dtypes."""
    shown = ", ".join(f"{name}: {dtype} {dims}" for name, dims, dtype in inputs)
    return NotDeployed(model=model.number, inputs=shown or "no inputs", unloaded=False)
