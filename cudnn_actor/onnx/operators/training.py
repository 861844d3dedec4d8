"""Steps of optimisers.

https://onnx.ai/onnx/operators/index.html#ai-onnx-preview-training
"""

from __future__ import annotations

from typing import Any

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder

__all__: list[str] = []

_DOMAIN = "ai.onnx.preview.training"


def _groups(node: Node, count: int) -> list[list[Any]]:
    """The inputs behind the rate and the step: for each tensor that is trained, its own."""
    tensors = node.tensors()[2:]
    many = len(tensors) // count
    return [[tensors[n + many * kind] for kind in range(count)] for n in range(many)]


def _together(results: list[tuple[Any, ...]]) -> Result:
    return tuple(each for kind in zip(*results, strict=True) for each in kind)


@operator("Momentum", domain=_DOMAIN)
def momentum(node: Node, g: GraphBuilder) -> Result:
    rate, step = node.tensor(0), node.tensor(1)
    alpha, beta = node.attribute("alpha"), node.attribute("beta")
    nesterov = node.attribute("mode") == "nesterov"
    results = []
    for x, gradient, speed in _groups(node, 3):
        slope = gradient + x * node.attribute("norm_coefficient")
        first = g.where(g.greater(step, 0), beta, 1.0)
        new = speed * alpha + slope * first
        results.append((x - (slope + new * alpha if nesterov else new) * rate, new))
    return _together(results)


@operator("Adagrad", domain=_DOMAIN)
def adagrad(node: Node, g: GraphBuilder) -> Result:
    rate, step = node.tensor(0), node.tensor(1)
    results = []
    decayed = rate / (g.astype(step, "float32") * node.attribute("decay_factor") + 1.0)
    for x, gradient, squares in _groups(node, 3):
        slope = gradient + x * node.attribute("norm_coefficient")
        new = squares + g.square(slope)
        results.append((x - slope * decayed / (g.sqrt(new) + node.attribute("epsilon")), new))
    return _together(results)


@operator("Adam", domain=_DOMAIN)
def adam(node: Node, g: GraphBuilder) -> Result:
    rate, step = node.tensor(0), g.astype(node.tensor(1), "float32")
    alpha, beta = node.attribute("alpha"), node.attribute("beta")
    started = g.greater(step, 0.0)
    correction = g.sqrt(1.0 - g.power(beta, step)) / (1.0 - g.power(alpha, step))
    corrected = g.where(started, rate * g.where(started, correction, 1.0), rate)
    results = []
    for x, gradient, mean, square in _groups(node, 4):
        slope = gradient + x * node.attribute("norm_coefficient")
        first = mean * alpha + slope * (1 - alpha)
        second = square * beta + g.square(slope) * (1 - beta)
        moved = x - corrected * first / (g.sqrt(second) + node.attribute("epsilon"))
        results.append((moved * (1 - node.attribute("norm_coefficient_post")), first, second))
    return _together(results)
