"""Recurrent networks: as one operation where there is one, else unrolled.

Unrolled, they are a product of matrices for all steps, and then one for each.
https://onnx.ai/onnx/operators/onnx__LSTM.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.operators.matmul import turned
from cudnn_actor.onnx.unrolling import Unrolling
from cudnn_actor.onnx.values import Declined
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.operations import Recurrent, RecurrentMode

__all__ = ["run_lstm"]

_State = tuple[Tensor, ...]
_Function = Callable[[Any], Tensor]
_PARAMETERS: dict[str, tuple[float, float | None]] = {
    "affine": (1.0, 0.0),
    "elu": (1.0, None),
    "hardsigmoid": (0.2, 0.5),
    "leakyrelu": (0.01, None),
    "scaledtanh": (1.0, 1.0),
    "thresholdedrelu": (1.0, None),
}
"""Activations with parameters, and what alpha and beta are if they are left out."""
_Step = Callable[[Tensor, _State], _State]
"""From the input's part of a step, and the state before it: the state behind it. The first is the output."""
_Product = Callable[[Tensor, Tensor, int, int], Tensor]
"""Of an operand and turned weights, which are those of an input of the node, in a direction."""


class _Network:
    """One node: its parameters, and how its directions are run."""

    def __init__(self, node: Node, g: GraphBuilder, *defaults: str, product: _Product | None = None) -> None:
        self.node, self.g = node, g
        self.product = product or (lambda x, weights, *_: g.matmul(x, weights))
        self.gates, self.states = {"RNN": (1, 1), "GRU": (3, 1), "LSTM": (4, 2)}[node.op]
        x = node.tensor(0)
        self.batch_first = bool(node.attribute("layout", 0))
        self.x = g.transpose(x, (1, 0, 2)) if self.batch_first else x
        self.steps, self.batch, _ = self.x.dims
        self.hidden = node.dims(2)[2]
        self.directions = {"bidirectional": 2}.get(node.attribute("direction"), 1)
        self._check_dims()
        names = node.attribute("activations") or defaults * self.directions
        self.names = [name.lower() for name in names]
        self.clip = node.attribute("clip", 0.0)
        given = {name: iter(node.attribute(f"activation_{name}") or ()) for name in ("alpha", "beta")}
        made = [self._activation(name.lower(), **given) for name in names]
        self.activations = [made[n * len(defaults) : (n + 1) * len(defaults)] for n in range(self.directions)]

    def _check_dims(self) -> None:
        """Raise `Unfit` unless the inputs have the dims that ONNX says of them."""
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

    def _activation(self, name: str, alpha: Iterator[float], beta: Iterator[float]) -> _Function:
        """An activation, which takes its parameters, if it has any, from those that are left."""
        g, (first, second) = self.g, _PARAMETERS.get(name, (None, None))
        a = 0.0 if first is None else next(alpha, first)
        b = 0.0 if second is None else next(beta, second)
        known: dict[str, _Function] = {
            "affine": lambda x: x * a + b,
            "elu": lambda x: g.elu(x, a),
            "hardsigmoid": lambda x: g.clip(x * a + b, 0.0, 1.0),
            "leakyrelu": lambda x: g.leaky_relu(x, a),
            "relu": g.relu,
            "scaledtanh": lambda x: g.tanh(x * b) * a,
            "sigmoid": g.sigmoid,
            "softplus": g.softplus,
            "softsign": g.softsign,
            "tanh": g.tanh,
            "thresholdedrelu": lambda x: g.where(g.greater(x, a), x, 0.0),
        }
        if name not in known:
            raise Declined(f"the activation {name}")
        return known[name]

    def clipped(self, function: _Function) -> _Function:
        """An activation behind the bounds that the network has for what its gates are computed from."""
        if self.clip <= 0:
            return function
        return lambda x: function(self.g.clip(x, -self.clip, self.clip))

    def layer(self, mode: RecurrentMode | None, order: Sequence[int]) -> Result | None:
        """The outputs by one operation; None if that has not what the node asks for.

        Parameters
        ----------
        mode
            Of the operation; None if there is none for the node's activations and attributes.
        order
            Which of ONNX's gates each of the operation's is.
        """
        node, g, lengths = self.node, self.g, self._fixed_lengths()
        whole = lengths is None or set(lengths) == {self.steps}
        backwards = node.attribute("direction") == "reverse"
        floats = [node.tensor(number) for number in (0, 1, 2, 3, 5, 6) if node.has(number)]
        if (
            mode is None
            or self.clip > 0
            or (node.has(4) and lengths is None)
            or (backwards and not whole)
            or not self.steps * self.batch * self.hidden * self.x.dims[2]
            or not self.x.dtype.is_floating
            or any(each.dtype is not self.x.dtype for each in floats)
        ):
            return None
        x = g.flip(self.x, 0) if backwards else self.x
        bias = None
        if node.has(3):
            both = [*order, *(self.gates + gate for gate in order)]
            bias = g.reshape(self._in_order(3, both), (self.directions, 2, self.gates * self.hidden))
        states: dict[str, Any] = {
            name: g.transpose(node.tensor(number), (1, 0, 2)) if self.batch_first else node.tensor(number)
            for name, number in (("h0", 5), ("c0", 6))[: self.states]
            if node.has(number)
        }
        w_ih, w_hh = (self._in_order(number, order) for number in (1, 2))
        operation: Recurrent[Any] = Recurrent(
            x=x, w_ih=w_ih, w_hh=w_hh, bias=bias, mode=mode, lengths=None if whole else lengths, **states
        )
        y, *ends = g.apply(operation, also=("h_n", "c_n")[: self.states])
        y = g.reshape(y, (self.steps, self.batch, self.directions, self.hidden))
        y = g.transpose(g.flip(y, 0) if backwards else y, (1, 0, 2, 3) if self.batch_first else (0, 2, 1, 3))
        return (y, *(g.transpose(each, (1, 0, 2)) if self.batch_first else each for each in ends))

    def _fixed_lengths(self) -> tuple[int, ...] | None:
        """How many steps each sequence has, if the model says so."""
        if not self.node.has(4):
            return None
        value = self.node.value(4)
        if not value.fixed or value.origin is not None:
            return None
        found = tuple(int(length) for length in value.elements)
        return found if all(0 <= length <= self.steps for length in found) else None

    def _in_order(self, number: int, order: Sequence[int]) -> Tensor:
        """Weights with their gates in this order. Those of the model are put in order when it is loaded."""
        value = self.node.value(number)
        size = value.dims[1] // len(order)
        if not value.fixed:
            g, x = self.g, self.node.tensor(number)
            parts = [g.slice(x, (slice(None), slice(gate * size, (gate + 1) * size))) for gate in order]
            return g.concatenate(parts, 1)

        def ordered(array: np.ndarray) -> np.ndarray:
            gates = array.reshape(array.shape[0], len(order), size, -1)
            return np.ascontiguousarray(gates[:, list(order)]).reshape(array.shape)

        self.node.reserve(*value.dims, itemsize=value.dtype.itemsize, passing=1)
        return self.node.rearranged(number, f"gates {list(order)}", ordered)

    def part(self, number: int, direction: int) -> Tensor | None:
        """What an input has for a direction."""
        value = self.node.tensor_or_none(number)
        return None if value is None else self.g.slice(value, direction)

    def recurrence(self, direction: int) -> tuple[Tensor, Tensor | None]:
        """The weights that the state is multiplied with, turned, and their bias."""
        weights, bias = self.part(2, direction), self.part(3, direction)
        assert weights is not None
        size = self.gates * self.hidden
        return turned(self.g, weights), None if bias is None else self.g.slice(bias, slice(size, None))

    def inputs(self, direction: int) -> Tensor:
        """The input's part of each step, dims (steps, batch, gates * hidden)."""
        weights, bias = self.part(1, direction), self.part(3, direction)
        assert weights is not None
        made = self.product(self.x, turned(self.g, weights), 1, direction)
        return (
            made if bias is None else self.g.add(made, self.g.slice(bias, slice(0, self.gates * self.hidden)))
        )

    def gate(self, x: Tensor, number: int) -> Tensor:
        """One of the gates that lie beside each other."""
        return self.g.slice(x, (..., slice(number * self.hidden, (number + 1) * self.hidden)))

    def initial(self, direction: int) -> _State:
        """The state before the first step."""
        found = []
        for number in range(self.states):
            value = self.node.tensor_or_none(5 + number)
            if value is None:
                found.append(self.g.full((self.batch, self.hidden), 0.0, self.x.dtype))
            else:
                index = (slice(None), direction) if self.batch_first else (direction,)
                found.append(self.g.slice(value, index))
        return tuple(found)

    def _unrolling(self) -> Unrolling:
        """What watches the steps. Only outputs that the node has are stacked in the graph."""
        parts, every = self.directions, self.node.wants(0)
        stacks = every + sum(self.node.wants(1 + number) for number in range(self.states))
        behind = (parts + self.batch_first if every else 0) + stacks * (parts + 1)
        return self.node.unrolling(self.steps * parts, int(every), parts=parts, behind=behind)

    def run(self, step_of: Callable[[int], _Step]) -> Result:
        """The outputs: of all steps, and the last state."""
        g, lengths = self.g, self.node.tensor_or_none(4)
        every, last = [], []
        unrolling = self._unrolling()
        for direction in range(self.directions):
            backwards = direction == 1 or self.node.attribute("direction") == "reverse"
            inputs, step, state = self.inputs(direction), step_of(direction), self.initial(direction)
            outputs: list[Tensor] = []
            for time in range(self.steps)[:: -1 if backwards else 1]:
                new = step(g.slice(inputs, time), state)
                output = new[0]
                if lengths is not None:  # a sequence that has ended, or not begun, keeps its state
                    within = g.reshape(g.greater(lengths, time), (self.batch, 1))
                    output = g.where(within, output, 0.0)
                    new = tuple(g.where(within, one, old) for one, old in zip(new, state, strict=True))
                state = new
                outputs.append(output)
                unrolling.turned()
            every.append(g.stack(outputs[:: -1 if backwards else 1]))
            last.append(state)
        y = g.stack(every, 1)  # (steps, directions, batch, hidden)
        y = g.transpose(y, (2, 0, 1, 3)) if self.batch_first else y
        axis = 1 if self.batch_first else 0
        ends = (g.stack([state[number] for state in last], axis) for number in range(self.states))
        return (y, *ends)


@operator("RNN", since=7)
def rnn(node: Node, g: GraphBuilder) -> Result:
    network = _Network(node, g, "Tanh")
    modes = {"tanh": RecurrentMode.TANH, "relu": RecurrentMode.RELU}
    mode = modes.get(network.names[0]) if len(set(network.names)) == 1 else None
    if (made := network.layer(mode, (0,))) is not None:
        return made

    def step_of(direction: int) -> _Step:
        (weights, bias), f = network.recurrence(direction), network.clipped(network.activations[direction][0])

        def step(x: Tensor, state: _State) -> _State:
            return (f(_plus(g, g.add(x, g.matmul(state[0], weights)), bias)),)

        return step

    return network.run(step_of)


@operator("GRU", since=7)
def gru(node: Node, g: GraphBuilder) -> Result:
    network = _Network(node, g, "Sigmoid", "Tanh")
    behind = bool(node.attribute("linear_before_reset"))
    usual = behind and network.names == ["sigmoid", "tanh"] * network.directions
    if (made := network.layer(RecurrentMode.GRU if usual else None, (1, 0, 2))) is not None:
        return made

    def step_of(direction: int) -> _Step:
        weights, bias = network.recurrence(direction)
        f, h = map(network.clipped, network.activations[direction])
        w = [network.gate(weights, n) for n in range(3)]
        b = [None if bias is None else network.gate(bias, n) for n in range(3)]

        def step(x: Tensor, state: _State) -> _State:
            before = state[0]
            z = f(_plus(g, g.add(network.gate(x, 0), g.matmul(before, w[0])), b[0]))
            r = f(_plus(g, g.add(network.gate(x, 1), g.matmul(before, w[1])), b[1]))
            if behind:
                inner = g.multiply(r, _plus(g, g.matmul(before, w[2]), b[2]))
            else:
                inner = _plus(g, g.matmul(g.multiply(r, before), w[2]), b[2])
            new = h(g.add(network.gate(x, 2), inner))
            return (g.add(g.multiply(g.subtract(1.0, z), new), g.multiply(z, before)),)

        return step

    return network.run(step_of)


@operator("LSTM", since=7)
def run_lstm(node: Node, g: GraphBuilder, product: _Product | None = None) -> Result:
    """An LSTM. `product`: how its input and its states are multiplied with weights, else as matrices."""
    network = _Network(node, g, "Sigmoid", "Tanh", "Tanh", product=product)
    usual = network.names == ["sigmoid", "tanh", "tanh"] * network.directions
    usual = usual and product is None and not node.has(7) and not node.attribute("input_forget")
    if (made := network.layer(RecurrentMode.LSTM if usual else None, (0, 2, 3, 1))) is not None:
        return made

    def step_of(direction: int) -> _Step:
        weights, bias = network.recurrence(direction)
        f, c = map(network.clipped, network.activations[direction][:2])
        h = network.activations[direction][2]
        peepholes = network.part(7, direction)
        p = [None if peepholes is None else network.gate(peepholes, n) for n in range(3)]

        def step(x: Tensor, state: _State) -> _State:
            before, cell = state
            gates = _plus(g, g.add(x, network.product(before, weights, 2, direction)), bias)

            def seen(number: int, place: int, of: Tensor) -> Tensor:
                peephole = p[place]
                gate = network.gate(gates, number)
                return gate if peephole is None else g.add(gate, g.multiply(peephole, of))

            i = f(seen(0, 0, cell))
            forget = g.subtract(1.0, i) if node.attribute("input_forget") else f(seen(2, 2, cell))
            new = g.add(g.multiply(forget, cell), g.multiply(i, c(network.gate(gates, 3))))
            return g.multiply(f(seen(1, 1, new)), h(new)), new

        return step

    return network.run(step_of)


def _plus(g: GraphBuilder, x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else g.add(x, bias)
