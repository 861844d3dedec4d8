"""Parts of networks as graphs on a GPU, beside PyTorch: device time in microseconds, and kernels.

    python -m benchmarks.networks --out benchmarks/results

Needs a GPU and PyTorch. Blocks are timed forward, and forward and backward by `g.grad`, as the plan that
a service would use, replayed as a CUDA graph. PyTorch's are timed eagerly, compiled, and compiled to CUDA
graphs. Each time is the best of three batches. Convolutions of ResNet-50 are timed with what follows them
fused (bias and relu, or bias, residual and relu), and as PyTorch's separate kernels: called one by one, and
captured in a CUDA graph, so that no launch is waited for. Layers of BERT-base are timed as one graph each,
beside `_BY_HAND`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from cudnn_actor.engines.cuda.checking.self_check import SelfCheck
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.tuning import time_plan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.protocol import Graph, GraphBuilder, Layout, Tensor, TensorSpec

from .blocks import BLOCKS, Block
from .gpu.setting import gpu_versions
from .operations import best, captured, torch_us
from .problem import torch_module
from .recording import Row, attempted, keep

_RUNS = 20
_BY_HAND = {(1, 128): 44.0, (1, 512): 52.8, (32, 128): 150.8, (32, 512): 580.8}
"""Sequences of a batch and tokens of each → microseconds of a layer, from an earlier run on an H200 with
cuDNN 9.19: a twelfth of BERT-base's encoder of 12 layers, as 84 plans of cuDNN, fused by hand, in one CUDA
graph."""
_STAGES = ((64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3))
"""Width, size and blocks of each stage of ResNet-50."""


def kernels(call: Callable[[], object]) -> int:
    """How many kernels and copies a call enqueues."""
    profiler = importlib.import_module("torch.profiler")
    call()
    torch_module().cuda.synchronize()
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch_module().cuda.synchronize()
    device = torch_module().autograd.DeviceType.CUDA
    return sum(event.device_type() == device for event in profile.profiler.kineto_results.events())


class Ours:
    """Builds and times graphs as a service would run them."""

    def __init__(self, *, tuned: bool) -> None:
        self._builder = CudaBuilder(0)
        self._builder.open()
        self._tuned = tuned

    def measure(self, graph: Graph) -> Row:
        """The plan's time, its kernels, and the seconds that it took to build."""
        start, body, context = time.monotonic(), graph.body, self._builder.context
        plan = self._builder.build(body, workspace_limit=None)
        if self._tuned:
            plan = self._builder.tune(body, workspace_limit=None, progress=lambda *_: None)
        seconds = time.monotonic() - start
        check = SelfCheck(body, context)
        try:
            us = best(lambda: time_plan(check, plan, _RUNS))
            workspace = check.room_for(plan)
            program = Program(plan, context.handle, context.stream)

            def run() -> None:
                program.run((), check.pointers, check.scalars, workspace.pointer)
                context.stream.synchronize()

            count = kernels(run)
        finally:
            check.close()
        return {"us": us, "kernels": count, "built_in_s": round(seconds, 1), "plan": plan.tag}


def on_gpu(spec: TensorSpec) -> Any:
    """A tensor of a spec, with small values, and its channels last where the spec's are."""
    torch = torch_module()
    tensor = torch.randn(spec.dims, device="cuda").mul_(0.1).to(getattr(torch, spec.dtype.value))
    last = spec.layout is Layout.NHWC
    return tensor.contiguous(memory_format=torch.channels_last) if last else tensor


def blocks(ours: Ours) -> Iterator[Row]:
    """The blocks, each forward and with its backward."""
    for name, make in BLOCKS.items():
        yield from attempted(name, functools.partial(_block, ours, name, make))


def _block(ours: Ours, name: str, make: Callable[[], Block]) -> Iterator[Row]:
    torch = torch_module()
    torch.compiler.reset()
    block = make()
    inputs = {port.name: on_gpu(port.spec) for port in block.training.inputs}
    upstream = inputs.pop("upstream")
    for tensor in inputs.values():
        tensor.requires_grad_()
    ways = {
        "eager": block.torch,
        "compiled": torch.compile(block.torch),
        "compiled, CUDA graphs": torch.compile(block.torch, mode="reduce-overhead"),
    }
    for training, graph in ((False, block.forward), (True, block.training)):
        row: Row = {"part": f"{name}, {'forward and backward' if training else 'forward'}"}
        row |= ours.measure(graph)
        for way, call in ways.items():
            run = functools.partial(_run, call, inputs, upstream if training else None)
            row |= _in_torch(way, lambda run=run: run)  # type: ignore[misc]
        yield row


def _in_torch(way: str, make: Callable[[], Callable[[], object]]) -> Row:
    """The time and the kernels of a way to run something in PyTorch, or its error."""
    try:
        run = make()
        return {way: torch_us(run), f"{way}: kernels": kernels(run)}
    except Exception as error:  # noqa: BLE001 - ours is measured all the same
        return {f"{way}: error": f"{type(error).__name__}: {error}"}


def _run(call: Callable[[Any], Any], inputs: dict[str, Any], upstream: Any = None) -> None:
    """Run a block of PyTorch's, with its backward if there is an upstream gradient."""
    torch = torch_module()
    torch.compiler.cudagraph_mark_step_begin()
    if upstream is not None:
        torch.autograd.grad(call(inputs), list(inputs.values()), upstream)
        return
    with torch.no_grad():
        call(inputs)


class Layer(NamedTuple):
    """Convolutions of ResNet-50: so many of them, all with these dims of an image.

    What follows is a bias, the residual or nothing, and relu, but behind projections.
    """

    name: str
    number: int
    dims: tuple[int, ...]
    filters: int
    taps: int
    stride: int
    residual: bool

    @property
    def relu(self) -> bool:
        return "projection" not in self.name


def layers() -> Iterator[Layer]:
    """All layers."""
    yield Layer("stem", 1, (3, 224, 224), 64, 7, 2, False)
    before, size_before = 64, 56
    for width, size, count in _STAGES:
        stride = size_before // size
        yield Layer(f"{width} in, first", 1, (before, size_before, size_before), width, 1, 1, False)
        yield Layer(f"{width} 3x3, first", 1, (width, size_before, size_before), width, 3, stride, False)
        yield Layer(f"{width} projection", 1, (before, size_before, size_before), 4 * width, 1, stride, False)
        yield Layer(f"{width} in", count - 1, (4 * width, size, size), width, 1, 1, False)
        yield Layer(f"{width} 3x3", count - 1, (width, size, size), width, 3, 1, False)
        yield Layer(f"{width} out", count, (width, size, size), 4 * width, 1, 1, True)
        before, size_before = 4 * width, size


def convolutions(ours: Ours) -> Iterator[Row]:
    """The convolutions of ResNet-50, each with what follows it."""
    for layer in layers():
        yield from attempted(layer.name, functools.partial(_convolution, ours, layer))


def _convolution(ours: Ours, layer: Layer, batch: int = 32) -> Iterator[Row]:
    g, pad, layout = GraphBuilder(), layer.taps // 2, Layout.NHWC
    x = g.input("x", (batch, *layer.dims), "bfloat16", layout=layout)
    w = g.input("w", (layer.filters, layer.dims[0], layer.taps, layer.taps), "bfloat16", layout=layout)
    y = g.conv(x, w, pad=pad, stride=layer.stride, bias=g.input("b", (layer.filters,), "bfloat16"))
    if layer.residual:
        y = y + g.input("r", y.dims, "bfloat16", layout=layout)
    graph = g.build(y=g.relu(y) if layer.relu else y)
    given = {port.name: on_gpu(port.spec) for port in graph.inputs}
    eager = functools.partial(_eager, given, layer.stride, pad, relu=layer.relu)
    row: Row = {"part": f"conv {layer.name}", "count": layer.number, **ours.measure(graph)}
    with torch_module().no_grad():
        row |= _in_torch("eager", lambda: eager)
        yield row | _in_torch("eager, CUDA graph", lambda: captured(eager))


def _eager(given: dict[str, Any], stride: int, pad: int, *, relu: bool) -> Any:
    f = importlib.import_module("torch.nn.functional")
    y = f.conv2d(given["x"], given["w"], given["b"], stride=stride, padding=pad)
    y = y + given["r"] if "r" in given else y
    return f.relu(y) if relu else y


def bert(batch: int, length: int) -> Graph:
    """A layer of BERT-base's encoder, on rows of all tokens."""
    g, width, hidden, heads = GraphBuilder(), 768, 3072, 12

    def weights(name: str, *dims: int) -> Tensor:
        return g.input(name, dims, "bfloat16")

    x = weights("x", batch * length, width)

    def product(x: Tensor, name: str, columns: int) -> Tensor:
        return x @ weights(f"w{name}", x.dims[1], columns) + weights(f"b{name}", columns)

    def normal(x: Tensor, name: str) -> Tensor:
        return g.layer_norm(x, weights(f"scale{name}", width), weights(f"bias{name}", width), epsilon=1e-12)

    qkv = product(x, "qkv", 3 * width).reshape(batch, length, 3, heads, width // heads)
    q, k, v = (qkv[:, :, n].transpose(0, 2, 1, 3) for n in range(3))
    seen = g.attention(q, k, v).transpose(0, 2, 1, 3).reshape(-1, width)
    x = normal(product(seen, "out", width) + x, "1")
    return g.build(y=normal(product(g.gelu(product(x, "up", hidden)), "down", width) + x, "2"))


def bert_in_torch(batch: int, length: int) -> Callable[[dict[str, Any]], Any]:
    """The same in PyTorch, from the inputs by name."""
    f = importlib.import_module("torch.nn.functional")

    def layer(i: dict[str, Any]) -> Any:
        def product(x: Any, name: str) -> Any:
            return f.linear(x, i[f"w{name}"].T, i[f"b{name}"])

        def normal(x: Any, name: str) -> Any:
            return f.layer_norm(x, (768,), i[f"scale{name}"], i[f"bias{name}"], 1e-12)

        x = i["x"]
        q, k, v = product(x, "qkv").view(batch, length, 3, 12, 64).permute(2, 0, 3, 1, 4)
        seen = f.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 768)
        x = normal(product(seen, "out") + x, "1")
        return normal(product(f.gelu(product(x, "up")), "down") + x, "2")

    return layer


def encoders(ours: Ours) -> Iterator[Row]:
    """BERT-base's layer at each size."""
    for batch, length in _BY_HAND:
        name = f"BERT-base's layer, {batch} x {length}"
        yield from attempted(name, functools.partial(_encoder, ours, name, batch, length))


def _encoder(ours: Ours, name: str, batch: int, length: int) -> Iterator[Row]:
    graph, call = bert(batch, length), bert_in_torch(batch, length)
    inputs = {port.name: on_gpu(port.spec) for port in graph.inputs}
    row: Row = {"part": name, "by hand": _BY_HAND[batch, length], **ours.measure(graph)}
    torch_module().compiler.reset()
    compiled = torch_module().compile(call, mode="reduce-overhead")
    for way, layer in (("eager", call), ("compiled, CUDA graphs", compiled)):
        run = functools.partial(_run, layer, inputs)
        row |= _in_torch(way, lambda run=run: run)  # type: ignore[misc]
    yield row


PARTS: dict[str, Callable[[Ours], Iterator[Row]]] = {
    "blocks": blocks,
    "convolutions": convolutions,
    "encoders": encoders,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tuned", action="store_true", help="choose plans by measuring")
    given = parser.parse_args()
    versions = gpu_versions() | {"PyTorch": importlib.metadata.version("torch")}
    ours = Ours(tuned=given.tuned)
    keep(_rows(ours, given.parts), sheet, given.out, "networks", versions=versions, tuned=given.tuned)


def _rows(ours: Ours, parts: Sequence[str]) -> Iterator[Row]:
    for part in parts:
        for row in attempted(part, functools.partial(PARTS[part], ours)):
            yield row
            libraries().cupy.get_default_memory_pool().free_all_blocks()


_WAYS = ("eager", "eager, CUDA graph", "compiled", "compiled, CUDA graphs")


def sheet(found: list[Row]) -> Table:
    """The results as a table, in µs and numbers of kernels, and the sums over ResNet-50's convolutions."""
    table = Table("", "ours, µs", "kernels", "built in s", "by hand", *_WAYS, "eager / ours")
    for row in found:
        others = (_cell(row, way) for way in ("by hand", *_WAYS))
        ours = (str(row[name]) for name in ("part", "us", "kernels", "built_in_s"))
        table.add_row(*ours, *others, f"{row.get('eager', math.nan) / row['us']:.2f}")
    for parts, what in (
        (("in", "3x3", "stem"), "conv+bias+relu"),
        (("out",), "conv+bias+add+relu"),
        ((), "all"),
    ):
        counted = [row for row in found if "count" in row and (not parts or _named(row, parts))]
        if counted:
            table.add_row(f"ResNet-50's, {what}", *_sums(counted))
    return table


def _cell(row: Row, way: str) -> str:
    count = f" ({row[name]})" if (name := f"{way}: kernels") in row else ""
    return f"{row[way]}{count}" if way in row else ""


def _named(row: Row, parts: Sequence[str]) -> bool:
    """Whether a convolution's name, but for its width and its place, is one of these."""
    return any(part in row["part"].partition(",")[0].split() for part in parts)


def _sums(rows: Sequence[Row]) -> Iterator[str]:
    """Cells: times of all layers together, and how many times as long PyTorch's separate kernels take."""
    ours, eager, graph = (
        sum(row["count"] * row.get(way, math.nan) for row in rows)
        for way in ("us", "eager", "eager, CUDA graph")
    )
    yield from (f"{ours:.1f}", "", "", "", f"{eager:.1f}", f"{graph:.1f} ({graph / ours:.2f} x ours)", "", "")
    yield f"{eager / ours:.2f}"


if __name__ == "__main__":
    main()
