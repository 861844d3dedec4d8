"""Functions of each element behind a convolution and a product, on a GPU: in cuDNN's graph, and as a kernel.

    python -m benchmarks.epilogues --out benchmarks/results

Needs a GPU, not PyTorch. For each function, microseconds of device time of three plans: the convolution or
product with its bias, the function alone, and both as one graph of cuDNN's, of its first candidate. Which
functions stand behind a convolution or a product in a plan follows from the ratio: see `partition`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from rich.table import Table

from benchmarks.operations import best, run_alone
from benchmarks.recording import Row, attempted
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans.compiler import compile_whole
from cudnn_actor.engines.cuda.plans.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.plans.frontend_graph import Refused
from cudnn_actor.engines.cuda.plans.partition import cut
from cudnn_actor.engines.cuda.plans.plan import CudaPlan
from cudnn_actor.engines.cuda.plans.self_check import SelfCheck
from cudnn_actor.engines.cuda.plans.tuning import time_plan
from cudnn_actor.protocol import GraphBuilder, OperationGraph, PointwiseMode, Tensor
from cudnn_actor.protocol.operations import FUNCTIONS

_RUNS = 20
_MODES = [
    PointwiseMode.RELU,
    PointwiseMode.LEAKY_RELU,
    PointwiseMode.SIGMOID,
    PointwiseMode.TANH,
    PointwiseMode.ELU,
    PointwiseMode.SELU,
    PointwiseMode.GELU,
    PointwiseMode.GELU_TANH,
    PointwiseMode.SOFTPLUS,
    PointwiseMode.SWISH,
    PointwiseMode.MISH,
    PointwiseMode.HARD_SIGMOID,
    PointwiseMode.HARD_SWISH,
    PointwiseMode.ERF,
    PointwiseMode.EXP,
    PointwiseMode.SQRT,
]


def product(g: GraphBuilder) -> Tensor:
    """A row of BERT-base's, of 4096 tokens, to its hidden layer."""
    x, w = g.input("x", (4096, 768), "bfloat16"), g.input("w", (768, 3072), "bfloat16")
    return x @ w + g.input("b", (1, 3072), "bfloat16")


def convolution(g: GraphBuilder) -> Tensor:
    """One of ResNet-50's, of 32 images."""
    x = g.input("x", (32, 128, 28, 28), "bfloat16", layout="NHWC")
    w = g.input("w", (128, 128, 3, 3), "bfloat16", layout="NHWC")
    return g.conv(x, w, pad=1, bias=g.input("b", (128,), "bfloat16"))


BEFORE = {"product": product, "convolution": convolution}


def rows(builder: CudaBuilder, only: str) -> Iterator[Row]:
    """Each function behind each of them whose name holds `only`."""
    for name in filter(lambda name: only in name, BEFORE):
        yield from attempted(name, functools.partial(_behind, builder, name))


def _behind(builder: CudaBuilder, name: str) -> Iterator[Row]:
    make = BEFORE[name]
    g = GraphBuilder()
    result = make(g)
    graph = g.build(y=result)
    alone = timed(builder, graph.body)
    for mode in _MODES:
        assert FUNCTIONS[mode].arity == 1, "it has one operand"
        g = GraphBuilder()
        whole = piece(g.build(y=g.pointwise(mode, make(g))).body)
        g = GraphBuilder()
        spec = graph.outputs[0].spec
        x = g.input("x", spec.dims, spec.dtype, layout=spec.layout)
        apart = timed(builder, g.build(y=g.pointwise(mode, x)).body)
        row: Row = {"before": name, "function": mode.value, "alone_us": alone, "kernel_us": apart}
        with contextlib.suppress(Refused):
            plan = compile_whole(whole, builder.context.handle, None, 0)
            row |= {"fused_us": timed(builder, whole, plan), "plan": plan.tag}
        yield row
        libraries().cupy.get_default_memory_pool().free_all_blocks()


def piece(graph: OperationGraph) -> OperationGraph:
    """A graph without its views."""
    parts = cut(graph)
    return parts.pieces[0].graph if parts is not None and len(parts.pieces) == 1 else graph


def timed(builder: CudaBuilder, graph: OperationGraph, plan: CudaPlan | None = None) -> float:
    """Microseconds of a plan, or of the one that a service would use."""
    chosen = plan or builder.build(graph, workspace_limit=None)
    check = SelfCheck(graph, builder.context)
    try:
        return best(lambda: time_plan(check, chosen, _RUNS))
    finally:
        check.close()


def sheet(found: list[Row]) -> Table:
    table = Table("behind", "function", "alone µs", "kernel µs", "in one graph µs", "of both")
    for row in found:
        both, fused = row["alone_us"] + row["kernel_us"], row.get("fused_us")
        ratio = ("-", "-") if fused is None else (f"{fused}", f"{fused / both:.2f}")
        table.add_row(row["before"], row["function"], f"{row['alone_us']}", f"{row['kernel_us']}", *ratio)
    return table


def main() -> None:
    run_alone("epilogues", __doc__, rows, sheet)


if __name__ == "__main__":
    main()
