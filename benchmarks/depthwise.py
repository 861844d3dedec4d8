"""Depthwise convolutions on a GPU: microseconds of device time of our kernels and of cuDNN's plans.

    python -m benchmarks.depthwise --out benchmarks/results

Needs a GPU. Each plan is checked first, and then timed as a captured CUDA graph: the best of three batches of
20 runs.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from rich.table import Table

from cudnn_actor.engines.cuda.checking.self_check import BuildContext, SelfCheck
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.planning.candidates import candidates, names_of
from cudnn_actor.engines.cuda.planning.compiler import compile_whole
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.depthwise import compile_depthwise, ways_of_depthwise
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.planning.tuning import time_plan
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.protocol import ConvSpec, DType, GraphBuilder, OperationGraph, Tensor
from cudnn_actor.protocol.operations import (
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
)

from .operations import best, run_alone
from .recording import Row, attempted

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
    """The plans: each of ours, and some of cuDNN's, as a whole and in steps."""
    for choice in range(ways_of_depthwise(graph)):
        yield compile_depthwise(graph, None, choice)
    with contextlib.suppress(Refused):
        for index in range(min(_CANDIDATES, len(names_of(candidates(graph, handle, None))))):
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
            found[plan.tag.rpartition("/")[2]] = fault or best(partial(time_plan, check, plan, _RUNS))
    finally:
        check.close()
    return found


def main() -> None:
    run_alone("depthwise", __doc__, _rows, sheet)


def _rows(builder: CudaBuilder, only: str) -> Iterator[Row]:
    for dtype, shape, what in itertools.product((DType.BFLOAT16, DType.FLOAT32), SHAPES, PASSES):

        def row(dtype: DType = dtype, shape: Shape = shape, what: str = what) -> Iterator[Row]:
            start = time.monotonic()
            us = measure(problem(shape, dtype, what), builder.context)
            seconds = round(time.monotonic() - start, 1)
            yield {"dtype": dtype, **shape._asdict(), "pass": what, "us": us, "measured_in_s": seconds}

        name = f"{what}, {dtype.value}, {shape}"
        if re.search(only, name):
            yield from attempted(name, row)


def sheet(found: list[Row]) -> Table:
    """The results as a table: the fastest plan of ours, and of cuDNN's, of those that are right."""
    table = Table("", "image and filter", "ours, µs", "cuDNN's, µs", "all")
    for row in found:
        shape = Shape(*(row[name] for name in Shape._fields))
        right = {tag: us for tag, us in row["us"].items() if not isinstance(us, str)}
        of = [
            [us for tag, us in right.items() if tag.startswith("depthwise") is ours] for ours in (True, False)
        ]
        fastest = (str(min(times, default="")) for times in of)
        what = f"{row['pass']}, {row['dtype']}"
        table.add_row(
            what,
            ", ".join(f"{name} {size}" for name, size in shape._asdict().items()),
            *fastest,
            ", ".join(f"{tag} {us}" for tag, us in row["us"].items()),
        )
    return table


if __name__ == "__main__":
    main()
