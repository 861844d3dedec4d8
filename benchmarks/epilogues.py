"""Times what stands before and behind a convolution or a product on a GPU: in cuDNN's graph, and as a kernel.

    python -m benchmarks.epilogues --out benchmarks/results

Needs a GPU, not PyTorch. For each function, microseconds of device time of three plans: the convolution or
product with its bias, the function alone, and both as one graph of cuDNN's, of its first candidate. Which
functions stand behind a convolution or a product in a plan follows from the ratio: see `fusion_rules`. The
same for a scale, a bias and relu before them, and for the largest element of each row of a product.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator

from rich.table import Table

from benchmarks.operations import best, run_alone
from benchmarks.recording import Row, attempted
from cudnn_actor.engines.cuda.checking.self_check import SelfCheck
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.compiler import compile_whole
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.tuning import time_plan
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.protocol import GraphBuilder, Layout, OperationGraph, PointwiseMode, Tensor
from cudnn_actor.protocol.operations import FUNCTIONS

_RUNS = 20
_DIMS = (32, 128, 28, 28)
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
    """A convolution of ResNet-50, of 32 images."""
    x = g.input("x", _DIMS, "bfloat16", layout="NHWC")
    w = g.input("w", (128, 128, 3, 3), "bfloat16", layout="NHWC")
    return g.conv(x, w, pad=1, bias=g.input("b", (128,), "bfloat16"))


BEFORE = {"product": product, "convolution": convolution}


def rows(builder: CudaBuilder, only: str) -> Iterator[Row]:
    """Each function behind each of them, and each pair, in whose name `only` is found."""
    for name in filter(re.compile(only).search, BEFORE):
        yield from attempted(name, functools.partial(_behind, builder, name))
    for name, parts in PAIRS.items():
        if re.search(only, name):
            yield from attempted(name, functools.partial(_pair, builder, name, *parts))


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


_Part = Callable[[GraphBuilder], Tensor]


def _scaled(g: GraphBuilder, dims: tuple[int, ...], of: tuple[int, ...], layout: Layout) -> Tensor:
    """relu(x * scale + bias), as an inference batch norm and its function compute it."""
    x, scale, bias = (
        g.input(name, sizes, "bfloat16", layout=layout)
        for name, sizes in (("x", dims), ("scale", of), ("bias", of))
    )
    return g.relu(x * scale + bias)


def _images(g: GraphBuilder) -> Tensor:
    return _scaled(g, _DIMS, (1, 128, 1, 1), Layout.NHWC)


def _tokens(g: GraphBuilder) -> Tensor:
    """The tokens in three dims, as cuDNN takes products: a tensor has the same dims in every operation of
    its graph."""
    return _scaled(g, (1, 4096, 768), (1, 1, 768), Layout.NCHW)


def _convolved(g: GraphBuilder, x: Tensor) -> Tensor:
    return g.conv(x, g.input("w", (128, 128, 3, 3), "bfloat16", layout="NHWC"), pad=1)


def _multiplied(g: GraphBuilder, x: Tensor) -> Tensor:
    return x @ g.input("w", (1, 768, 3072), "bfloat16")


def _given(dims: tuple[int, ...], layout: Layout = Layout.NCHW) -> _Part:
    return lambda g: g.input("x", dims, "bfloat16", layout=layout)


_After = Callable[[GraphBuilder, Tensor], Tensor]
PAIRS: dict[str, tuple[_Part, _After, _Part]] = {
    "scale, bias and relu before a convolution": (
        _images,
        _convolved,
        _given(_DIMS, Layout.NHWC),
    ),
    "scale, bias and relu before a product": (_tokens, _multiplied, _given((1, 4096, 768))),
    "a product and the largest of each row": (
        lambda g: _multiplied(g, g.input("x", (1, 4096, 768), "bfloat16")),
        lambda g, x: g.max(x, -1, keepdims=True),
        _given((1, 4096, 3072)),
    ),
}
"""Each first part, the second part on its result, and the second part's input where it stands alone."""


def _pair(builder: CudaBuilder, name: str, first: _Part, then: _After, given: _Part) -> Iterator[Row]:
    """Both parts as graphs of their own, and as one graph of cuDNN's."""
    g = GraphBuilder()
    alone = timed(builder, g.build(y=first(g)).body)
    g = GraphBuilder()
    apart = timed(builder, g.build(y=then(g, given(g))).body)
    g = GraphBuilder()
    whole = g.build(y=then(g, first(g))).body
    row: Row = {"before": name, "function": "", "alone_us": alone, "kernel_us": apart}
    try:
        plan = compile_whole(whole, builder.context.handle, None, 0)
        row |= {
            "fused_us": timed(builder, whole, plan),
            "plan": plan.tag,
            "fault": fault(builder, whole, plan),
        }
    except Refused as refused:
        row["refused"] = str(refused)
    yield row


def fault(builder: CudaBuilder, graph: OperationGraph, plan: CudaPlan) -> str | None:
    """The fault of a plan's results; None if they are right."""
    check = SelfCheck(graph, builder.context)
    try:
        return check.fault(plan)
    finally:
        check.close()


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
