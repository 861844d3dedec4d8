"""The models of a service: which graphs each has, and the buffers that these run on.

Only the broker writes it. Any sender's thread may look up a run (`run_of`), since each change of the data
that this reads is one step. The graph that it finds may be unloaded before the request starts, so the broker
checks `Deployed.ended` then.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from cudnn_actor.broker.deployed import Deployed, ModelRun
from cudnn_actor.broker.message_cache import CachedMessage
from cudnn_actor.memory import MemoryTable, Slot
from cudnn_actor.protocol.errors import InvalidRequest, NotDeployed, StaleBufferError, StaleReason, Words
from cudnn_actor.protocol.messages.message_checks import check_model_graph, check_run_model, check_write
from cudnn_actor.protocol.messages.messages import Compute, RunGraph, RunModel, WriteWeights
from cudnn_actor.protocol.messages.model_messages import ModelGraph, ModelRef
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import require_type
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["MOST_GRAPHS", "Deployed", "Deployments", "ModelRun", "not_deployed"]

MOST_GRAPHS = 4096
"""How many graphs all models of a service may have together. Each has buffers of its own, and a record in the
worker."""

Key = frozenset[tuple[str, tuple[int, ...], DType]]
"""The inputs of a run: name, dims and dtype of each."""


class _Model:
    def __init__(self, ref: ModelRef) -> None:
        self.ref = ref
        self.graphs: dict[str, Deployed] = {}
        self.by_key: dict[Key, tuple[Deployed, ...]] = {}
        """This is replaced in one step whenever `graphs` changes."""
        self.likely: _Likely | None = None
        """The graph of the latest run. Any thread may replace it."""
        self.drawn = 0


class _Likely(NamedTuple):
    """A graph that a model's next run is likely to run.

    Parameters
    ----------
    by_key
        The `_Model.by_key` in which the graph was found. If the model has another one now, another graph may
        be for these inputs.
    deployed
        The graph.
    run
        The run that all messages with arrays alone share, since it has nothing of a single message. None if
        each run draws random numbers of its own.
    """

    by_key: object
    deployed: Deployed
    run: ModelRun | None


class _Latest(NamedTuple):
    """A message with all its values in buffers, and its run, for when it is sent again."""

    message: RunModel
    run: ModelRun
    model: _Model
    by_key: object
    """The `_Model.by_key` in which the run was found. With another one, its graph may have ended: a sender on
    another thread may note a run of such a graph."""
    buffers: dict[str, BufferRef]
    into: dict[str, BufferRef]
    """Copies of the message's dicts, which its sender may change."""


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
        self._latest: _Latest | None = None
        """The likely run of the model that ran last. Any thread may replace it."""
        self._ending: list[Deployed] = []
        """Graphs that were unloaded and have runs without an answer."""

    # Any thread.

    def run_of(self, message: RunModel) -> ModelRun:
        """The graph that a message runs.

        Raises `NotDeployed`, and `InvalidRequest` for inputs and outputs that are not the model's.
        """
        latest = self._latest
        if (
            latest is not None
            and message is latest.message
            and latest.model.by_key is latest.by_key
            and not message.arrays
            and message.buffers == latest.buffers
            and message.into == latest.into
        ):
            return latest.run  # nearly always, a message is sent again
        if (known := self._likely_run(message)) is not None:
            return known
        check_run_model(message)
        model = self._model(message.model)
        by_key = model.by_key
        deployed = self._graph_for(model, message)
        buffers, into, outputs = message.buffers, message.into, deployed.outputs
        for name in into:
            if name not in outputs:
                raise InvalidRequest(
                    field="into",
                    value=name,
                    problem="is no output that the graph computes",
                    fix=f"use {', '.join(outputs)}",
                )
        run = ModelRun(
            deployed.cached,
            tuple([ref.slot for ref in buffers.values()]),
            tuple([ref.slot for ref in into.values()]),
            deployed,
            tuple(buffers.items()),
            tuple(into.items()),
        )
        if deployed.of.draws is None and not message.arrays:  # else each run is another one
            self._latest = _Latest(message, run, model, by_key, dict(run.buffers), dict(run.into))
        return run

    def _likely_run(self, message: RunModel) -> ModelRun | None:
        """The run of a message with arrays alone, if it is well-formed and for the model's likely graph."""
        ref = message.model
        if type(ref) is not ModelRef or ref.service != self._service:
            return None
        model = self._models.get(ref.number)
        if model is None or (likely := model.likely) is None or likely.run is None:
            return None
        known = likely.by_key is model.by_key and likely.deployed.is_for_arrays(message)
        return likely.run if known else None

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
    def _graph_for(model: _Model, message: RunModel) -> Deployed:
        by_key, likely = model.by_key, model.likely
        if likely is not None and likely.by_key is by_key and likely.deployed.is_for(message):
            return likely.deployed
        arrays, buffers = message.arrays, message.buffers
        given = [(name, array.shape, DType.of(array.dtype)) for name, array in arrays.items()]
        given += [(name, ref.spec.dims, ref.spec.dtype) for name, ref in buffers.items()]
        for deployed in by_key.get(frozenset(given), ()):  # type: ignore[arg-type]  # None is in none
            if deployed.accepts(arrays):
                run = ModelRun(deployed.cached, (), (), deployed) if deployed.of.draws is None else None
                model.likely = _Likely(by_key, deployed, run)
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
            model.graphs[each.name] = self._make(each)
        self._index(model)
        self._end(replaced)
        return replaced

    @staticmethod
    def _has(model: _Model, graph: ModelGraph) -> bool:
        """Whether the model has this very graph: a message that a crash has interrupted is started again."""
        known = model.graphs.get(graph.name)
        return known is not None and known.of is graph

    def graphs_of(self, ref: ModelRef, graphs: Iterable[ModelGraph]) -> tuple[Deployed, ...]:
        """The graphs of these that a model has. Raises `NotDeployed`."""
        model = self._model(ref)
        return tuple(model.graphs[each.name] for each in graphs if self._has(model, each))

    def remove(self, ref: ModelRef, names: Iterable[str] | None) -> list[Deployed]:
        """Forget graphs, or the whole model. Returns the forgotten graphs, which have ended."""
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
        """Let a run draw its random numbers, if it has not yet. Later runs draw different ones."""
        assert run.deployed is not None
        draws = run.deployed.of.draws
        if draws is not None and run.drawn is None:
            model = self._model(ref)
            run.drawn = model.drawn
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
        """The slots that a request holds: all buffers of its graph, as one hold, and the buffers that it
        names.

        Unless a buffer has ended since, this is one comparison from the second time on.

        Raises `StaleBufferError`, and `InvalidRequest` for buffers in `into` that do not fit the outputs.
        """
        epoch = self._memory.epoch
        known, slots = run.found
        if known != epoch:
            slots = tuple(self._found_slots(run))
            run.found = epoch, slots
        return slots

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

        Raises `NotDeployed`, `InvalidRequest` and `StaleBufferError` if it is not valid.
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

    def _make(self, graph: ModelGraph) -> Deployed:
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
            writes=_written_slots(graph),
        )

    def _check_own(self, graphs: Iterable[ModelGraph], replaced: Iterable[Deployed]) -> None:
        """Raise `InvalidRequest` if a run of one graph writes a buffer that another graph uses, of any
        model."""
        gone = [each.number for each in replaced]
        others = [
            (each.of.name, each.writes, each.uses)
            for model in self._models.values()
            for each in model.graphs.values()
            if each.number not in gone
        ]
        for graph in graphs:
            writes, uses = _written_slots(graph), frozenset([ref.slot for ref in graph.buffers])
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
        for deployed in reversed(model.graphs.values()):  # if several are for the same inputs, the latest
            key = frozenset((name, spec.dims, spec.dtype) for name, spec in deployed.of.specs.items())
            by_key[key] = (*by_key.get(key, ()), deployed)
        model.by_key = by_key
        model.likely = None  # it would keep its graph

    def _end(self, removed: Iterable[Deployed]) -> None:
        self._latest = None  # it would keep its graph
        for deployed in removed:
            deployed.ended = True
            self._memory.end_hold(deployed.hold)
            if deployed.hold.users:
                self._ending.append(deployed)


def _written_slots(graph: ModelGraph) -> frozenset[int]:
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
    """The error for inputs for which a model has no graph. It names their names, dims and dtypes."""
    shown = ", ".join(f"{name}: {dtype} {dims}" for name, dims, dtype in inputs)
    return NotDeployed(model=model.number, inputs=shown or "no inputs", unloaded=False)
