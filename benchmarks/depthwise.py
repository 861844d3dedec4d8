"""Depthwise convolutions on a GPU: microseconds of device time of our kernels and of cuDNN's plans.

    python -m benchmarks.depthwise

Needs a GPU. Each plan is checked first, and then timed as a captured CUDA graph: the best of three batches of
20 runs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.plans.compiler import compile_whole
from cudnn_actor.engines.cuda.plans.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.plans.depthwise import compile_depthwise, ways_of_depthwise
from cudnn_actor.engines.cuda.plans.frontend_graph import Refused
from cudnn_actor.engines.cuda.plans.partition import cut
from cudnn_actor.engines.cuda.plans.plan import CudaPlan
from cudnn_actor.engines.cuda.plans.self_check import BuildContext, SelfCheck
from cudnn_actor.engines.cuda.plans.splitting import compile_split
from cudnn_actor.engines.cuda.plans.tuning import time_plan
from cudnn_actor.protocol import ConvSpec, DType, GraphBuilder, OperationGraph, Tensor
from cudnn_actor.protocol.operations import (
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
)

_RUNS = 20
_CANDIDATES = 3
"""How many of cuDNN's candidates are timed, in its own order."""


class Shape(NamedTuple):
    """A batch of images, and a filter of `taps` by `taps`, padded by half of them."""

    samples: int
    channels: int
    size: int
    taps: int
    stride: int = 1


SHAPES = (
    Shape(32, 96, 56, 7),
    Shape(32, 192, 28, 7),
    Shape(32, 384, 14, 7),
    Shape(32, 768, 7, 7),
    Shape(1, 96, 56, 7),
    Shape(32, 96, 112, 3, 2),
    Shape(32, 144, 56, 3),
    Shape(32, 576, 14, 5),
)
PASSES = ("forward", "forward with a bias and gelu", "data", "filter")


def problem(shape: Shape, dtype: DType, what: str) -> OperationGraph:
    """The graph of one of the passes."""
    g = GraphBuilder()
    conv = ConvSpec.symmetric(2, pad=shape.taps // 2, stride=shape.stride, groups=shape.channels)
    x, w = (
        (shape.samples, shape.channels, shape.size, shape.size),
        (shape.channels, 1, shape.taps, shape.taps),
    )
    dims = {"x": x, "w": w, "y": conv.output_dims(x, w)}

    def given(name: str) -> Tensor:
        return g.input(name, dims[name[-1]], dtype, layout="NHWC")

    made: Tensor
    if what == "data":
        operation: Any = ConvolutionBackwardData(dy=given("dy"), w=given("w"), conv=conv)
        made = g.apply(operation, like={"dx": given("x")})
    elif what == "filter":
        operation = ConvolutionBackwardFilter(x=given("x"), dy=given("dy"), conv=conv)
        made = g.apply(operation, like={"dw": given("w")})
    else:
        made = g.apply(ConvolutionForward(x=given("x"), w=given("w"), conv=conv))
    if what == PASSES[1]:
        made = g.gelu(made + g.input("bias", (1, shape.channels, 1, 1), dtype))
    graph = g.build(y=made.astype(dtype)).body
    parts = cut(graph)
    return graph if parts is None else parts.pieces[0].graph


def plans(graph: OperationGraph, handle: Any) -> Iterator[CudaPlan]:
    """Each of ours, and some of cuDNN's: as a whole, and in steps."""
    for choice in range(ways_of_depthwise(graph)):
        yield compile_depthwise(graph, None, choice)
    for index in range(_CANDIDATES):
        with contextlib.suppress(Refused):
            yield compile_whole(graph, handle, None, index)
    with contextlib.suppress(Refused):
        yield compile_split(graph, handle, None)


def measure(graph: OperationGraph, context: BuildContext) -> dict[str, float | str]:
    """Microseconds of each plan, or what is wrong with it."""
    found: dict[str, float | str] = {}
    check = SelfCheck(graph, context)
    try:
        for plan in plans(graph, context.handle):
            fault = check.fault(plan)
            best = min(time_plan(check, plan, _RUNS) for _ in range(3)) if fault is None else 0.0
            found[plan.tag.rpartition("/")[2]] = fault or round(best, 1)
    finally:
        check.close()
    return found


def main() -> None:
    builder = CudaBuilder(0)
    builder.open()
    for dtype, shape, what in itertools.product((DType.BFLOAT16, DType.FLOAT32), SHAPES, PASSES):
        found = measure(problem(shape, dtype, what), builder.context)
        print(json.dumps({"dtype": dtype, **shape._asdict(), "pass": what, "us": found}), flush=True)
    builder.close()


if __name__ == "__main__":
    main()
