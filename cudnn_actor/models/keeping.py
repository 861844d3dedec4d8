"""The graphs that a model keeps, one for each set of dims of its inputs; their weights, and how many runs use
each.

Nothing here waits. Every change is made under one lock, which is held for moments only.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np

from cudnn_actor.actors import forks
from cudnn_actor.models.kept_graphs import KeptGraphs
from cudnn_actor.models.source import Origin, Source, Specialised
from cudnn_actor.plan_store.cache import PLAN_CAPACITY
from cudnn_actor.protocol.errors import (
    CudnnActorError,
    InvalidRequest,
    NotDeployed,
    StaleBufferError,
    StaleReason,
    Words,
)
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.messages.model_messages import ModelGraph, ModelRef
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["MOST_KEPT", "Keeping", "Kept", "Outdated", "Replaced", "Unload"]

Unload = Callable[[ModelRef, tuple[str, ...] | None], None]
"""A function that has the service forget graphs of a model by their names, or all of them (None). It does not
wait."""

_NBYTES = attrgetter("nbytes")
MOST_KEPT = 64
"""How many specialised graphs a model keeps."""


class Replaced(Exception):
    """Raised when a model has been replaced, before anything was sent for a call. The call then begins
    again."""


class Outdated(Exception):
    """Raised when weights were overwritten while a graph was imported with the earlier ones."""


@dataclass(eq=False)
class Kept:
    """A specialised graph that a model keeps.

    Parameters
    ----------
    of
        The specialised graph, without the weights' values: these are in buffers.
    names
        The keys of the graph's weights, one for each port that has a weight.
    specs, values
        The specs of the inputs that the graph is for, and the values of inputs that decide over shapes.
    weights
        Ports → buffers.
    name
        The graph's name in the service's model.
    places
        Ports → the buffers of a run's inputs and outputs.
    sent
        The graph as it is sent to the service; None while it has no places.
    deployed
        `sent`, once the service has it; else None.
    used
        When a run of the graph began last, by `KeptGraphs.tick`.
    outdated
        Whether the graph's weights were torn. Then it is no longer kept, and its buffers were given back.
    runs
        How many runs use the graph now.
    """

    of: Specialised
    names: tuple[str, ...]
    name: str
    specs: dict[str, TensorSpec]
    values: dict[str, np.ndarray]
    weights: dict[str, BufferRef] = field(default_factory=dict)
    places: dict[str, BufferRef] = field(default_factory=dict)
    sent: ModelGraph | None = None
    deployed: ModelGraph | None = None
    used: int = 0
    outdated: bool = False
    runs: int = 0

    @property
    def graph(self) -> Graph | None:
        """The graph that a run computes; None if the outputs are constants alone, or if there are steps."""
        return self.of.graph

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """All graphs that need plans: `graph`, or the graphs of the steps."""
        return self.of.graphs

    def place(self, places: dict[str, BufferRef]) -> None:
        """Give the graph buffers for its inputs and outputs, so that it can be deployed."""
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

    @functools.cached_property
    def nbytes(self) -> int:
        """The bytes of host memory that the graph takes, approximately."""
        graphs = sum(graph.footprint for graph in self.graphs)
        return graphs + sum(array.nbytes for array in self.of.constants.values())


class Keeping:
    """The graphs and weights of a model. If this object is collected before `end`, they are given back with a
    warning.

    A weight is one buffer, however many graphs read it. It is given back with the last of these graphs.

    Parameters
    ----------
    gpu
        The `CudnnRef` of the service.
    ref
        The model in the service, by which messages name it.
    source
        The source of the model's graphs.
    shown
        The text by which errors show the model.
    unload
        See `Unload`.
    discard
        Frees a buffer without waiting.
    graphs
        The graphs of all models of the service, and how many bytes the graphs of one model may take.
    """

    def __init__(
        self,
        gpu: Any,
        ref: ModelRef,
        source: Source,
        shown: str,
        *,
        discard: Callable[[BufferRef], None],
        unload: Unload,
        graphs: KeptGraphs,
    ) -> None:
        self.ref = ref
        self.source = source
        self.discard = discard
        self._shown = shown
        self._unload = unload
        self._graphs = graphs
        self.lock = threading.RLock()
        """A lock for all attributes below; it is held for moments only."""
        self.kept: OrderedDict[object, Kept] = OrderedDict()
        self._past: deque[str] = deque(maxlen=PLAN_CAPACITY)
        """Digests of the graphs that were dropped lately to make room. The service may still have their
        plans, as many as its default `plan_capacity`."""
        self.weights: dict[str, tuple[BufferRef, int]] = {}
        """Weights by key: the buffer, and how many of the kept graphs use it."""
        self._numbers = itertools.count(1)
        """The numbers by which graphs are named."""
        self.origins: dict[str, Origin] = {}
        """Keys of weights that may be overwritten → the origins of their values."""
        self.decided: set[str] = set()
        """The names of initialisers whose values are part of a graph."""
        self.writes = 0
        """How many writes have begun."""
        self.replaced = False
        self.closed = False
        forks.watch(self)
        graphs.add(self.kept)
        graphs.watch(self)
        left = (self.weights, self.kept, self._past, shown)
        forks.finalize(self, _drop, gpu, ref, (discard, unload), graphs, left).atexit = False

    def forget_parent(self) -> None:
        """Take a new lock in a forked child, where the service refuses the model's requests."""
        self.lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """The bytes that the weights take in the service now."""
        with self.lock:
            return sum(ref.nbytes for ref, _ in self.weights.values())

    def check_open(self) -> None:
        """Raise `Replaced` if the model was replaced, and `InvalidRequest` if it is closed."""
        if self.replaced:
            raise Replaced
        if self.closed:
            raise InvalidRequest(
                field="model", value=Words(self._shown), problem="is closed", fix="load it again"
            )

    def find(self, key: object) -> Kept | None:
        """The graph that is kept for a key; None if there is none. One more run uses it until `release`.

        Raises as `check_open`.
        """
        with self.lock:
            self.check_open()
            kept = self.kept.get(key)
            if kept is not None:
                kept.runs += 1
                kept.used = self._graphs.tick()
                self.kept.move_to_end(key)
            return kept

    def hold(self, kept: Kept) -> None:
        """Count one more run of a graph that is in use."""
        with self.lock:
            kept.runs += 1

    def hold_all(self) -> tuple[Kept, ...]:
        """All graphs. One more run uses each of them until `release`."""
        with self.lock:
            kept = tuple(self.kept.values())
            for each in kept:
                each.runs += 1
            return kept

    def keep(
        self,
        key: object,
        of: Specialised,
        made: dict[str, BufferRef],
        specs: Mapping[str, TensorSpec],
        values: Mapping[str, np.ndarray],
        *,
        writes: int,
    ) -> Kept | None:
        """Keep a graph, which one run uses until `release`. Returns None if a weight is missing.

        A weight that is kept already is used; any other one is taken from `made`.

        Raises `Outdated` if the number of writes that have begun is no longer `writes`.
        """
        with self.lock:
            self.check_open()
            if writes != self.writes:
                raise Outdated
            if key not in self.kept:
                if any(name not in self.weights and name not in made for name, _ in of.weights.values()):
                    return None
                names = tuple(name for name, _ in of.weights.values())
                kept = self.kept[key] = Kept(
                    replace(of, weights={}, origins={}),
                    names,
                    str(next(self._numbers)),
                    dict(specs),
                    dict(values),
                )
                for port, (name, _) in of.weights.items():
                    ref, users = self.weights.get(name) or (made.pop(name), 0)
                    self.weights[name] = ref, users + 1
                    kept.weights[port] = ref
                self.origins.update(of.origins)
                self.decided |= of.decided_by
            return self.find(key)

    def release(self, kept: Kept) -> None:
        """End one use of a graph that `find`, `hold`, `hold_all` or `keep` has begun."""
        with self.lock:
            kept.runs -= 1
            evicted, unused = self._evict()
            if kept.outdated and not kept.runs:
                unused += self._take_places(kept)
        if evicted or unused or self.closed:
            self._give_back(evicted, unused)
        self._graphs.trim()

    def place(self, kept: Kept, places: dict[str, BufferRef]) -> bool:
        """Give buffers for inputs and outputs to a graph that is in use. Returns False if it has such buffers
        already."""
        with self.lock:
            if kept.sent is not None:  # a task of another loop was faster
                return False
            kept.place(places)
            self._graphs.note_places(sum(ref.nbytes for ref in places.values()))
        self._graphs.trim()
        return True

    def make_room(self, nbytes: int) -> bool:
        """Give back at least `nbytes` bytes of the places of idle graphs, of any model. Returns False if
        there are none."""
        return self._graphs.trim(at_least=nbytes)

    def idle(self) -> list[tuple[int, Kept]]:
        """The graphs that have places and no runs. The number with each is `Kept.used`."""
        with self.lock:
            return [(kept.used, kept) for kept in self.kept.values() if kept.places and not kept.runs]

    def give_back_places(self, kept: Kept) -> int:
        """Give the places of a graph back, unless it has runs. Its next run deploys it again. Returns the
        places' bytes."""
        with self.lock:
            if kept.runs:
                return 0
            places = self._take_places(kept)
        self._unload(self.ref, (kept.name,))
        for ref in places:
            self.discard(ref)
        return sum(ref.nbytes for ref in places)

    def _take_places(self, kept: Kept) -> list[BufferRef]:
        """Take the places from a graph, which cannot be run then. The lock is held."""
        places, kept.places = list(kept.places.values()), {}
        kept.deployed = kept.sent = None
        self._graphs.note_places(-sum(ref.nbytes for ref in places))
        return places

    def note_deployed(self, kept: Kept, sent: ModelGraph) -> None:
        """Note that the service has the graph with these places, unless they were given back meanwhile."""
        with self.lock:
            if kept.sent is sent:
                kept.deployed = sent

    def forget_places(self, kept: Kept, sent: ModelGraph) -> None:
        """Give back the places of a graph that the service has had to forget, unless the graph has new
        places."""
        with self.lock:
            # Else another task has deployed it again.
            places = self._take_places(kept) if kept.sent is sent else []
        for ref in places:
            self.discard(ref)

    def forget_torn(self, kept: Kept, error: CudnnActorError) -> bool:
        """Forget all graphs if this error says that a weight of `kept` was torn, by a write that has failed.

        They are made again from the source when they are needed. Returns whether `kept` is outdated, by this
        call or an earlier one. If so, the caller should look for another graph.
        """
        with self.lock:
            if kept.outdated:
                return isinstance(error, StaleBufferError | NotDeployed)
            if not _says_torn(error, kept.weights.values()):
                return False
            graphs = list(self.kept.values())
            buffers = [ref for ref, _ in self.weights.values()]
            for each in graphs:
                each.outdated = True
                buffers += [] if each.runs else self._take_places(each)
            self.kept.clear()
            self.weights.clear()
            self.origins.clear()
        self._give_back(graphs, buffers)
        return True

    def end(self) -> None:
        """Give back the graphs and weights that no run uses, and the others when the runs that use them end.
        Any thread may call this, also within a finalizer."""
        with self.lock:
            self.closed = True
            unused = self._evict()
        self._give_back(*unused)

    def _evict(self) -> tuple[list[Kept], list[BufferRef]]:
        """Forget the idle graphs that are over the bounds, or all idle graphs once the model is closed.
        Returns these graphs, and the buffers that no graph needs any more."""
        nbytes = sum(map(_NBYTES, self.kept.values()))
        if self._may_keep_all(nbytes):  # nearly always
            return [], []
        evicted: list[Kept] = []
        unused: list[BufferRef] = []
        for key in [key for key, kept in self.kept.items() if not kept.runs]:
            if self._may_keep_all(nbytes):
                break
            kept = self.kept.pop(key)
            nbytes -= kept.nbytes
            evicted.append(kept)
            unused += self._take_places(kept)
            for name in kept.names:
                ref, users = self.weights[name]
                self.weights[name] = ref, users - 1
                if users == 1:
                    self.origins.pop(name, None)
                    unused.append(self.weights.pop(name)[0])
        return evicted, unused

    def _may_keep_all(self, nbytes: int) -> bool:
        """Whether the kept graphs are within the bounds. One graph is, whatever it takes."""
        count = len(self.kept)
        return not self.closed and (count <= 1 or (count <= MOST_KEPT and nbytes <= self._graphs.limit))

    def _give_back(self, evicted: list[Kept], refs: list[BufferRef]) -> None:
        """Free buffers, and drop graphs from the service's caches. Once the model is closed, drop their
        plans, too."""
        if self.closed and not self.kept:
            self._unload(self.ref, None)
        elif evicted:
            self._unload(self.ref, tuple(kept.name for kept in evicted))
        for ref in refs:
            self.discard(ref)
        graphs = [graph for kept in evicted for graph in kept.graphs]
        digests = [graph.body.digest() for graph in graphs]
        if not self.closed:
            self._past.extend(digests)
            self._graphs.release(graphs, ())
            return
        if not self.kept:
            self._graphs.remove(self.kept)
        self._graphs.release(graphs, [*digests, *self._past])
        self._past.clear()


def _says_torn(error: CudnnActorError, refs: Collection[BufferRef]) -> bool:
    return (
        isinstance(error, StaleBufferError)
        and error.reason is not StaleReason.FREED
        and (error.slot, error.generation) in {(ref.slot, ref.generation) for ref in refs}
    )


def _drop(
    gpu: Any,
    ref: ModelRef,
    give_back: tuple[Callable[[BufferRef], None], Unload],
    graphs: KeptGraphs,
    left: tuple[Mapping[str, tuple[BufferRef, int]], Mapping[object, Kept], Collection[str], str],
) -> None:
    """Give back the graphs and weights of a model that was collected without `close`. Any thread, also within
    a finalizer."""
    discard, unload = give_back
    weights, kept, past, shown = left
    unload(ref, None)
    for buffer, _ in weights.values():
        discard(buffer)
    for each in kept.values():
        for buffer in each.places.values():
            discard(buffer)
        graphs.note_places(-sum(buffer.nbytes for buffer in each.places.values()))
    graphs.remove(kept)
    left_graphs = [graph for each in kept.values() for graph in each.graphs]
    graphs.release(left_graphs, [*(graph.body.digest() for graph in left_graphs), *past])
    if weights and gpu.alive:
        warnings.warn(f"unclosed {shown}: use `await model.close()`", ResourceWarning, stacklevel=2)
