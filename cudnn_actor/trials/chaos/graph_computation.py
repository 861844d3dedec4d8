"""A graph as one of the load's computations: what the load asks of an operation, answered for a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cudnn_actor.engines.cpu.evaluation import EvaluatedPlan
from cudnn_actor.protocol import BufferRef, Graph, RunGraph, TensorSpec

__all__ = ["GraphComputation"]

Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True, eq=False)
class GraphComputation:
    """A graph whose ports are the tensors of a problem.

    An input that the graph updates is one of its outputs too, after those that it gives.
    """

    graph: Graph
    kind: ClassVar[str] = "graph"
    optional: ClassVar[frozenset[str]] = frozenset()

    @functools.cached_property
    def updated(self) -> frozenset[str]:
        """The inputs whose buffers the graph writes: it must not run twice."""
        body = self.graph.body
        return frozenset(self.graph.names_of[t.uid] for t in body.tensors if t.overwrites is not None)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of what it reads."""
        return tuple(port.name for port in self.graph.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what it writes."""
        return (*(port.name for port in self.graph.outputs), *sorted(self.updated))

    reads, writes = inputs, outputs  # the names of its tensors are those of its operands

    def named(self, fields: tuple[str, ...] | None = None) -> Iterator[tuple[str, str]]:
        """As of an operation; the operands' names are those of the ports."""
        names = (*self.inputs, *self.outputs) if fields is None else fields
        yield from ((name, name) for name in dict.fromkeys(names))

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        """The specs of what it gives."""
        del specs
        return {port.name: port.spec for port in self.graph.outputs}

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Any]) -> dict[str, Any]:
        """None: its inputs may have any values."""
        del xp, specs, draw
        return {}

    def evaluate(self, xp: Any, values: Mapping[str, np.ndarray], specs: Specs) -> dict[str, np.ndarray]:
        """What it writes, by its operations' definitions."""
        del xp, specs
        body, results = self.graph.body, {}
        buffers = []
        for uid in body.bound:
            tensor, name = body.tensor(uid), self.graph.names_of[uid]
            if uid in body.written:
                results[name] = np.empty(tensor.dims, tensor.dtype.numpy)
            buffers.append(results[name] if uid in body.written else values[name])
        EvaluatedPlan("", body).bind(np.empty(0, np.uint8)).run(buffers, ())
        return results

    def with_operands(self, of: Callable[[str], BufferRef]) -> RunGraph:
        """The message for buffers, by name."""
        return RunGraph.bind(self.graph, {name: of(name) for name in self.graph.places})
