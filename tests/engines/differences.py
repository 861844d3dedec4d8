"""Gradients of graphs against differences of what the CPU engine computes, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan
from cudnn_actor.protocol import Graph, GraphBuilder, Tensor

from ..whole import some

__all__ = ["Function", "Values", "check_gradients", "computed", "gradients"]

Values = Mapping[str, np.ndarray]
Function = Callable[..., Tensor | Sequence[Tensor]]
"""From a builder, and its inputs by their names, the outputs."""
MOST_ELEMENTS = 24
"""Of each input, along which differences are taken by `make test-all`; `make test` takes a third of them."""


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
    """The gradients of a function of float64, each compared with central differences.

    Those are differences along some elements, and along a random direction, which moves all elements at once:
    a gradient that is wrong anywhere is wrong there.
    """
    total, found = gradients(function, values, wrt)
    for name, dx in found.items():
        rng = np.random.default_rng(7)
        places = rng.permutation(dx.size)[: some(MOST_ELEMENTS)]
        directions = np.zeros((len(places) + 1, dx.size))
        directions[range(len(places)), places] = 1.0
        directions[-1] = rng.standard_normal(dx.size)
        directions[-1] /= np.linalg.norm(directions[-1]) or 1.0
        wanted = [
            _difference(total, values, name, step * each.reshape(dx.shape)) / step for each in directions
        ]
        got = directions @ dx.reshape(-1)
        scale = max(1.0, float(np.abs(wanted).max(initial=0.0)))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * scale, err_msg=name)
    return found


def _difference(total: Callable[[Values], float], values: Values, name: str, moved: np.ndarray) -> float:
    """Half of the difference between what is on both sides."""
    ahead, behind = (total({**values, name: values[name] + side}) for side in (moved, -moved))
    return (ahead - behind) / 2
