"""Builds the graph and its outputs, after a walk over a model's nodes has added its operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cudnn_actor.models.errors import InvalidModel, UnsupportedModel
from cudnn_actor.models.source import Feature, Specialised
from cudnn_actor.onnx.budget import TooManyOperations
from cudnn_actor.onnx.joining import Joined, join_products
from cudnn_actor.onnx.places import Part, Scope
from cudnn_actor.onnx.ports import Ports
from cudnn_actor.onnx.precision import Precision
from cudnn_actor.onnx.values import Declined, Value
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.graphs.named_graph import Graph

__all__ = ["Outputs"]


class Outputs:
    """Ends one import.

    Parameters
    ----------
    g, ports
        The graph's builder, and its inputs.
    precision
        The dtype in which the model computes, if that is not the file's; else None.
    features
        The outputs of the model.
    most_operations
        How many operations the graph may have.
    """

    def __init__(
        self,
        g: GraphBuilder,
        ports: Ports,
        precision: Precision | None,
        features: Sequence[Feature],
        *,
        most_operations: int,
    ) -> None:
        self._g, self._ports, self._precision = g, ports, precision
        self._features, self._most_operations = features, most_operations

    def finish(self, names: Scope) -> Specialised:
        """Build the graph, and return the model, if it is this graph alone. Raises `UnsupportedModel`, and
        `TooManyOperations`."""
        constants: dict[str, np.ndarray] = {}
        outputs: dict[str, str] = {}
        ports: dict[str, Tensor] = {}
        for feature in self._features:
            found = self.output(feature, names)
            if isinstance(found, np.ndarray):
                constants[feature.name] = found
            else:
                outputs[feature.name] = self._ports.name(feature.name)
                ports[outputs[feature.name]] = found[1]
        part = self.part(ports) if ports else None
        read = set() if part is None else {port.name for port in part.graph.inputs}
        return Specialised(
            graph=part and part.graph,
            inputs=self._ports.inputs(read),
            outputs=outputs,
            weights={} if part is None else part.weights,
            constants=constants,
            random=part and part.random,
            origins={} if part is None else part.origins,
            decided_by=frozenset(self._ports.looked_at),
        )

    def output(self, feature: Feature, names: Scope) -> np.ndarray | tuple[Value, Tensor]:
        """An output of the model: its elements, or a value of the graph, and a tensor of the file's dtype."""
        value, precision = names.get(feature.name), self._precision
        if not isinstance(value, Value):
            raise InvalidModel(where=f"output {feature.name!r}", problem="is written by no node")
        if value.is_constant:
            return value.array if precision is None else precision.constant(value.array, feature)
        try:
            tensor = value.tensor
        except Declined as declined:
            raise UnsupportedModel(nodes=[f"output {feature.name!r}: {declined}"]) from declined
        return value, tensor if precision is None else precision.output(tensor, feature)

    def part(self, outputs: Mapping[str, Tensor]) -> Part:
        """The graph that computes these, by the names of their ports. Raises `TooManyOperations`."""
        self._g.place = "the outputs"  # copies of inputs, and of outputs that are written twice
        built = self._g.build(outputs)
        inputs = tuple(port for port in built.inputs if port.uid is not None)
        graph = Graph(body=built.body, inputs=inputs, outputs=built.outputs)
        read = {port.name for port in inputs}
        of = Joined(graph, self._ports.weights(read), self._ports.origins(read))
        graph, weights, origins = join_products(of, self._ports.name)
        if (count := len(graph.body.operations)) > self._most_operations:
            raise TooManyOperations(f"{count:,}")
        return Part(graph, weights, origins, self._ports.random(read))
