"""Gradients of graphs against differences of what the CPU engine computes, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan
from cudnn_actor.protocol import Graph, GraphBuilder, Tensor

__all__ = ["Function", "Values", "check_gradients", "computed", "gradients"]

Values = Mapping[str, np.ndarray]
Function = Callable[..., Tensor | Sequence[Tensor]]
"""From a builder, and its inputs by their names, the outputs."""
MOST_ELEMENTS = 24
"""Of each input, of which the gradient is compared."""


def computed(graph: Graph, values: Values) -> dict[str, np.ndarray]:
    """The outputs of a graph by its operations' definitions."""
    with np.errstate(invalid="ignore"):  # an integer of NaN is just any
        found = {port.name: np.full(port.spec.dims, np.nan, port.spec.dtype.numpy) for port in graph.outputs}
    buffers = [{**values, **found}[graph.names_of[uid]] for uid in graph.body.bound]
    EvaluatedPlan("", graph.body).bind(np.empty(0, np.uint8)).run(buffers, ())
    return found


def gradients(
    function: Function, values: Values, wrt: Sequence[str] | None = None
) -> tuple[Callable[[Values], float], dict[str, np.ndarray]]:
    """A weighted sum of a function's outputs, and its gradients at these values, by name.

    `wrt`: the names; None for all floats.
    """
    g = GraphBuilder()
    inputs = {name: g.input(name, array.shape, array.dtype) for name, array in values.items()}
    made = function(g, **inputs)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    weights = {
        f"weight{n}": np.random.default_rng(n + 1000).uniform(0.5, 1.5, y.dims).astype(y.dtype.numpy)
        for n, y in enumerate(outputs)
    }
    upstream = [g.input(name, weight.shape, weight.dtype) for name, weight in weights.items()]
    names = [n for n, array in values.items() if array.dtype.kind == "f"] if wrt is None else list(wrt)
    found = g.grad(outputs, [inputs[name] for name in names], upstream)
    forward = g.build({f"y{n}": y for n, y in enumerate(outputs)})
    backward = g.build({f"gradient of {name}": dx for name, dx in zip(names, found, strict=True)})

    def total(at: Values) -> float:
        ys = computed(forward, {**at, **weights}).values()
        return float(sum((y * w).sum(dtype=np.float64) for y, w in zip(ys, weights.values(), strict=True)))

    results = computed(backward, {**values, **weights})
    return total, {name: results[f"gradient of {name}"] for name in names}


def check_gradients(
    function: Function,
    values: Values,
    wrt: Sequence[str] | None = None,
    *,
    step: float = 1e-5,
    tolerance: float = 1e-7,
) -> dict[str, np.ndarray]:
    """The gradients of a function of float64, each compared with central differences at some elements."""
    total, found = gradients(function, values, wrt)
    for name, dx in found.items():
        places = np.random.default_rng(7).permutation(values[name].size)[:MOST_ELEMENTS]
        wanted = [_difference(total, values, name, int(place), step) for place in places]
        got = dx.reshape(-1)[places]
        scale = max(1.0, float(np.abs(wanted).max(initial=0.0)))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * scale, err_msg=name)
    return found


def _difference(total: Callable[[Values], float], values: Values, name: str, place: int, step: float) -> Any:
    sides = []
    for moved in (step, -step):
        changed = values[name].copy()
        changed.reshape(-1)[place] += moved
        sides.append(total({**values, name: changed}))
    return (sides[0] - sides[1]) / (2 * step)
