"""Times each plan that could run a convolution or a product on a GPU, and the one that is chosen without
tuning.

    python -m benchmarks.rivals --out benchmarks/results

Needs a GPU, not PyTorch. For each candidate of autotuning, microseconds of device time in a captured CUDA
graph, or what is wrong with it if it fails its self-check.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from rich.table import Table

from benchmarks.operations import best, run_alone
from benchmarks.recording import Row, attempted
from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.checking.self_check import SelfCheck
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.compiler import WORKSPACE_BYTES
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.rivals import all_candidates
from cudnn_actor.engines.cuda.planning.tuning import time_plan
from cudnn_actor.protocol import GraphBuilder, Layout, OperationGraph, Tensor

__all__ = ["PROBLEMS", "main"]

_RUNS = 20


def convolution(
    x: tuple[int, ...], w: tuple[int, ...], *, added: bool = False, **options: Any
) -> OperationGraph:
    """A convolution of images with a bias and relu, perhaps with a residual."""
    g = GraphBuilder()
    images = g.input("x", x, "bfloat16", layout=Layout.NHWC)
    y = g.conv(images, g.input("w", w, "bfloat16", layout=Layout.NHWC), **options)
    y = y + g.input("b", (1, w[0], 1, 1), "bfloat16")
    if added:
        y = y + g.input("r", y.dims, "bfloat16", layout=Layout.NHWC)
    return g.build(y=g.relu(y).astype("bfloat16")).body


def product(
    rows: tuple[int, ...], inner: int, columns: int, behind: str = "", *, turned: bool = False
) -> OperationGraph:
    """A product of rows and weights, which are stored by columns if `turned`.

    `behind`: "swiglu", or "bias", or that with "residual", a mode, or "rounded", which is GELU of bfloat16.
    """
    g = GraphBuilder()
    x = g.input("x", (*rows, inner), "bfloat16")
    w = g.input("w", (columns, inner) if turned else (inner, columns), "bfloat16")
    y: Tensor = x @ (g.transpose(w, (1, 0)) if turned else w)
    if behind not in ("", "swiglu"):
        y = y + g.input("b", (*(1,) * len(rows), columns), "bfloat16")
    if behind == "swiglu":
        gate = g.input("gate", y.dims, "float32")
        y = gate * g.sigmoid(gate) * y
    elif behind == "residual":
        y = y + g.input("r", y.dims, "bfloat16")
    elif behind == "rounded":
        y = g.gelu(y.astype("bfloat16"))
    elif behind not in ("", "bias"):
        y = g.pointwise(behind, y)
    graph = g.build(y=y.astype("bfloat16")).body
    parts = cut(graph)
    return graph if parts is None else parts.pieces[0].graph


def batched(batch: tuple[int, ...], m: int, n: int, k: int) -> OperationGraph:
    """A product of two batches of matrices."""
    g = GraphBuilder()
    y = g.input("a", (*batch, m, k), "bfloat16") @ g.input("b", (*batch, k, n), "bfloat16")
    return g.build(y=y.astype("bfloat16")).body


PROBLEMS: dict[str, Callable[[], OperationGraph]] = {
    "convolution, ViT-B/16, 32": lambda: convolution((32, 3, 224, 224), (768, 3, 16, 16), stride=16),
    "convolution, ViT-B/16, 1": lambda: convolution((1, 3, 224, 224), (768, 3, 16, 16), stride=16),
    "convolution, ConvNeXt's stem, 32": lambda: convolution((32, 3, 224, 224), (96, 3, 4, 4), stride=4),
    "convolution, ConvNeXt 96 to 192, 32": lambda: convolution((32, 96, 56, 56), (192, 96, 2, 2), stride=2),
    "convolution, ConvNeXt 384 to 768, 32": lambda: convolution(
        (32, 384, 14, 14), (768, 384, 2, 2), stride=2
    ),
    "convolution, ResNet's stem, 32": lambda: convolution((32, 3, 224, 224), (64, 3, 7, 7), stride=2, pad=3),
    "convolution, ResNet's stem, 1": lambda: convolution((1, 3, 224, 224), (64, 3, 7, 7), stride=2, pad=3),
    "convolution, MobileNet's stem, 32": lambda: convolution(
        (32, 3, 224, 224), (32, 3, 3, 3), stride=2, pad=1
    ),
    "convolution, 1x1, 64 to 256, 32": lambda: convolution((32, 64, 56, 56), (256, 64, 1, 1), added=True),
    "convolution, 1x1, 256 to 64, 32": lambda: convolution((32, 256, 56, 56), (64, 256, 1, 1)),
    "convolution, 1x1, 1024 to 256, 32": lambda: convolution((32, 1024, 14, 14), (256, 1024, 1, 1)),
    "convolution, 1x1, 512 to 2048, 32": lambda: convolution((32, 512, 7, 7), (2048, 512, 1, 1), added=True),
    "convolution, 1x1, 1024 to 256, 1": lambda: convolution((1, 1024, 14, 14), (256, 1024, 1, 1)),
    "convolution, 1x1, 512 to 2048, 1": lambda: convolution((1, 512, 7, 7), (2048, 512, 1, 1), added=True),
    "product, GPT-2 4x512, qkv": lambda: product((4, 512), 768, 2304, "bias"),
    "product, GPT-2 4x512, attended": lambda: product((4, 512), 768, 768, "residual"),
    "product, GPT-2 4x512, wide": lambda: product((4, 512), 768, 3072, "gelu_tanh"),
    "product, GPT-2 4x512, narrow": lambda: product((4, 512), 3072, 768, "residual"),
    "product, GPT-2 4x512, scores of words": lambda: product((4, 512), 768, 50257),
    "product, GPT-2 32x64, logits": lambda: product((32, 64), 768, 50257, turned=True),
    "product, GPT-2 32x64, aligned logits": lambda: product((32, 64), 768, 50264, turned=True),
    "product, odd columns": lambda: product((1024,), 512, 4097, "bias"),
    "product, odd inner dim": lambda: product((1024,), 1025, 2048, "bias"),
    "product, BERT 32x128, rounded": lambda: product((32, 128), 768, 3072, "rounded"),
    "product, BERT 8x128, rounded": lambda: product((8, 128), 768, 3072, "rounded"),
    "product, ViT 32, rounded": lambda: product((32, 197), 768, 3072, "rounded"),
    "product, ConvNeXt 32x56x56, rounded": lambda: product((32, 3136), 96, 384, "rounded"),
    "product, ConvNeXt 32x14x14, rounded": lambda: product((32, 196), 384, 1536, "rounded"),
    "product, ConvNeXt 32x7x7, rounded": lambda: product((32, 49), 768, 3072, "rounded"),
    "product, BERT 32x128, attended": lambda: product((32, 128), 768, 768, "residual"),
    "product, BERT 32x128, wide": lambda: product((32, 128), 768, 3072, "gelu"),
    "product, BERT 32x128, narrow": lambda: product((32, 128), 3072, 768, "residual"),
    "product, ViT 32, qkv": lambda: product((32, 197), 768, 768, "bias"),
    "product, ViT 32, wide": lambda: product((32, 197), 768, 3072, "gelu"),
    "product, ViT 32, narrow": lambda: product((32, 197), 3072, 768, "residual"),
    "product, ViT 1, wide": lambda: product((1, 197), 768, 3072, "gelu"),
    "product, ViT 1, narrow": lambda: product((1, 197), 3072, 768, "residual"),
    "product, Llama 512, up": lambda: product((1, 512), 2048, 5632),
    "product, Llama 512, down": lambda: product((1, 512), 5632, 2048, "residual"),
    "product, Llama 512, gated": lambda: product((1, 512), 2048, 5632, "swiglu"),
    "product, Llama 4096, gated": lambda: product((1, 4096), 2048, 5632, "swiglu"),
    "product, one row": lambda: product((1,), 2048, 5632),
    "product, relu": lambda: product((4096,), 1024, 4096, "relu"),
    "product, square of 4096": lambda: product((4096,), 4096, 4096),
    "product, small": lambda: product((64,), 64, 64, "bias"),
    "product, 384 scores of 197": lambda: batched((32, 12), 197, 197, 64),
}


def rows(builder: CudaBuilder, only: str) -> Iterator[Row]:
    """The plans of each problem in whose name `only` is found."""
    for name, make in PROBLEMS.items():
        if re.search(only, name):
            yield from attempted(name, functools.partial(_timed, builder, name, make()))
            libraries().cupy.get_default_memory_pool().free_all_blocks()


def _timed(builder: CudaBuilder, name: str, graph: OperationGraph) -> Iterator[Row]:
    chosen = builder.build(graph, workspace_limit=None)
    check = SelfCheck(graph, builder.context)
    try:
        yield {
            "problem": name,
            "what": "chosen",
            "plan": chosen.tag.split("/", 3)[3],
            "us": best(lambda: time_plan(check, chosen, _RUNS)),
        }
        for candidate in all_candidates(graph, builder.context.handle, WORKSPACE_BYTES):
            row: Row = {"problem": name, "what": candidate.what}
            try:
                plan = candidate.build()
            except (Refused, EngineFailure) as refused:
                yield row | {"refused": str(refused)}
                continue
            row["plan"] = plan.tag.split("/", 3)[3]
            if (fault := check.fault(plan)) is not None:
                yield row | {"fault": fault}
                continue
            yield row | {"us": best(functools.partial(time_plan, check, plan, _RUNS))}
    finally:
        check.close()


def sheet(found: list[Row]) -> Table:
    """The results as a table, the fastest plans of each problem first."""
    table = Table("problem", "what", "plan", "µs", "")
    order = [*PROBLEMS]
    for row in sorted(found, key=lambda row: (order.index(row["problem"]), row.get("us", 1e9))):
        trouble = row.get("fault") or row.get("refused", "")
        table.add_row(row["problem"], row["what"], row.get("plan", ""), f"{row.get('us', '')}", trouble)
    return table


def main() -> None:
    """Measure, print and keep."""
    run_alone("rivals", __doc__, rows, sheet)


if __name__ == "__main__":
    main()
