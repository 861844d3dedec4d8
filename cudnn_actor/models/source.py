"""What a model is made from: its inputs and outputs, and its graph for particular dims."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.messages.model_messages import Draws
from cudnn_actor.protocol.messages.run_loop import Loop
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.short_repr import one_line
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = [
    "Dims",
    "Feature",
    "Features",
    "NeedsValues",
    "Origin",
    "Source",
    "Specialised",
    "Step",
    "SwappableSource",
    "Weight",
    "fixed_specs",
    "shown",
    "values_of",
]

Dims = tuple[int | str | None, ...]
Weight = np.ndarray | Callable[[], np.ndarray]
"""The values of a weight, or what computes them when they are to be uploaded."""


def values_of(weight: Weight) -> np.ndarray:
    """The values of a weight. Those of a computed one are computed anew."""
    return weight() if callable(weight) else weight


@dataclass(frozen=True, kw_only=True)
class Feature:
    """An input or an output of a model.

    Parameters
    ----------
    name
        Its name.
    dtype
        The element type; None if it is of a type that no tensor of a service has.
    dims
        Sizes, names of sizes that inputs share, and None where nothing is known. None for an unknown rank.
    kind
        What it is, where `dtype` is None.
    """

    name: str
    dtype: DType | None
    dims: Dims | None
    kind: str = ""

    @property
    def spec(self) -> TensorSpec | None:
        """The spec that it must have; None unless its dims are numbers."""
        if self.dtype is None or self.dims is None or not all(isinstance(dim, int) for dim in self.dims):
            return None
        return TensorSpec.packed(self.dims, self.dtype)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"<Feature {one_line(str(self))}>"

    def __str__(self) -> str:
        dims = "of any rank" if self.dims is None else shown(self.dims)
        return f"{self.name}: {self.dtype or self.kind} {dims}"


def fixed_specs(features: Sequence[Feature]) -> dict[str, TensorSpec] | None:
    """The specs of inputs, by name; None unless the dims of each are numbers."""
    specs = {each.name: each.spec for each in features}
    return None if None in specs.values() else specs  # type: ignore[return-value]


def shown(dims: Dims) -> str:
    """Dims for people: names as they are, and a question mark where nothing is known."""
    return f"({', '.join('?' if dim is None else str(dim) for dim in dims)})"


@dataclass(frozen=True, eq=False, kw_only=True)
class Origin:
    """What a constant of a model is computed from, if that is initialisers that may be overwritten.

    Parameters
    ----------
    key
        Equal for constants that are computed alike from the same initialisers.
    names
        The initialisers.
    compute
        Computes it from the values of initialisers, by name; and from other constants, by `derive`.
    parts
        What these others are computed from.
    """

    key: str
    names: frozenset[str]
    compute: Callable[[Mapping[str, np.ndarray], dict[str, np.ndarray]], np.ndarray]
    parts: Sequence[Origin] = ()

    def derive(self, tensors: Mapping[str, np.ndarray], known: dict[str, np.ndarray]) -> np.ndarray:
        """The constant for these values of all initialisers. `known`: those that were derived, by key."""
        waiting = [self]
        while waiting:  # a chain of thousands of nodes would be too deep for a call in a call
            last = waiting[-1]
            missing = [part for part in last.parts if part.key not in known]
            if missing and last.key not in known:
                waiting += missing
                continue
            if last.key not in known:
                known[last.key] = last.compute(tensors, known)
            waiting.pop()
        return known[self.key]


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """A graph or a loop of a model that runs several of them, one after the other.

    What lies between them is in cells: buffers for one run, each under its own name. The inputs of the model
    are in cells, too. A step reads some of them, and fills one for each of its outputs, of the output's name.
    No two steps have a port of the same name.

    Parameters
    ----------
    run
        What runs.
    reads
        Its inputs → the cells that they are in. Those that are missing are weights.
    turns
        How many turns a loop has, or at most how many.
    ends
        The cell of a bool that is False once a loop has ended by itself; empty if it need not.
    label
        The node of the file, for people; empty for a graph between loops.
    """

    run: Graph | Loop
    reads: Mapping[str, str]
    turns: int = 0
    ends: str = ""
    label: str = ""

    @property
    def graph(self) -> Graph:
        """What is planned: the graph, or the body of the loop."""
        return self.run.body if isinstance(self.run, Loop) else self.run

    @functools.cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The specs of the buffers for its ports."""
        if isinstance(self.run, Loop):
            return self.run.specs(self.turns)
        return {port.name: port.spec for port in self.run.ports}

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """The specs of its inputs, by name."""
        return {port.name: self.specs[port.name] for port in self.graph.inputs}

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """The specs of its outputs, by name. The outputs are the cells that it fills."""
        return {port.name: self.specs[port.name] for port in self.graph.outputs}


@dataclass(frozen=True, eq=False, kw_only=True)
class Specialised:
    """A model for particular dims, and for particular values of the inputs that decide over shapes.

    Parameters
    ----------
    graph
        What is run; None if every output is a constant, or if there are `steps`.
    inputs, outputs
        Inputs that the graph reads, and outputs that it computes → the names of their ports.
    weights
        Ports → the weights bound to them: a key, equal for equal values, and the values, or what computes
        them, which may take a while.
    constants
        Outputs that need no computation.
    random
        What random numbers a run draws; None if it draws none.
    origins
        Keys of weights → what they are computed from; of those that may be overwritten.
    decided_by
        Initialisers whose values are part of the graph, so that they may not be overwritten.
    steps
        Of a model with loops, which has no `graph`: what runs, in order. `inputs` and `outputs` say names of
        cells instead of ports then: see `Step`. Empty for all other models.
    rows
        Outputs of which the first rows alone are there → the cell that says how many.
    """

    graph: Graph | None
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    weights: Mapping[str, tuple[str, Weight]]
    constants: Mapping[str, np.ndarray]
    random: Draws | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)
    decided_by: frozenset[str] = frozenset()
    steps: Sequence[Step] = ()
    rows: Mapping[str, str] = field(default_factory=dict)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """What is planned: the graph, or those of the steps."""
        of_steps = tuple(step.graph for step in self.steps)
        return of_steps if self.graph is None else (self.graph, *of_steps)

    @property
    def ports(self) -> Mapping[str, TensorSpec]:
        """The specs of the buffers for all inputs of the graphs, those of weights included."""
        found = {} if self.graph is None else {port.name: port.spec for port in self.graph.inputs}
        for step in self.steps:
            found.update(step.inputs)
        return found


class NeedsValues(Exception):
    """Raised by a source when inputs decide over shapes, and their values were not given. Carries `names`."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(f"the values of {', '.join(sorted(names))} are needed")
        self.names = frozenset(names)


class Features(Protocol):
    """What a model takes and gives."""

    @property
    def inputs(self) -> tuple[Feature, ...]:
        """The inputs that have to be given, in order."""

    @property
    def defaults(self) -> tuple[Feature, ...]:
        """The inputs that may be given, and have a default, in order."""

    @property
    def outputs(self) -> tuple[Feature, ...]:
        """The outputs, in order."""


class Source(Features, Protocol):
    """What a model is made from."""

    def specialised(
        self,
        specs: Mapping[str, TensorSpec],
        values: Mapping[str, np.ndarray],
        most_operations: int = ...,
    ) -> Specialised:
        """The model for inputs of these specs. `values`: those of inputs that decide over shapes.

        `most_operations`: how many a graph may have, which a model that needs more says at once.

        Raises `NeedsValues`, and `UnsupportedModel` or `InvalidModel` for what cannot be run.
        """


class SwappableSource(Source, Protocol):
    """A source whose weights may be overwritten."""

    @property
    def tensors(self) -> Mapping[str, np.ndarray]:
        """The values of the initialisers, by name."""

    def with_tensors(self, tensors: Mapping[str, np.ndarray]) -> SwappableSource:
        """The same source with other values for these initialisers, of the same dims and dtypes."""
