"""The source of a model: its inputs and outputs, and its graph for particular dims."""

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
    "dims_text",
    "fixed_specs",
    "values_of",
]

Dims = tuple[int | str | None, ...]
Weight = np.ndarray | Callable[[], np.ndarray]
"""The values of a weight, or a function that computes them when they are uploaded."""


def values_of(weight: Weight) -> np.ndarray:
    """The values of a weight. If a function computes them, each call does so again."""
    return weight() if callable(weight) else weight


@dataclass(frozen=True, kw_only=True)
class Feature:
    """An input or an output of a model.

    Parameters
    ----------
    name
        The name of the input or output.
    dtype
        The dtype of its elements; None if it is of a type that no tensor of a service has.
    dims
        For each dim its size, the name of a size that inputs share, or None if nothing is known. None for an
        unknown rank.
    kind
        The type's name for people, if `dtype` is None.
    """

    name: str
    dtype: DType | None
    dims: Dims | None
    kind: str = ""

    @property
    def spec(self) -> TensorSpec | None:
        """The spec that its values must have; None unless its dims are numbers."""
        if self.dtype is None or self.dims is None or not all(isinstance(dim, int) for dim in self.dims):
            return None
        return TensorSpec.packed(self.dims, self.dtype)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"<Feature {one_line(str(self))}>"

    def __str__(self) -> str:
        dims = "of any rank" if self.dims is None else dims_text(self.dims)
        return f"{self.name}: {self.dtype or self.kind} {dims}"


def fixed_specs(features: Sequence[Feature]) -> dict[str, TensorSpec] | None:
    """The specs of inputs, by name; None unless the dims of each are numbers."""
    specs = {each.name: each.spec for each in features}
    return None if None in specs.values() else specs  # type: ignore[return-value]


def dims_text(dims: Dims) -> str:
    """A text of dims for people: names as they are, and a question mark where nothing is known."""
    return f"({', '.join('?' if dim is None else str(dim) for dim in dims)})"


@dataclass(frozen=True, eq=False, kw_only=True)
class Origin:
    """The origin of a constant of a model that is computed from initialisers which may be overwritten.

    Parameters
    ----------
    key
        A key that is equal for constants that are computed in the same way from the same initialisers.
    names
        The names of the initialisers.
    compute
        A function that computes the constant. Its argument has the values of initialisers by name, and, as
        `derive` calls it, those of `parts` by key.
    parts
        The origins of other constants from which this one is computed.
    """

    key: str
    names: frozenset[str]
    compute: Callable[[Mapping[str, np.ndarray], dict[str, np.ndarray]], np.ndarray]
    parts: Sequence[Origin] = ()

    def derive(self, tensors: Mapping[str, np.ndarray], known: dict[str, np.ndarray]) -> np.ndarray:
        """The constant for these values of all initialisers. `known`: the constants that were derived before,
        by key."""
        waiting = [self]
        while waiting:  # a loop, because a chain of thousands of nodes would be too deep for recursion
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
    """One step of a model that runs several graphs and loops, one after the other.

    The values between steps are in cells: buffers for one run, each with a name of its own. The inputs of the
    model are in cells, too. A step reads some cells, and fills one for each of its outputs, with the output's
    name. No two steps have a port of the same name.

    Parameters
    ----------
    run
        The graph or the loop that the step runs.
    reads
        Inputs of the step → their cells. An input that is missing here is a weight.
    turns
        How many turns a loop has, or the most that it may have.
    ends
        The cell of a bool that is False once a loop's condition has ended it; empty if a loop has no
        condition.
    label
        The name of the file's node, for people; empty for a graph between loops.
    """

    run: Graph | Loop
    reads: Mapping[str, str]
    turns: int = 0
    ends: str = ""
    label: str = ""

    @property
    def graph(self) -> Graph:
        """The graph that needs a plan: the step's own, or the body of its loop."""
        return self.run.body if isinstance(self.run, Loop) else self.run

    @functools.cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The specs of the buffers for the step's ports."""
        if isinstance(self.run, Loop):
            return self.run.specs(self.turns)
        return {port.name: port.spec for port in self.run.ports}

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """The specs of the step's inputs, by name."""
        return {port.name: self.specs[port.name] for port in self.graph.inputs}

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """The specs of the step's outputs, by name. These are the cells that the step fills."""
        return {port.name: self.specs[port.name] for port in self.graph.outputs}


@dataclass(frozen=True, eq=False, kw_only=True)
class Specialised:
    """A model for particular dims, and for particular values of the inputs that decide over shapes.

    Parameters
    ----------
    graph
        The graph that a run computes; None if every output is a constant, or if there are `steps`.
    inputs, outputs
        Inputs that the graph reads, and outputs that it computes → the names of their ports.
    weights
        Ports → the weights bound to them: a key, equal for equal values, and the values, or a function that
        computes them, which may take a while.
    constants
        Outputs that need no computation.
    random
        The random numbers that a run draws; None if it draws none.
    origins
        Keys of the weights that may be overwritten → their origins.
    decided_by
        The names of initialisers that may not be overwritten, since their values are part of the graph.
    steps
        The steps of a model with loops, in order; such a model has no `graph`, and `inputs` and `outputs`
        name cells instead of ports: see `Step`. Empty for all other models.
    rows
        Outputs of which only the first rows count → the cell that says how many rows.
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
        """The graphs that need plans: `graph`, or the graphs of the steps."""
        of_steps = tuple(step.graph for step in self.steps)
        return of_steps if self.graph is None else (self.graph, *of_steps)

    @property
    def ports(self) -> Mapping[str, TensorSpec]:
        """The specs of the buffers for all inputs of the graphs, including the weights."""
        found = {} if self.graph is None else {port.name: port.spec for port in self.graph.inputs}
        for step in self.steps:
            found.update(step.inputs)
        return found


class NeedsValues(Exception):
    """Raised when values of inputs decide over shapes, and a source was not given them. Carries the inputs'
    `names`."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(f"the values of {', '.join(sorted(names))} are needed")
        self.names = frozenset(names)


class Features(Protocol):
    """The inputs and outputs of a model."""

    @property
    def inputs(self) -> tuple[Feature, ...]:
        """The inputs that have to be given, in order."""

    @property
    def defaults(self) -> tuple[Feature, ...]:
        """The inputs that may be left out, since they have default values, in order."""

    @property
    def outputs(self) -> tuple[Feature, ...]:
        """The outputs, in order."""


class Source(Features, Protocol):
    """The source of a model."""

    def specialise(
        self,
        specs: Mapping[str, TensorSpec],
        values: Mapping[str, np.ndarray],
        most_operations: int = ...,
    ) -> Specialised:
        """The model for inputs of these specs. `values`: the values of inputs that decide over shapes.

        `most_operations`: how many operations a graph may have. A model that needs more is refused as soon as
        that is known.

        Raises `NeedsValues` if values of other inputs decide over shapes, too, and `UnsupportedModel` or
        `InvalidModel` if the model cannot be run.
        """


class SwappableSource(Source, Protocol):
    """A source whose weights may be overwritten."""

    @property
    def tensors(self) -> Mapping[str, np.ndarray]:
        """The values of the initialisers, by name."""

    def with_tensors(self, tensors: Mapping[str, np.ndarray]) -> SwappableSource:
        """This source with other values for these initialisers, of the same dims and dtypes."""
