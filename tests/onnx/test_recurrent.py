"""Recurrent networks with the attributes that ONNX's reference implementation does not have.

As onnxruntime has them: `clip` bounds what gates are computed from, and not what the hidden state is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cudnn_actor.onnx import backend

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
