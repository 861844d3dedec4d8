"""Networks of recurrent layers, random and odd ones: the pieces for CUDA compute them, each in one call."""

from __future__ import annotations

import collections
import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.operations.recurrent_calls import Layers, LayersBackward, LayerWeights
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.recurrent_layers import replace_layers
from cudnn_actor.protocol import DType, Graph, GraphBuilder, InvalidRequest, OperationGraph, TensorSpec
from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.operations import (
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    RecurrentMode,
    TensorRole,
)
from cudnn_actor.protocol.operations.base import tensor_of

from ....whole import few
from ..planning.test_partition import check

_WEIGHTS = ("w_ih", "w_hh", "bias", "w_hr")
_STATES = ("h0", "c0")


class Network:
    """A network that a seed draws: layers, what is read of them, and their gradients.

    Half of the networks have layers one above the other and nothing unusual.
    """

    def __init__(self, seed: int) -> None:
        self.draw, self.g = random.Random(seed), GraphBuilder()
        self.is_odd = self.chance(0.5)
        self.mode = self.draw.choice((*RecurrentMode, RecurrentMode.RELU))
        self.steps, self.batch, self.ways = (self.draw.choice(each) for each in ((1, 3), (1, 2), (1, 1, 2)))
        self.hidden = 2
        self.state = 1 if self.mode is RecurrentMode.LSTM and self.chance(0.2) else 2
        self.lengths = self.drawn_lengths() if self.chance(0.3) else None
        self.biases, self.states, self.ends = (self.chance(each) for each in (0.5, 0.5, 0.3))
        self.inputs: dict[str, Tensor] = {}
        self.layers: list[tuple[dict[str, Tensor], Any]] = []
        self.results: dict[str, Tensor] = {}

    def chance(self, probability: float) -> bool:
        return self.draw.random() < probability

    def oddly(self, probability: float) -> bool:
        return self.is_odd and self.chance(probability)

    def drawn_lengths(self) -> tuple[int, ...]:
        return tuple(self.draw.randint(0, self.steps) for _ in range(self.batch))

    def input(self, *dims: int) -> Tensor:
        name = f"in{len(self.inputs)}"
        self.inputs[name] = self.g.input(name, dims, DType.FLOAT64)
        return self.inputs[name]

    # Layers.

    def add_layer(self, x: Tensor) -> None:
        operands: dict[str, Any] = {"x": x, **self.weights(x.dims[2]), **self.initial_states()}
        lengths = self.drawn_lengths() if self.lengths is not None and self.oddly(0.1) else self.lengths
        also = ("h_n", "c_n") if self.mode is RecurrentMode.LSTM else ("h_n",)
        made = self.g.apply(Recurrent(**operands, mode=self.mode, lengths=lengths), also=also)
        self.layers.append((operands, made))
        if self.ends or self.oddly(0.1):
            self.results |= {f"{name}{len(self.layers)}": getattr(made, name) for name in also}

    def weights(self, features: int) -> dict[str, Tensor]:
        """Those of a new layer, or those that the layer below has."""
        if self.layers and self.layers[-1][0]["x"].dims[2] == features and self.chance(0.2):
            return {name: each for name, each in self.layers[-1][0].items() if name in _WEIGHTS}
        rows = self.mode.gates * self.hidden
        dims = {"w_ih": (rows, features), "w_hh": (rows, self.state)}
        dims |= {"bias": (2, rows)} if self.biases else {}
        dims |= {"w_hr": (self.state, self.hidden)} if self.state < self.hidden else {}
        return {name: self.input(self.ways, *each) for name, each in dims.items()}

    def initial_states(self) -> dict[str, Tensor]:
        """Inputs, or what another layer ends with, or all that the one below computes."""
        if self.states is self.oddly(0.1):
            return {}
        h0 = self.input(self.ways, self.batch, self.state)
        if self.layers and self.oddly(0.3):
            others = [self.draw.choice(self.layers)[1].h_n, self.layers[-1][1].y]
            h0 = self.draw.choice([each for each in others if each.dims == h0.dims])
        if self.mode is not RecurrentMode.LSTM:
            return {"h0": h0}
        return {"h0": h0, "c0": self.input(self.ways, self.batch, self.hidden)}

    # What is read of them.

    def add_gradients(self, number: int) -> None:
        draw = self.draw
        values = [each for _, made in self.layers for each in made]
        of = [self.layers[-1][1].y, *([draw.choice(values)] if self.oddly(0.3) else [])]
        if self.ends:  # of all layers
            of += [end for _, (_, *ends) in self.layers for end in ends]
        upstream = [self.input(*each.dims) for each in of]
        if self.oddly(0.4):
            upstream = [draw.choice([one for one in values if one.dims == each.dims]) for each in of]
        some = self.oddly(0.3)
        by = [each for each in self.inputs.values() if not (some and self.chance(0.5))]
        try:
            found = self.g.grad(of, by, upstream)
        except InvalidRequest:  # they depend on none of these inputs
            return
        self.results |= {f"d{number}_{n}": each for n, each in enumerate(found)}

    def updates(self) -> dict[str, Tensor]:
        """A step of an optimiser, and a state that the next run begins with."""
        names = {each.number: name for name, each in self.inputs.items()}
        operands, made = self.draw.choice(self.layers)
        found = {names[operands["w_hh"].number]: operands["w_hh"] * 0.5}
        if "h0" in operands and operands["h0"].number in names:
            found[names[operands["h0"].number]] = made.h_n
        return found

    def graph(self) -> Graph:
        y = self.input(self.steps, self.batch, self.ways * self.state)
        for number in range(self.draw.randint(1, 4)):
            self.add_layer(y)
            y = self.layers[-1][1].y
            if self.oddly(0.2):
                self.results[f"y{number}"] = y
            if self.oddly(0.2):
                y = self.draw.choice([y * 2.0, self.layers[0][1].y, self.layers[0][0]["x"]])
        for number in range(self.draw.choice((0, 1, 1, 2 if self.is_odd else 1))):
            self.add_gradients(number)
        if self.chance(0.6) or not self.results:
            self.results["y"] = self.layers[-1][1].y
        return self.g.build(self.results, updates=self.updates() if self.chance(0.3) else None)


# What a call of libcudnn computes, on NumPy.

Values = dict[int, np.ndarray]
Named = dict[str, np.ndarray]


class Call:
    """Layers or their gradients as one call, whose operands lie in these buffers."""

    def __init__(self, operation: Layers[int] | LayersBackward[int], buffers: Values) -> None:
        self.operation: Any = operation
        self.buffers = buffers
        self.mode: dict[str, Any] = {"mode": operation.mode, "lengths": operation.lengths}
        self.results: Values = {}

    def named(self, layer: int, *names: str) -> dict[str, int]:
        """Operands of one layer, by name, but for those left out."""
        found = ((name, getattr(self.operation, name)) for name in names)
        return {name: several[layer] for name, several in found if several}

    def read(self, layer: int, *names: str) -> Named:
        return {name: self.buffers[uid] for name, uid in self.named(layer, *names).items()}

    def write(self, layer: int, values: Named, *names: str) -> None:
        self.results |= {uid: values[name] for name, uid in self.named(layer, *names).items()}

    def run(self) -> Values:
        """What it writes."""
        layers = self.layers()
        if isinstance(self.operation, Layers):
            for number, own in enumerate(layers):
                self.write(number, own, "h_n", "c_n")
            self.results[self.operation.y] = layers[-1]["y"]
        else:
            self.gradients(layers)
        return self.results

    def layers(self) -> list[Named]:
        """The operands and the results of each layer."""
        given = [self.read(number, *_WEIGHTS, *_STATES) for number in range(len(self.operation.w_hh))]
        return forward_pass(self.mode, self.buffers[self.operation.x], given)

    def gradients(self, layers: Sequence[Named]) -> None:
        """Walk back through layers."""
        operation = self.operation
        dy, y = (None if uid is None else self.buffers[uid] for uid in (operation.dy, operation.y))
        ends = [self.read(number, "dh_n", "dc_n") for number in range(len(layers))]
        found = backward_pass(self.mode, layers, dy, ends, y)
        for number, each in enumerate(found):
            self.write(number, each, "dh0", "dc0", *RecurrentBackwardWeights.outputs)
        self.results[operation.dx] = found[0]["dx"]


def forward_pass(mode: Mapping[str, Any], x: np.ndarray, given: Sequence[Named]) -> list[Named]:
    """The operands and the results of each layer. `given`: weights and states of each."""
    found: list[Named] = []
    layer: Recurrent[int] = Recurrent(x=0, w_ih=0, w_hh=0, **mode)
    ends = ("h_n", "c_n") if layer.mode is RecurrentMode.LSTM else ("h_n",)
    for each in given:
        own = {"x": found[-1]["y"] if found else x, **each}
        found.append(own | evaluated(layer, own, "y", "reserve", *ends))
    return found


def backward_pass(
    mode: Mapping[str, Any],
    layers: Sequence[Named],
    dy: np.ndarray | None,
    ends: Sequence[Named],
    y: np.ndarray | None,
) -> list[Named]:
    """The gradients of each layer. `ends`: those of last states. `y`: what the gradients by weights read."""
    data: RecurrentBackwardData[int] = RecurrentBackwardData(x=0, y=0, w_ih=0, w_hh=0, **mode)
    weights: RecurrentBackwardWeights[int] = RecurrentBackwardWeights(x=0, y=0, slopes=0, **mode)
    found: list[Named] = []
    for own, end in zip(reversed(layers), reversed(ends), strict=True):
        given = {name: own[name] for name in data.inputs if name in own} | end
        back = evaluated(data, given if dy is None else given | {"dy": dy}, *data.outputs)
        given = {name: own[name] for name in weights.inputs if name in own} | {"slopes": back["slopes"]}
        if y is not None and own is layers[-1]:
            given["y"] = y
        wanted = ("dw_ih", "dw_hh", "dbias", *(["dw_hr"] if "w_hr" in own else []))
        found.append(back | evaluated(weights, given, *wanted))
        dy = back["dx"]
    return found[::-1]


def evaluated(operation: Any, given: Mapping[str, np.ndarray], *wanted: str) -> Named:
    """Results of an operation, of whose operands only the names are looked at."""
    found: Named = operation.evaluate(np, given, dict.fromkeys(wanted, TensorSpec.packed(())))
    return found


def calls_of(graph: Graph) -> list[Layers[int] | LayersBackward[int]]:
    """The calls that compute a graph's layers and gradients; the graph is checked, and so is each call."""
    bodies = [graph.body]
    if cut(graph.body) is not None:
        bodies = [piece.graph for piece in check(graph, unit=0.25).pieces]
    recurrent = (Recurrent, RecurrentBackwardData, RecurrentBackwardWeights)
    return [check_call(body) for body in bodies if isinstance(body.operations[0], recurrent)]


def check_call(piece: OperationGraph) -> Layers[int] | LayersBackward[int]:
    """A piece of recurrent layers is one call, which writes all of the piece's results. Returns the call."""
    *before, operation = replace_layers(piece)
    assert isinstance(operation, Layers | LayersBackward)
    check_weights(before, operation)
    rng = np.random.default_rng(1)
    buffers = {
        uid: rng.normal(size=piece.tensor(uid).dims) for uid in piece.bound if uid not in piece.written
    }
    wanted = dict(buffers)
    for each in piece.operations:
        wanted |= piece.evaluate(np, each, wanted)
    found = Call(operation, buffers).run()
    assert {*piece.results} <= found.keys() <= piece.written
    for uid, value in found.items():
        np.testing.assert_array_equal(value, wanted[uid])
    return operation


def check_weights(before: Sequence[Any], operation: Layers[int] | LayersBackward[int]) -> None:
    """The weights are brought into the library's form before, unless the layers have a reserve for them."""
    if operation.reserve is not None:
        assert before == []
        return
    (weights,) = before
    assert isinstance(weights, LayerWeights)
    assert isinstance(operation, Layers)
    for name in (*LayerWeights.inputs, "space", "mode"):
        assert getattr(weights, name) == getattr(operation, name)


@pytest.mark.parametrize("first", few(range(0, 160, 40), 2))
def test_random_networks_are_computed_by_their_pieces_and_these_by_calls(first: int) -> None:
    found = collections.Counter[tuple[bool, bool]]()
    for seed in range(first, first + 40):
        print(f"calls_of(Network({seed}).graph())")  # noqa: T201 - shown if it fails
        calls = calls_of(Network(seed).graph())
        found.update((isinstance(call, Layers), len(call.w_hh) > 1) for call in calls)
    assert len(found) == 4, "some are of several layers, and some of one"


# Odd networks.

M = RecurrentMode.TANH


def two_layers(g: GraphBuilder, *also: str, chained: bool = False) -> tuple[list[Any], list[Any]]:
    """Two layers and their results. `chained`: the upper one begins with the last state of the lower one."""
    x, h0 = (g.input(name, dims, DType.FLOAT64) for name, dims in (("x", (3, 2, 4)), ("h0", (1, 2, 4))))
    w = [g.input(f"w{n}", (1, 4, 4), DType.FLOAT64) for n in range(4)]
    lower: Any = Recurrent(x=x, w_ih=w[0], w_hh=w[1], h0=h0, mode=M)
    below = g.apply(lower, also=("h_n", *also))
    first = below.h_n if chained else h0
    upper: Any = Recurrent(x=below.y, w_ih=w[2], w_hh=w[3], h0=first, mode=M)
    return [lower, upper], [below, g.apply(upper, also=("h_n", *also))]


def gradient_of(g: GraphBuilder, layer: Any, made: Any, **slopes: Any) -> Any:
    """The gradients of a layer by x and by the state before the first step."""
    operands = {name: getattr(layer, name) for name in ("x", "w_ih", "w_hh", "h0", "mode")}
    back: Any = RecurrentBackwardData(**operands, y=made.y, reserve=made.reserve, **slopes)
    return g.apply(back, also=("dh0",))


@pytest.mark.parametrize("wanted", [True, False])
def test_the_gradient_that_comes_from_above_may_be_the_result(*, wanted: bool) -> None:
    """As of half the sum of its squares: one piece computes it, and another reads it."""
    g = GraphBuilder()
    layers, (_, made) = two_layers(g)
    by = [layers[0].w_ih, layers[1].w_hh]
    found = {f"d{n}": each for n, each in enumerate(g.grad([made.y], by, [made.y]))}
    graph = g.build(found | ({"y": made.y} if wanted else {}))
    assert [len(call.w_hh) for call in calls_of(graph)] == [2, 2]


def test_a_layer_that_begins_with_the_last_state_of_another_is_a_piece_of_its_own() -> None:
    g = GraphBuilder()
    _, (below, above) = two_layers(g, chained=True)
    calls = calls_of(g.build(y=above.y, below=below.h_n, above=above.h_n))
    assert [len(call.w_hh) for call in calls] == [1, 1]


def test_a_gradient_of_a_state_that_comes_from_another_layer_is_computed_before() -> None:
    g = GraphBuilder()
    (lower, upper), (below, above) = two_layers(g, "reserve")
    slope, end = (g.input(name, dims, DType.FLOAT64) for name, dims in (("s", (3, 2, 4)), ("e", (1, 2, 4))))
    of_upper = gradient_of(g, upper, above, dy=slope, dh_n=end)
    of_lower = gradient_of(g, lower, below, dy=of_upper.dx, dh_n=of_upper.dh0)
    calls = calls_of(g.build(dx=of_lower.dx, d0=of_lower.dh0))
    assert [len(call.w_hh) for call in calls] == [1, 1, 1]


def test_last_states_that_nobody_reads_are_no_results_of_gradients() -> None:
    """`GraphBuilder` leaves them out, but a graph need not be from there."""
    g = GraphBuilder()
    layers, (_, made) = two_layers(g)
    slope = g.input("slope", made.y.dims, DType.FLOAT64) * 2.0
    body = g.build(d=g.grad([made.y], [layers[0].x], [slope])[0]).body
    end = tensor_of(1000, TensorSpec.packed((1, 2, 4), DType.FLOAT64), role=TensorRole.VIRTUAL)
    number = max(n for n, each in enumerate(body.operations) if isinstance(each, Recurrent))
    operations = [*body.operations]
    operations[number] = msgspec.structs.replace(body.operations[number], h_n=end.uid)
    parts = cut(msgspec.structs.replace(body, tensors=(*body.tensors, end), operations=(*operations,)))
    assert parts is not None
    pieces = [piece.graph for piece in parts.pieces if isinstance(piece.graph.operations[0], Recurrent)]
    assert [type(check_call(piece)) for piece in pieces] == [Layers, LayersBackward, LayersBackward]


def test_a_reserve_that_the_gradient_of_another_layer_reads_is_refused() -> None:
    g = GraphBuilder()
    (lower, _), (below, _) = two_layers(g, "reserve")
    other = SimpleNamespace(y=g.input("other", (3, 2, 4), DType.FLOAT64), reserve=below.reserve)
    back = gradient_of(g, lower, other, dy=g.input("slope", (3, 2, 4), DType.FLOAT64))
    parts = cut(g.build(y=below.y, dx=back.dx).body)
    assert parts is not None
    for piece in parts.pieces:
        with pytest.raises(Refused, match="reserve"):
            replace_layers(piece.graph)
