"""An LSTM whose products are not products of matrices of floats. Its steps are operations of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operators.recurrent import Network
from cudnn_actor.onnx.unrolling import Unrolling
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.operations import CellActivation, CellFunction
from cudnn_actor.protocol.operations.matmul import transpose_last

__all__ = ["unrolled_lstm"]

_State = tuple[Tensor, Tensor]
_Function = Callable[[Any], Tensor]
_Step = Callable[[Tensor, _State], _State]
"""A step: from the input's part of it and the state before it to the state after it, whose first element is
the output."""
_Product = Callable[[Tensor, Tensor, int, int], Tensor]
"""A product of an operand and transposed weights, which belong to an input of the node, in a direction."""


def unrolled_lstm(node: Node, g: GraphBuilder, product: _Product) -> Result:
    """The outputs of an LSTM node.

    `product`: how its input and its states are multiplied by weights. Raises `Refused` after two steps if
    all of them are too many operations.
    """
    return _Unrolled(node, g, product).run()


class _Unrolled:
    def __init__(self, node: Node, g: GraphBuilder, product: _Product) -> None:
        self._node, self._g, self._product = node, g, product
        self._of = Network(node, g, "Sigmoid", "Tanh", "Tanh")

    def run(self) -> Result:
        """The outputs of all steps, and the last state."""
        g, of, lengths = self._g, self._of, self._node.tensor_or_none(4)
        every, last = [], []
        unrolling = self._unrolling()
        for direction in range(of.directions):
            backwards = direction == 1 or of.backwards
            inputs, step, state = self._inputs(direction), self._step(direction), self._initial(direction)
            outputs: list[Tensor] = []
            for time in range(of.steps)[:: -1 if backwards else 1]:
                new = step(g.slice(inputs, time), state)
                output = new[0]
                if lengths is not None:  # a sequence that has ended, or not begun, keeps its state
                    within = g.reshape(g.greater(lengths, time), (of.batch, 1))
                    output = g.where(within, output, 0.0)
                    new = (g.where(within, new[0], state[0]), g.where(within, new[1], state[1]))
                state = new
                outputs.append(output)
                unrolling.note_turn()
            every.append(g.stack(outputs[:: -1 if backwards else 1]))
            last.append(state)
        y = g.stack(every, 1)  # (steps, directions, batch, hidden)
        y = g.transpose(y, (2, 0, 1, 3)) if of.batch_first else y
        axis = 1 if of.batch_first else 0
        ends = (g.stack([state[number] for state in last], axis) for number in range(of.states))
        return (y, *ends)

    def _unrolling(self) -> Unrolling:
        """The object that watches the steps. Only outputs that the node has are stacked in the graph."""
        of, every = self._of, self._node.wants(0)
        parts = of.directions
        stacks = every + sum(self._node.wants(1 + number) for number in range(of.states))
        behind = (parts + of.batch_first if every else 0) + stacks * (parts + 1)
        return self._node.unrolling(of.steps * parts, int(every), parts=parts, behind=behind)

    def _step(self, direction: int) -> _Step:
        g, node, of = self._g, self._node, self._of
        weights, bias = self._part(2, direction), self._part(3, direction)
        assert weights is not None
        weights = transpose_last(g, weights)
        bias = None if bias is None else g.slice(bias, slice(4 * of.hidden, None))
        f, c, h = (_function(g, each) for each in of.activations[3 * direction : 3 * direction + 3])
        f, c = self._clip_input(f), self._clip_input(c)
        peepholes = self._part(7, direction)
        p = [None if peepholes is None else self._gate(peepholes, n) for n in range(3)]

        def step(x: Tensor, state: _State) -> _State:
            before, cell = state
            gates = g.add(x, self._product(before, weights, 2, direction))
            gates = gates if bias is None else g.add(gates, bias)

            def gate_sum(number: int, place: int, of: Tensor) -> Tensor:
                peephole = p[place]
                gate = self._gate(gates, number)
                return gate if peephole is None else g.add(gate, g.multiply(peephole, of))

            i = f(gate_sum(0, 0, cell))
            forget = g.subtract(1.0, i) if node.attribute("input_forget") else f(gate_sum(2, 2, cell))
            new = g.add(g.multiply(forget, cell), g.multiply(i, c(self._gate(gates, 3))))
            return g.multiply(f(gate_sum(1, 1, new)), h(new)), new

        return step

    def _clip_input(self, function: _Function) -> _Function:
        """An activation with the network's bounds for its input."""
        clip = self._of.clip
        return (lambda x: function(self._g.clip(x, -clip, clip))) if clip else function

    def _part(self, number: int, direction: int) -> Tensor | None:
        """The part of an input for a direction; None without the input."""
        value = self._node.tensor_or_none(number)
        return None if value is None else self._g.slice(value, direction)

    def _inputs(self, direction: int) -> Tensor:
        """The input's part of each step, dims (steps, batch, gates * hidden)."""
        weights, bias = self._part(1, direction), self._part(3, direction)
        assert weights is not None
        made = self._product(self._of.x, transpose_last(self._g, weights), 1, direction)
        size = 4 * self._of.hidden
        return made if bias is None else self._g.add(made, self._g.slice(bias, slice(0, size)))

    def _gate(self, x: Tensor, number: int) -> Tensor:
        """One of the gates that lie beside each other."""
        hidden = self._of.hidden
        return self._g.slice(x, (..., slice(number * hidden, (number + 1) * hidden)))

    def _initial(self, direction: int) -> _State:
        """The state before the first step."""
        return self._first(5, direction), self._first(6, direction)

    def _first(self, number: int, direction: int) -> Tensor:
        of, value = self._of, self._node.tensor_or_none(number)
        if value is None:
            return self._g.full((of.batch, of.hidden), 0.0, of.x.dtype)
        return self._g.slice(value, (slice(None), direction) if of.batch_first else (direction,))


def _function(g: GraphBuilder, activation: CellActivation) -> _Function:
    """An activation of the graph's tensors."""
    a, b = activation.alpha, activation.beta
    known: dict[CellFunction, _Function] = {
        CellFunction.AFFINE: lambda x: x * a + b,
        CellFunction.ELU: lambda x: g.elu(x, a),
        CellFunction.HARD_SIGMOID: lambda x: g.clip(x * a + b, 0.0, 1.0),
        CellFunction.LEAKY_RELU: lambda x: g.leaky_relu(x, a),
        CellFunction.RELU: g.relu,
        CellFunction.SCALED_TANH: lambda x: g.tanh(x * b) * a,
        CellFunction.SIGMOID: g.sigmoid,
        CellFunction.SOFTPLUS: g.softplus,
        CellFunction.SOFTSIGN: g.softsign,
        CellFunction.TANH: g.tanh,
        CellFunction.THRESHOLDED_RELU: lambda x: g.where(g.greater(x, a), x, 0.0),
    }
    return known[activation.function]
