"""Recurrent networks: `Recurrent` where it has what a node asks for, else `RecurrentSteps`.

https://onnx.ai/onnx/operators/onnx__LSTM.html
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.values import Declined
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.operations import (
    CellActivation,
    CellFunction,
    Recurrent,
    RecurrentCell,
    RecurrentMode,
    RecurrentSteps,
)
from cudnn_actor.protocol.operations.matmul import transpose_last

__all__ = ["Network"]

_FUNCTIONS = {function.replace("_", ""): function for function in CellFunction}
"""The functions of cells, by ONNX's names in small letters."""
_PARAMETERS: dict[CellFunction, tuple[float, float | None]] = {
    CellFunction.AFFINE: (1.0, 0.0),
    CellFunction.ELU: (1.0, None),
    CellFunction.HARD_SIGMOID: (0.2, 0.5),
    CellFunction.LEAKY_RELU: (0.01, None),
    CellFunction.SCALED_TANH: (1.0, 1.0),
    CellFunction.THRESHOLDED_RELU: (1.0, None),
}
"""Activations with parameters, and the defaults of alpha and beta."""
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


class Network:
    """A recurrent network: the parameters of a node, and the operation that runs it.

    Parameters
    ----------
    node
        The node.
    g
        The builder of the graph.
    defaults
        The activations of a direction that names none.

    Attributes
    ----------
    x
        The network's input, dims (steps, batch, features).
    names
        The names of the activations, in small letters, one direction after the other.
    activations
        The activations with their parameters.
    clip
        The bound of the inputs of the gates' activations; 0 for none.
    """

    def __init__(self, node: Node, g: GraphBuilder, *defaults: str) -> None:
        self.node, self.g = node, g
        self.gates, self.states = _GATES[node.op], 2 if node.op == "LSTM" else 1
        x = node.tensor(0)
        self.batch_first = bool(node.attribute("layout", 0))
        self.x = g.transpose(x, (1, 0, 2)) if self.batch_first else x
        self.steps, self.batch, _ = self.x.dims
        self.hidden = node.dims(2)[2]
        self.directions = {"bidirectional": 2}.get(node.attribute("direction"), 1)
        self._check_dims()
        names = node.attribute("activations") or defaults * self.directions
        self.names = [name.lower() for name in names[: len(defaults) * self.directions]]
        self.clip = max(0.0, node.attribute("clip", 0.0))
        given = {name: iter(node.attribute(f"activation_{name}") or ()) for name in ("alpha", "beta")}
        self.activations = [_activation(name, **given) for name in self.names]

    @property
    def backwards(self) -> bool:
        """Whether its only direction begins at the end."""
        return bool(self.node.attribute("direction") == "reverse")

    def _check_dims(self) -> None:
        """Raise `Unfit` unless the inputs have the dims that ONNX prescribes."""
        node, of_all, rows = self.node, self.directions, self.gates * self.hidden
        node.require(1, of_all, rows, self.x.dims[2])
        node.require(2, of_all, rows, self.hidden)
        node.require(3, of_all, 2 * rows)
        node.require(4, self.batch)
        first = (self.batch, of_all) if self.batch_first else (of_all, self.batch)
        for number in range(self.states):
            node.require(5 + number, *first, self.hidden)
        if node.op == "LSTM":
            node.require(7, of_all, 3 * self.hidden)

    def run(self, mode: RecurrentMode | None, cell: RecurrentCell, order: Sequence[int]) -> Result:
        """The outputs of all steps, and the last state.

        Parameters
        ----------
        mode
            The mode of `Recurrent`; None if no mode has the node's activations and attributes.
        cell
            The cell of `RecurrentSteps`.
        order
            For each gate of the operations: the number of ONNX's gate.
        """
        made = self.layer(mode, order)
        return self._by_steps(cell, order) if made is None else made

    def layer(self, mode: RecurrentMode | None, order: Sequence[int]) -> Result | None:
        """The outputs by `Recurrent`; None if it lacks something that the node asks for. See `run`."""
        node, g, lengths = self.node, self.g, self._fixed_lengths()
        whole = lengths is None or set(lengths) == {self.steps}
        if (
            mode is None
            or self.clip > 0
            or (node.has(4) and lengths is None)
            or (self.backwards and not whole)
            or not self.steps * self.batch * self.hidden * self.x.dims[2]
        ):
            return None
        operation: Recurrent[Any] = Recurrent(
            x=g.flip(self.x, 0) if self.backwards else self.x,
            w_ih=self.in_order(1, order),
            w_hh=self.in_order(2, order),
            bias=self._biases(order),
            mode=mode,
            lengths=None if whole else lengths,
            **self._first_states(),
        )
        return self._results(operation, flipped=self.backwards)

    def _by_steps(self, cell: RecurrentCell, order: Sequence[int]) -> Result:
        """The outputs by `RecurrentSteps`. The products with the input are one product for all steps."""
        node, g, biases = self.node, self.g, self._biases(order)
        weights = g.reshape(self.in_order(1, order), (-1, self.x.dims[2]))
        x = g.matmul(self.x, transpose_last(g, weights))
        of_state = None
        if biases is not None:
            x = g.add(x, g.reshape(g.slice(biases, (slice(None), 0)), (-1,)))
            of_state = g.slice(biases, (slice(None), 1))
        lstm = cell is RecurrentCell.LSTM
        operation: RecurrentSteps[Any] = RecurrentSteps(
            x=x,
            w=self.in_order(2, order),
            bias=of_state,
            peepholes=self._peepholes() if lstm else None,
            lengths=node.tensor_or_none(4),
            **self._first_states(),
            cell=cell,
            activations=tuple(self.activations),
            clip=self.clip or None,
            coupled=lstm and bool(node.attribute("input_forget")),
            reverse=self.backwards,
        )
        return self._results(operation)

    def _results(self, operation: Any, *, flipped: bool = False) -> Result:
        """The results of a node, from the operation's."""
        g = self.g
        y, *ends = g.apply(operation, also=("h_n", "c_n")[: self.states])
        y = g.reshape(y, (self.steps, self.batch, self.directions, self.hidden))
        y = g.transpose(g.flip(y, 0) if flipped else y, (1, 0, 2, 3) if self.batch_first else (0, 2, 1, 3))
        return (y, *(g.transpose(each, (1, 0, 2)) if self.batch_first else each for each in ends))

    def _biases(self, order: Sequence[int]) -> Tensor | None:
        """The biases of the input and of the state, dims (directions, 2, gates * hidden)."""
        if not self.node.has(3):
            return None
        both = [*order, *(self.gates + gate for gate in order)]
        return self.g.reshape(self.in_order(3, both), (self.directions, 2, self.gates * self.hidden))

    def _peepholes(self) -> Tensor | None:
        """The peepholes of the gates i, f and o. In ONNX's order, f is last."""
        if not self.node.has(7):
            return None
        return self.g.reshape(self.in_order(7, (0, 2, 1)), (self.directions, 3, self.hidden))

    def _first_states(self) -> dict[str, Any]:
        """The first states that are given, by the operations' names."""
        return {
            name: self.g.transpose(self.node.tensor(number), (1, 0, 2))
            if self.batch_first
            else self.node.tensor(number)
            for name, number in (("h0", 5), ("c0", 6))[: self.states]
            if self.node.has(number)
        }

    def _fixed_lengths(self) -> tuple[int, ...] | None:
        """How many steps each sequence has, if the model has these numbers as constants."""
        if not self.node.has(4):
            return None
        value = self.node.value(4)
        if not value.fixed or value.origin is not None:
            return None
        found = tuple(int(length) for length in value.elements)
        return found if all(0 <= length <= self.steps for length in found) else None

    def in_order(self, number: int, order: Sequence[int]) -> Tensor:
        """Weights with their gates in this order. The model's own weights are reordered when it is loaded."""
        value = self.node.value(number)
        size = value.dims[1] // len(order)
        if not value.fixed:
            g, x = self.g, self.node.tensor(number)
            parts = [g.slice(x, (slice(None), slice(gate * size, (gate + 1) * size))) for gate in order]
            return g.concatenate(parts, 1)

        def order_gates(array: np.ndarray) -> np.ndarray:
            gates = array.reshape(array.shape[0], len(order), size, -1)
            return np.ascontiguousarray(gates[:, list(order)]).reshape(array.shape)

        self.node.reserve(*value.dims, itemsize=value.dtype.itemsize, passing=1)
        return self.node.rearranged_weight(number, f"gates {list(order)}", order_gates)


def _activation(name: str, alpha: Iterator[float], beta: Iterator[float]) -> CellActivation:
    """An activation. It takes its parameters, if it has any, from the remaining ones."""
    if name not in _FUNCTIONS:
        raise Declined(f"the activation {name}")
    function = _FUNCTIONS[name]
    first, second = _PARAMETERS.get(function, (None, None))
    given: dict[str, float] = {}
    if first is not None:
        given["alpha"] = next(alpha, first)
    if second is not None:
        given["beta"] = next(beta, second)
    return CellActivation(function=function, **given)


@operator("RNN", since=7)
def rnn(node: Node, g: GraphBuilder) -> Result:
    network = Network(node, g, "Tanh")
    modes = {"tanh": RecurrentMode.TANH, "relu": RecurrentMode.RELU}
    mode = modes.get(network.names[0]) if len(set(network.names)) == 1 else None
    return network.run(mode, RecurrentCell.PLAIN, (0,))


@operator("GRU", since=7)
def gru(node: Node, g: GraphBuilder) -> Result:
    network = Network(node, g, "Sigmoid", "Tanh")
    behind = bool(node.attribute("linear_before_reset"))
    usual = behind and network.names == ["sigmoid", "tanh"] * network.directions
    cell = RecurrentCell.GRU if behind else RecurrentCell.GRU_RESET_FIRST
    return network.run(RecurrentMode.GRU if usual else None, cell, (1, 0, 2))


@operator("LSTM", since=7)
def lstm(node: Node, g: GraphBuilder) -> Result:
    network = Network(node, g, "Sigmoid", "Tanh", "Tanh")
    usual = network.names == ["sigmoid", "tanh", "tanh"] * network.directions
    usual = usual and not node.has(7) and not node.attribute("input_forget")
    return network.run(RecurrentMode.LSTM if usual else None, RecurrentCell.LSTM, (0, 2, 3, 1))
