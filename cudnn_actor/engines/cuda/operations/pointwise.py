"""Pointwise operations in a graph of cuDNN's frontend. Their formulas in C are in `kernels.formulas`.

https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Pointwise.html
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cudnn_actor.engines.cuda.cudnn.frontend_graph import FrontendGraph, Refused
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.implementation import implement
from cudnn_actor.protocol.operations import FUNCTIONS, Pointwise, PointwiseMode, TensorRole

__all__ = ["FRONTEND", "lower_pointwise"]

_M = PointwiseMode
FRONTEND: Mapping[PointwiseMode, str] = {
    _M.IDENTITY: "identity",
    _M.ABS: "abs",
    _M.NEG: "neg",
    _M.ADD: "add",
    _M.SUB: "sub",
    _M.MUL: "mul",
    _M.DIV: "div",
    _M.SQRT: "sqrt",
    _M.RSQRT: "rsqrt",
    _M.RECIPROCAL: "reciprocal",
    _M.EXP: "exp",
    _M.TANH: "tanh",
    _M.ERF: "erf",
    _M.CEIL: "ceil",
    _M.FLOOR: "floor",
    _M.RELU: "relu",
    _M.LEAKY_RELU: "leaky_relu",
    _M.SIGMOID: "sigmoid",
    _M.ELU: "elu",
    _M.GELU: "gelu",
    _M.GELU_TANH: "gelu_approx_tanh",
    _M.SOFTPLUS: "softplus",
    _M.SWISH: "swish",
    _M.EQ: "cmp_eq",
    _M.NE: "cmp_neq",
    _M.LT: "cmp_lt",
    _M.LE: "cmp_le",
    _M.GT: "cmp_gt",
    _M.GE: "cmp_ge",
    _M.SELECT: "binary_select",
}
"""The methods of cuDNN's frontend that compute the same as our functions.

Left out are those that may compute something else: mod, pow, min and max of NaN, and log, sin, cos and tan
near their zeros.
"""
_OPTIONS: Mapping[PointwiseMode, Mapping[str, str]] = {
    _M.LEAKY_RELU: {"parameter": "negative_slope"},
    _M.SWISH: {"parameter": "swish_beta"},
}
"""The methods' options that are parameters of ours. All other parameters must have their defaults."""


def _bounds(graph: FrontendGraph, operation: Pointwise[int]) -> list[tuple[str, float]]:
    """The bounds that an operation keeps its operand between, each with cuDNN's method of comparison.

    Empty for other operations, and for one that is not behind a convolution: cuDNN has conditions only there.
    """
    replaced = {PointwiseMode.MAX: "cmp_lt", PointwiseMode.MIN: "cmp_gt"}
    given = operation.effective_parameters
    if not graph.convolves:
        return []
    if operation.mode is PointwiseMode.CLIP:
        found = [("cmp_lt", given["lower"]), ("cmp_gt", given["upper"])]
        return [(compare, number) for compare, number in found if math.isfinite(number)]
    number = graph.spec(operation.operands[1]).value if operation.mode in replaced else None
    return [] if number is None or math.isnan(number) else [(replaced[operation.mode], number)]


def _lower_bounds(
    graph: FrontendGraph, operation: Pointwise[int], bounds: Sequence[tuple[str, float]]
) -> None:
    """Add a comparison and a selection for each bound: so NaN stays NaN, which cuDNN's min and max lose."""
    options = {"compute_data_type": graph.compute(operation)}
    value = graph.tensor(operation.operands[0])
    for compare, number in bounds:
        condition = getattr(graph.pygraph, compare)(value, graph.number(number), **options)
        condition.set_data_type(libraries().cudnn.data_type.BOOLEAN)
        value = graph.pygraph.binary_select(graph.number(number), value, condition, **options)
    graph.write(operation.result, value)


def lower_pointwise(graph: FrontendGraph, operation: Pointwise[int]) -> None:
    """Add a pointwise operation. Raises `Refused` if the frontend does not have it."""
    mode, parameters = operation.mode, operation.effective_parameters
    method, optional = FRONTEND.get(mode), _OPTIONS.get(mode, {})
    tensors = [graph.spec(uid) for uid in operation.reads]
    if not operation.compute(tuple(tensor.dtype for tensor in tensors)).is_floating:
        # That is exact if it reads nothing but a convolution's sums, or only converts bytes.
        converts = mode is PointwiseMode.IDENTITY and graph.spec(operation.result).dtype.is_floating
        given = [tensor.dtype.itemsize for tensor in tensors if tensor.role is TensorRole.BOUND]
        if given and not (converts and max(given) == 1):
            raise Refused("cuDNN computes with integers in float32")
    bounds = _bounds(graph, operation)
    if bounds:
        _lower_bounds(graph, operation, bounds)
        return
    if method is None:
        raise Refused(f"{mode} is not one of cuDNN's pointwise modes")
    for name, default in FUNCTIONS[mode].parameters.items():
        if name not in optional and parameters[name] != default:
            raise Refused(f"{mode} with {name}={parameters[name]} is not one of cuDNN's pointwise modes")
    options = {option: parameters[name] for name, option in optional.items()}
    inputs = [graph.tensor(uid) for uid in operation.reads]
    if mode is PointwiseMode.SELECT:  # cuDNN's has the condition last
        inputs = [*inputs[1:], inputs[0]]
    call = getattr(graph.pygraph, method)
    graph.write(operation.result, call(*inputs, compute_data_type=graph.compute(operation), **options))


implement(Pointwise, lower=lower_pointwise)
