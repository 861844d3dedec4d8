"""Recurrent networks with the attributes that ONNX's reference implementation does not have.

As onnxruntime has them: `clip` bounds what gates are computed from, and not what the hidden state is.
"""

from __future__ import annotations

import asyncio
import re
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from cudnn_actor import TensorSpec, spawn
from cudnn_actor.errors import UnsupportedModel
from cudnn_actor.models.source import values_of
from cudnn_actor.onnx import OnnxModel, backend
from cudnn_actor.onnx.operators import recurrent
from cudnn_actor.service import GraphLimits

from ..engines.differences import computed
from ..in_one_test import cases_in_one_test
from .small_models import FLOAT, INT64, graph_of, model_of, node
from .test_against_the_reference import Draw, of_node

Function = Callable[[np.ndarray], np.ndarray]
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


@pytest.fixture(autouse=True)
def the_shared_service_ends() -> Iterator[None]:
    yield
    backend.close()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


def bounded(function: Function, bound: float) -> Function:
    return lambda v: function(np.clip(v, -bound, bound))


def stepped(op: str, weights: Any, x: Any, state: Any, functions: list[Function], **of: Any) -> Any:
    """The state behind a step, in float64. Gates are split as ONNX orders them."""
    w, r, b = weights
    f, *rest = [bounded(each, of.get("clip", np.inf)) for each in functions]
    hidden = r.shape[-1]

    def gate(matrix: np.ndarray, number: int) -> np.ndarray:
        return matrix[number * hidden : (number + 1) * hidden]

    def both(number: int) -> np.ndarray:
        biases = gate(b, number) + gate(b[len(b) // 2 :], number)
        return np.asarray(x @ gate(w, number).T + state[0] @ gate(r, number).T + biases)

    if op == "RNN":
        return (f(both(0)),)
    if op == "GRU":
        z, reset = f(both(0)), f(both(1))
        inner = (reset * state[0]) @ gate(r, 2).T + gate(b[len(b) // 2 :], 2)
        new = rest[0](x @ gate(w, 2).T + gate(b, 2) + inner)
        return ((1 - z) * new + z * state[0],)
    i = f(both(0))
    forget = 1 - i if of.get("input_forget") else f(both(2))
    cell = forget * state[1] + i * rest[0](both(3))
    return f(both(1)) * functions[2](cell), cell


def run(op: str, directions: list[list[Function]], **attributes: Any) -> None:
    """A network beside the loop over its steps."""
    draw = Draw(len(op))
    steps, batch, size, hidden, count = 3, 2, 4, 3, len(directions)
    x = draw.floats(steps, batch, size)
    w, r = draw.floats(count, GATES[op] * hidden, size), draw.floats(count, GATES[op] * hidden, hidden)
    b = draw.floats(count, 2 * GATES[op] * hidden)
    states = 2 if op == "LSTM" else 1
    wanted = np.empty((steps, count, batch, hidden))
    for place, functions in enumerate(directions):
        state: Any = tuple(np.zeros((batch, hidden)) for _ in range(states))
        for time in range(steps)[:: -1 if place else 1]:
            weights = (w[place], r[place], b[place])
            state = stepped(op, weights, x[time], state, functions, **attributes)
            wanted[time, place] = state[0]
    attributes |= {"hidden_size": hidden, "direction": "bidirectional" if count == 2 else "forward"}
    model, inputs = of_node(op, [x, w, r, b], attributes, 1)
    np.testing.assert_allclose(backend.run_model(model, inputs)[0], wanted, rtol=1e-5, atol=1e-5)


USUAL: dict[str, list[Function]] = {
    "RNN": [np.tanh],
    "GRU": [sigmoid, np.tanh],
    "LSTM": [sigmoid, np.tanh, np.tanh],
}


@pytest.mark.parametrize("op", GATES)
def test_what_gates_are_computed_from_is_bounded(op: str) -> None:
    run(op, [USUAL[op]] * 2, clip=0.3)


@pytest.mark.parametrize("clip", [0.0, 0.4])
def test_what_is_let_in_is_forgotten(clip: float) -> None:
    run("LSTM", [USUAL["LSTM"]], input_forget=1, **({"clip": clip} if clip else {}))


def test_activations_take_their_parameters_in_order() -> None:
    functions: list[list[Function]] = [
        [lambda v: np.clip(0.3 * v + 0.4, 0, 1), np.tanh, lambda v: np.where(v > 0.1, v, 0)],
        [lambda v: np.where(v > 0, v, 0.2 * v), lambda v: 0.7 * np.tanh(1.2 * v), lambda v: 0.5 * v + 0.6],
    ]
    names = ["HardSigmoid", "Tanh", "ThresholdedRelu", "LeakyRelu", "ScaledTanh", "Affine"]
    alpha, beta = [0.3, 0.1, 0.2, 0.7, 0.5], [0.4, 1.2, 0.6]
    run("LSTM", functions, activations=names, activation_alpha=alpha, activation_beta=beta)


def test_parameters_that_are_left_out_have_their_defaults() -> None:
    run("RNN", [[lambda v: np.where(v > 0, v, 0.01 * v)]], activations=["LeakyRelu"])
    run("RNN", [[lambda v: np.clip(0.2 * v + 0.5, 0, 1)]], activations=["HardSigmoid"])


# Unrolled.

STEPS = 269
"""How many steps of `DynamicQuantizeLSTM` fit into a graph of 10,000 operations, as the page says."""


def quantised(steps: int, direction: str = "forward", outputs: int = 1) -> onnx.ModelProto:
    ways, draw = 2 if direction == "bidirectional" else 1, np.random.default_rng(5)
    by, zero = np.full(ways, 0.01, np.float32), np.zeros(ways, np.int8)
    tensors: dict[str, Any] = {
        "w": draw.integers(-128, 128, (ways, 3, 8)).astype(np.int8),
        "r": draw.integers(-128, 128, (ways, 2, 8)).astype(np.int8),
        **dict.fromkeys(("by_w", "by_r"), by),
        **dict.fromkeys(("zero_w", "zero_r"), zero),
    }
    names = "x w r - - - - - by_w zero_w by_r zero_r"
    made = " ".join(f"output{number}" for number in range(outputs))
    options: dict[str, Any] = {"hidden_size": 2, "direction": direction}
    lstm = node("DynamicQuantizeLSTM", names, made, domain="com.microsoft", **options)
    imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    results = {f"output{number}": (FLOAT, None) for number in range(outputs)}
    return model_of([lstm], {"x": (FLOAT, [steps, 1, 3])}, results, tensors, opset_imports=imports)


def specialised(model: Any, most: int = GraphLimits().operations) -> Any:
    """Its graph."""
    source = OnnxModel(model)
    specs: Any = {each.name: each.spec for each in source.inputs}
    return source.specialise(specs, {}, most)


def test_a_sequence_may_be_as_long_as_the_page_says() -> None:
    special = specialised(quantised(STEPS))
    assert len(special.graph.body.operations) <= GraphLimits().operations
    with pytest.raises(UnsupportedModel, match=rf"has {STEPS + 1:,} turns, .* the limit is 10,000; raise"):
        specialised(quantised(STEPS + 1))
    with pytest.raises(UnsupportedModel, match="turns"):
        specialised(quantised(STEPS // 2 + 20, "bidirectional"))


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_operations_are_foretold_exactly(direction: str) -> None:
    """So a sequence is refused after two steps, or not at all, also in two directions."""
    for outputs in range(1, 4):
        model = quantised(4, direction, outputs)
        special = specialised(model)
        count = len(special.graph.body.operations)
        assert len(specialised(model, count).graph.body.operations) == count
        turns = 8 if direction == "bidirectional" else 4
        with pytest.raises(UnsupportedModel, match=f"has {turns} turns, which are {count} operations"):
            specialised(model, count - 1)


def test_a_sequence_that_is_too_long_is_refused_before_it_is_by_steps() -> None:
    """Which would take hours, and more memory than there is."""
    with pytest.raises(UnsupportedModel, match=r"spawn\(graph_limits=GraphLimits\(operations="):
        specialised(quantised(1_000_000_000))


def test_the_option_that_the_error_names_raises_the_limit() -> None:
    model = quantised(9)
    x = {"x": Draw(3).floats(9, 1, 3)}

    async def results() -> list[np.ndarray]:
        async with spawn(device="cpu", graph_limits=GraphLimits(operations=200)) as gpu:
            with pytest.raises(UnsupportedModel) as refused:
                await gpu.load(model)
        option = re.search(r"GraphLimits\(operations=(\d+)\)", str(refused.value))
        assert option is not None
        found = []
        for most in (int(option[1]), GraphLimits().operations):
            async with spawn(device="cpu", graph_limits=GraphLimits(operations=most)) as gpu:
                loaded = await gpu.load(model)
                found.append((await gpu.run(loaded, x))["output0"])
                await loaded.close()
        return found

    raised, usual = asyncio.run(results())
    np.testing.assert_array_equal(raised, usual)


def test_a_scan_and_a_loop_that_are_too_long_are_refused_after_two_turns() -> None:
    body = graph_of([node("Exp", "part", "e")], {"part": (FLOAT, None)}, {"e": (FLOAT, None)})
    scan = node("Scan", "x", "y", body=body, num_scan_inputs=1)
    with pytest.raises(UnsupportedModel, match=r"has 100,000,000 turns, which are 400,000,00\d operations"):
        specialised(model_of([scan], {"x": (FLOAT, [100_000_000, 3])}, {"y": (FLOAT, None)}))
    ports = {"turn": (INT64, []), "go": (TensorProto.BOOL, []), "v": (FLOAT, [3])}
    body = graph_of(
        [node("Identity", "go", "on"), node("Exp", "v", "e")],
        ports,
        {"on": (TensorProto.BOOL, []), "e": (FLOAT, [3])},
    )
    loop = node("Loop", "turns - x", "y", body=body)
    turns = {"turns": np.array(2**62)}
    with pytest.raises(UnsupportedModel, match="turns, which are 4,611,686,018,427,387,904 operations"):
        specialised(model_of([loop], {"x": (FLOAT, [3])}, {"y": (FLOAT, None)}, turns))


# As operations.


def network(op: str, steps: int, **more: Any) -> tuple[Any, dict[str, np.ndarray]]:
    draw, rows = Draw(5), GATES[op] * 2
    arrays: list[np.ndarray | None] = [
        np.broadcast_to(draw.floats(1, 1, 3), (steps, 1, 3)),
        draw.floats(1, rows, 3) / 4,
        draw.floats(1, rows, 2) / 4,
        draw.floats(1, 2 * rows) / 4,
    ]
    return of_node(op, arrays, {"hidden_size": 2, **more}, 1)


def by_steps() -> Any:
    """While it is entered, every layer is imported as `RecurrentSteps`."""
    return unittest.mock.patch.object(recurrent.Network, "layer", return_value=None)


def kinds(model: Any, **options: Any) -> list[str]:
    source = OnnxModel(model, **options)
    specs: Any = {each.name: each.spec for each in source.inputs}
    graph = source.specialise(specs, {}).graph
    assert graph is not None
    return [each.kind for each in graph.body.operations]


def of_lengths(op: str, direction: str, layout: int, lengths: list[int] | None, known: bool) -> Any:
    """A network with everything that the operation has, and the values of its inputs."""
    draw, count = Draw(31), 2 if direction == "bidirectional" else 1
    steps, batch, size, hidden = 4, 3, 3, 2
    rows, states = GATES[op] * hidden, (2 if op == "LSTM" else 1)
    state = (batch, count, hidden) if layout else (count, batch, hidden)
    arrays: list[np.ndarray | None] = [
        draw.floats(*((batch, steps, size) if layout else (steps, batch, size))),
        draw.floats(count, rows, size),
        draw.floats(count, rows, hidden),
        draw.floats(count, 2 * rows),
        None if lengths is None else np.array(lengths, np.int32),
        *(draw.floats(*state) for _ in range(states)),
    ]
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": direction, "layout": layout}
    if op == "GRU":
        attributes["linear_before_reset"] = 1
    model, inputs = of_node(op, arrays, attributes, 1 + states)
    if known:
        names = [each for each in model.graph.node[0].input[1:5] if each]
        tensors = [onnx.numpy_helper.from_array(inputs.pop(name), name) for name in names]
        model.graph.initializer.extend(tensors)
        kept = [each for each in model.graph.input if each.name in inputs]
        del model.graph.input[:]
        model.graph.input.extend(kept)
    return model, inputs


@cases_in_one_test
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op", GATES)
def test_both_operations_give_the_same(op: str, direction: str, layout: int) -> None:
    for lengths in (None, [2, 4, 1]):
        model, inputs = of_lengths(op, direction, layout, lengths, known=True)
        as_layer = kinds(model).count("recurrent") == 1
        assert as_layer is (lengths is None or direction != "reverse")
        found = run_by(model, inputs)
        with by_steps():
            in_steps = run_by(model, inputs)
        for one, other in zip(found, in_steps, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def run_by(model: Any, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs of a model's graph on the CPU engine that computes in float64."""
    source = OnnxModel(model)
    special = source.specialise({name: TensorSpec.like(array) for name, array in inputs.items()}, {})
    assert special.graph is not None
    given = {port: inputs[name] for name, port in special.inputs.items()}
    given |= {port: values_of(weight) for port, (_, weight) in special.weights.items()}
    found = computed(special.graph, given)
    return [found[special.outputs[each.name]] for each in source.outputs]


def test_weights_that_are_inputs_are_put_in_order_by_the_graph() -> None:
    model, inputs = of_lengths("LSTM", "bidirectional", 0, None, known=False)
    assert kinds(model).count("recurrent") == 1
    found = run_by(model, inputs)
    with by_steps():
        in_steps = run_by(model, inputs)
    for one, other in zip(found, in_steps, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_lengths_that_a_run_gives_are_read_by_steps() -> None:
    model, inputs = of_lengths("GRU", "bidirectional", 1, [2, 4, 1], known=False)
    assert kinds(model).count("recurrent_steps") == 1
    known, given = of_lengths("GRU", "bidirectional", 1, [2, 4, 1], known=True)
    assert kinds(known).count("recurrent") == 1
    for one, other in zip(run_by(model, inputs), run_by(known, given), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("RNN", {"activations": ["Softsign"]}),
    ("RNN", {"clip": 3.0}),
    ("GRU", {"linear_before_reset": 0}),
    ("GRU", {"linear_before_reset": 1, "activations": ["Sigmoid", "Relu"]}),
    ("LSTM", {"input_forget": 1}),
    ("LSTM", {"activations": ["Sigmoid", "Tanh", "Relu"]}),
]


@pytest.mark.parametrize(("op", "attributes"), OTHERS)
def test_what_libcudnn_does_not_have_is_another_operation(op: str, attributes: dict[str, Any]) -> None:
    found = kinds(network(op, 3, **attributes)[0])
    assert found.count("recurrent_steps") == 1
    assert "recurrent" not in found
    assert len(kinds(network(op, 100_000, **attributes)[0])) == len(found) < 40


def with_peepholes(steps: int, hidden: int, **more: Any) -> tuple[Any, dict[str, np.ndarray]]:
    draw = Draw(3)
    arrays: list[np.ndarray | None] = [draw.floats(steps, 2, 3), draw.floats(1, 4 * hidden, 3) / 2]
    arrays += [draw.floats(1, 4 * hidden, hidden) / 2, draw.floats(1, 8 * hidden), None, None, None]
    return of_node("LSTM", [*arrays, draw.floats(1, 3 * hidden)], {"hidden_size": hidden, **more}, 3)


def test_peepholes_are_those_of_the_reference() -> None:
    model, inputs = with_peepholes(3, 2)
    assert kinds(model).count("recurrent_steps") == 1
    found, wanted = run_by(model, inputs), ReferenceEvaluator(model).run(None, inputs)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_two_thousand_steps_with_peepholes_and_bounds() -> None:
    """Beside a loop in float64. It was 40,000 operations, more than a graph may have."""
    hidden, bound = 3, 0.7
    model, inputs = with_peepholes(2000, hidden, clip=bound)
    x, w, r, b, p = (array.astype(float) for array in inputs.values())
    h, c = np.zeros((2, hidden)), np.zeros((2, hidden))
    of_input, wanted = x @ w[0].T + b[0, : 4 * hidden] + b[0, 4 * hidden :], []
    f, tanh = bounded(sigmoid, bound), bounded(np.tanh, bound)
    for part in of_input:
        i, o, forget, g = np.split(part + h @ r[0].T, 4, axis=1)
        p_i, p_o, p_f = np.split(p[0], 3)
        c_new = f(forget + p_f * c) * c + f(i + p_i * c) * tanh(g)
        h, c = f(o + p_o * c_new) * np.tanh(c_new), c_new
        wanted.append(h)
    y, y_h, y_c = backend.run_model(model, inputs)
    np.testing.assert_allclose(y[:, 0], wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose((y_h[0], y_c[0]), (h, c), rtol=1e-5, atol=1e-5)


def test_a_long_sequence_is_a_few_operations() -> None:
    for op in GATES:
        more: dict[str, Any] = {"linear_before_reset": 1} if op == "GRU" else {}
        assert len(kinds(network(op, 100_000, **more)[0])) == len(kinds(network(op, 2, **more)[0])) < 30


def test_new_weights_are_put_in_order_too() -> None:
    model, inputs = of_lengths("LSTM", "forward", 0, None, known=True)
    other, _ = of_lengths("LSTM", "forward", 0, None, known=True)
    changed = {each.name: 2 * onnx.numpy_helper.to_array(each) for each in other.graph.initializer}
    del other.graph.initializer[:]
    other.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name) for name, array in changed.items()
    )

    async def results() -> list[np.ndarray]:
        async with spawn(device="cpu") as gpu:
            loaded = await gpu.load(model, swappable=True)
            before = (await gpu.run(loaded, inputs))["output0"]
            await loaded.write(changed)
            after = (await gpu.run(loaded, inputs))["output0"]
            return [before, after]

    for found, of in zip(asyncio.run(results()), (model, other), strict=True):
        with by_steps():
            wanted = run_by(of, inputs)[0]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
