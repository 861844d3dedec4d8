"""Batch, instance and group norm on CUDA, and sums over channels: cuDNN's, and kernels of our own.

cuDNN has batch and instance norms with all operands, of float32, float16 and
bfloat16 with float32 scale, bias and statistics. Batch norm for inference has
no engine there.
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Normalizations.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cudnn_actor.engines.cuda.cudnn.frontend_graph import FrontendGraph, Refused
from cudnn_actor.engines.cuda.kernels.norm_kernels import Pass
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.norm_passes import (
    CUDNN_NAMES,
    ELEMENTS,
    Described,
    backward,
    forward,
)
from cudnn_actor.protocol.operations import (
    BatchNorm,
    BatchNormBackward,
    BatchNormTraining,
    GenStats,
    GraphTensor,
    GroupNorm,
    GroupNormBackward,
    InstanceNorm,
    InstanceNormBackward,
)
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout

__all__ = ["describe", "lower_channel_norm"]

_STATISTICS = ("mean", "inverse_deviation")


def lower_channel_norm(graph: FrontendGraph, operation: Any) -> None:
    """Add a norm, or sums over channels, to a graph of cuDNN's frontend. Raises `Refused`."""
    x = graph.spec(operation.x)
    samples, channels, *rest = x.dims
    given = dict(operation.named())

    def shape(name: str) -> tuple[list[int], list[int]]:
        """cuDNN's dims and strides: at least four. Statistics and weights have (1 or N, C, 1, ...)."""
        tensor = graph.spec(given[name])
        dims, strides = tensor.dims, tensor.strides
        if name in ELEMENTS:
            more = max(0, 4 - len(dims))
            return [*dims, *[1] * more], [*strides, *strides[-1:] * more]
        if tensor.spec.layout is not Layout.NCHW:
            raise Refused("cuDNN's norms need packed weights and statistics")
        ones = [1] * max(2, len(rest))
        return [samples if len(dims) == 2 else 1, channels, *ones], [channels, 1, *ones]

    wanted = {*operation.inputs, *operation.outputs}
    if isinstance(operation, InstanceNorm) and len(operation.writes) == 1:
        wanted -= {*_STATISTICS}
    if wanted != {*given}:
        raise Refused("cuDNN's norms need all of their operands; instance norm both statistics or none")
    if any(graph.spec(uid).dtype is not DType.FLOAT32 for name, uid in given.items() if name not in ELEMENTS):
        raise Refused("cuDNN's scale, bias and statistics are float32")
    if isinstance(operation, BatchNormTraining) and not (operation.unbiased and operation.count(x.dims) > 1):
        raise Refused("cuDNN's running variance divides by one element less")
    cudnn, pygraph = libraries().cudnn, graph.pygraph
    inputs = {
        CUDNN_NAMES[name]: graph.tensor(uid, *shape(name)) for name, uid in operation.named(operation.inputs)
    }
    found: Sequence[Any]

    if isinstance(operation, BatchNormTraining):
        found = pygraph.batchnorm(
            epsilon=graph.number(operation.epsilon), momentum=graph.number(operation.momentum), **inputs
        )
    elif isinstance(operation, InstanceNorm):
        phases = cudnn.norm_forward_phase
        found = pygraph.instancenorm(
            norm_forward_phase=phases.TRAINING if "mean" in given else phases.INFERENCE,
            epsilon=graph.number(operation.epsilon),
            **inputs,
        )
    elif isinstance(operation, BatchNormBackward):
        found = pygraph.batchnorm_backward(**inputs)
    else:
        found = pygraph.genstats(inputs["input"])
    graph.write_all(operation, found, shape)


# Our own.


def describe(operation: Any, given: Mapping[str, GraphTensor]) -> Described:
    """Describe a norm on these operands, by name. Its dims are (N, groups, channels of a group, spatial)."""
    samples, channels, *rest = given["x"].dims
    groups = operation.groups_of(channels)
    own = channels // groups

    def split(strides: Sequence[int]) -> tuple[int, ...]:
        sample, step, *others = strides
        return (sample, step * own, step, *others)

    beside = {}
    for name, tensor in given.items():
        if not operation.over_samples and name in _STATISTICS:
            beside[name] = (*tensor.strides, 0, *[0] * len(rest))
        elif name not in ELEMENTS:
            beside[name] = (0, tensor.strides[0] * own, tensor.strides[0], *[0] * len(rest))
    dims = (samples, groups, own, *rest)
    others = range(3, len(dims))
    along = (0, 2, *others) if operation.over_samples else (2, *others)
    numbers = (getattr(operation, "epsilon", 0.0), 0.0, 0.0)
    passes: tuple[Pass, ...]
    if isinstance(operation, BatchNorm):
        passes = (_inference(given, along),)
    elif isinstance(operation, BatchNormTraining):
        passes = (forward(given, along, centred=True, **_RUNNING),)
        correction = operation.correction(operation.count(given["x"].dims))
        numbers = (operation.epsilon, operation.momentum, operation.momentum * correction)
    elif isinstance(operation, InstanceNorm | GroupNorm):
        passes = (forward(given, along, centred=True),)
    elif isinstance(operation, BatchNormBackward | InstanceNormBackward | GroupNormBackward):
        passes = backward(given, along, along if operation.over_samples else (0, *others))
    else:
        assert isinstance(operation, GenStats)
        results = {"sum": "{state}.first", "sum_of_squares": "{state}.second"}
        passes = (Pass(along, None, ("{x}", "{x} * {x}"), results=results),)
    return Described(dims, split, beside, passes, numbers)


_RUNNING = {
    "new_running_mean": "(1 - n1) * {running_mean} + n1 * {low}",
    "new_running_variance": "(1 - n1) * {running_variance} + n2 * {state}.squares / (T)length",
}


def _inference(given: Any, along: tuple[int, ...]) -> Pass:
    """The pass of a batch norm whose statistics are operands."""
    scale, bias = " * {scale}" * ("scale" in given), " + {bias}" * ("bias" in given)
    values = ("{mean}", "1 / sqrt({variance} + n0)")
    return Pass(along, values=values, changed=f"({{x}} - {{low}}) * {{high}}{scale}{bias}")
