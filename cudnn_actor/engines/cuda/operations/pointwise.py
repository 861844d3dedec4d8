"""Pointwise operations in a graph of cuDNN's frontend.

https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Pointwise.html
"""

from __future__ import annotations

from cudnn_actor.engines.cuda.plans.frontend_graph import FrontendGraph, Refused
from cudnn_actor.protocol.operations import Pointwise, PointwiseMode

__all__ = ["lower_pointwise"]

_CALLS = {
    PointwiseMode.ADD: "add",
    PointwiseMode.MUL: "mul",
    PointwiseMode.RELU: "relu",
    PointwiseMode.LEAKY_RELU: "leaky_relu",
    PointwiseMode.SIGMOID: "sigmoid",
    PointwiseMode.TANH: "tanh",
    PointwiseMode.GELU: "gelu",
    PointwiseMode.GELU_TANH: "gelu_approx_tanh",
    PointwiseMode.SWISH: "swish",
    PointwiseMode.ELU: "elu",
    PointwiseMode.SOFTPLUS: "softplus",
}
_PARAMETERS = {PointwiseMode.LEAKY_RELU: "negative_slope", PointwiseMode.SWISH: "swish_beta"}
_WITHOUT_PARAMETER = {PointwiseMode.ELU, PointwiseMode.SOFTPLUS}
"""The frontend supports these only with a parameter of 1."""


def lower_pointwise(graph: FrontendGraph, operation: Pointwise[int]) -> None:
    """Add a pointwise operation. Raises `Refused` if the frontend does not have it."""
    mode, parameter = operation.mode, operation.effective_parameter
    options = {_PARAMETERS[mode]: parameter} if mode in _PARAMETERS else {}
    if mode in _WITHOUT_PARAMETER and parameter != 1.0:
        raise Refused(f"{mode} with a parameter of {parameter} is not one of cuDNN's pointwise modes")
    inputs = [graph.tensor(uid) for uid in operation.reads]
    call = getattr(graph.pygraph, _CALLS[mode])
    graph.write(operation.result, call(*inputs, compute_data_type=graph.compute(operation), **options))
