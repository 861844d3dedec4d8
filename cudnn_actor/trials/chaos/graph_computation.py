"""A graph as one of the load's computations, with the methods that the load calls on an operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan
from cudnn_actor.protocol import BufferRef, Graph, RunGraph, TensorSpec

__all__ = ["GraphComputation"]

Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True, eq=False)
class GraphComputation:
    """A graph whose ports are the tensors of a problem.

    An input that the graph updates is an output, too. These come after the graph's other outputs.
    """

    graph: Graph
    kind: ClassVar[str] = "graph"
    optional: ClassVar[frozenset[str]] = frozenset()

    @functools.cached_property
    def updated_inputs(self) -> frozenset[str]:
        """The inputs whose buffers the graph writes. A graph with such inputs must not run twice."""
        body = self.graph.body
        return frozenset(self.graph.names_of[t.uid] for t in body.tensors if t.overwrites is not None)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of what the graph reads."""
        return tuple(port.name for port in self.graph.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what the graph writes."""
        return (*(port.name for port in self.graph.outputs), *sorted(self.updated_inputs))

    reads, writes = inputs, outputs  # the names of its tensors are those of its operands

    def named(self, fields: tuple[str, ...] | None = None) -> Iterator[tuple[str, str]]:
        """Pairs of an operand's name and its tensor's, as for an operation; both are the port's name."""
        names = (*self.inputs, *self.outputs) if fields is None else fields
        yield from ((name, name) for name in dict.fromkeys(names))

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        """The specs of the outputs, by name, without the updated inputs."""
        del specs
        return {port.name: port.spec for port in self.graph.outputs}

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Any]) -> dict[str, Any]:
        """An empty dict, because the inputs may have any values."""
        del xp, specs, draw
        return {}

    def evaluate(self, xp: Any, values: Mapping[str, np.ndarray], specs: Specs) -> dict[str, np.ndarray]:
        """The values of what the graph writes, computed by its operations' definitions."""
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
