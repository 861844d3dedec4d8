"""Operations that move elements, on a GPU, as fractions of the bandwidth of a plain copy in the same run.

    python -m benchmarks.movement --out benchmarks/results

Needs a GPU, not PyTorch. Each plan is the one that a service would use, checked, and timed as a captured CUDA
graph. The plain copy is the driver's; it reads and writes as many bytes together as the operation. Tensors
are larger than the caches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.setting import gpu_versions, write_found
from benchmarks.operations import Problem as Timed
from benchmarks.operations import graph_of
from benchmarks.operations import measure as measured
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans.cuda_builder import CudaBuilder
from cudnn_actor.protocol import (
    DType,
    Graph,
    GraphBuilder,
    Layout,
    OperationGraph,
    Tensor,
    TensorSpec,
    Transpose,
)

__all__ = ["Problem", "problems"]

_RUNS = 20
_DTYPES = (DType.INT8, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)
_IMAGES = (256, 64, 112, 112)
_ROWS = (8192, 8192)


class Problem(NamedTuple):
    """A graph, and how many bytes it must read and write."""

    name: str
    graph: OperationGraph
    nbytes: int


def transposes() -> Iterator[Problem]:
    """Of matrices, of images in both directions, and of heads, with packed results."""
    for dtype in _DTYPES:
        rows, odd = TensorSpec.packed(_ROWS, dtype), TensorSpec.packed((8191, 8193), dtype)
        images = TensorSpec.packed(_IMAGES, dtype)
        last = TensorSpec.packed((256, 112, 112, 64), dtype)
        heads = TensorSpec.packed((16, 4096, 16, 128), dtype)
        for what, x, axes in (
            ("matrix", rows, (1, 0)),
            ("odd matrix", odd, (1, 0)),
            ("channels last", images, (0, 2, 3, 1)),
            ("channels first", last, (0, 3, 1, 2)),
            ("heads", heads, (0, 2, 1, 3)),
            ("keys", heads, (0, 2, 3, 1)),
        ):
            y = TensorSpec.packed([x.dims[axis] for axis in axes], dtype)
            graph = graph_of(Transpose, {"x": x, "y": y}, axes=axes)
            yield Problem(f"transpose, {what}, {dtype.value}", graph, 2 * y.nbytes)


def _whole(graph: Graph) -> int:
    """The bytes of all inputs and outputs."""
    return sum(port.spec.nbytes for port in graph.ports)


def functions(dtype: DType) -> Iterator[Problem]:
    """Of images in both layouts, with one result each."""
    # Besides, the share of all inputs' and outputs' bytes that is moved; 0 for twice the result's.
    of: dict[str, tuple[Callable[[GraphBuilder, Tensor], Tensor], float]] = {
        "slice of channels": (lambda _, x: x[:, 16:48], 0),
        "every other column": (lambda _, x: x[..., ::2], 1),  # nothing less can be read
        "in reverse": (lambda g, x: g.flip(x, -1), 0),
        "concatenation of channels": (lambda g, x: g.concatenate((x[:128], x[128:]), 1), 0),
        "concatenation of odd channels": (lambda g, x: g.concatenate((x[:, :33], x[:, 33:]), 1), 0),
        "concatenation of columns": (lambda g, x: g.concatenate((x[:128], x[128:]), 3), 0),
        **{
            f"padding, {mode}": (lambda g, x, mode=mode: g.pad(x, _AROUND, mode=mode), 1)  # type: ignore[misc]
            for mode in ("constant", "edge", "reflect", "symmetric", "wrap")
        },
        "tile": (lambda g, x: g.tile(x[:128], (2, 1, 1, 1)), 0.75),
        "repeat": (lambda g, x: g.repeat(x[:128], 2, 3), 0.75),  # half of x, and as much as x
        "roll": (lambda g, x: g.roll(x, 16, 3), 0),
        "space to depth": (lambda g, x: g.space_to_depth(x, 2), 0),
        "depth to space": (lambda g, x: g.depth_to_space(x, 2), 0),
    }
    for layout in (Layout.NCHW, Layout.NHWC):
        for name, (build, share) in of.items():
            g = GraphBuilder()
            x = g.input("x", _IMAGES, dtype, layout=layout)
            graph = g.build(y=build(g, x))
            (y,) = graph.outputs
            nbytes = int(_whole(graph) * share) if share else 2 * y.spec.nbytes
            yield Problem(f"{name}, {dtype.value}, {layout.value}", graph.body, nbytes)


_AROUND = ((0, 0), (0, 0), (1, 1), (1, 1))


def problems() -> Iterator[Problem]:
    """All of them."""
    yield from transposes()
    for dtype in (DType.BFLOAT16, DType.FLOAT32):
        yield from functions(dtype)


def copying_us(nbytes: int) -> float:
    """Microseconds of device time of a plain copy that reads and writes so many bytes together."""
    cupy, runtime = libraries().cupy, libraries().runtime
    half = nbytes // 2
    source, target = cupy.zeros(half, "uint8"), cupy.zeros(half, "uint8")
    stream = cupy.cuda.get_current_stream()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    for number in range(3 + _RUNS):
        if number == 3:
            begin.record(stream)
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(int(target.data.ptr), int(source.data.ptr), half, kind, stream.ptr)
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e3 / _RUNS


def measure(builder: CudaBuilder, problem: Problem) -> dict[str, Any]:
    """Microseconds of the plan and of the copy, and the bandwidth as a fraction of the copy's."""
    found = measured(builder, Timed(problem.name, problem.graph, None))
    us = found["us"]["chosen"]
    copied = round(copying_us(problem.nbytes), 1)
    fraction = round(copied / us, 3) if isinstance(us, float) else None
    return {**found, "us": us, "nbytes": problem.nbytes, "copy_us": copied, "fraction": fraction}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = parser.parse_args()
    builder = CudaBuilder(0)
    builder.open()
    found = []
    for problem in problems():
        found.append(measure(builder, problem))
        print(json.dumps(found[-1]), flush=True)
        libraries().cupy.get_default_memory_pool().free_all_blocks()
    builder.close()
    Console(width=160).print(sheet(found))
    if given.out is not None:
        write_found(given.out, "movement", found, versions=gpu_versions())


def sheet(found: list[dict[str, Any]]) -> Table:
    """The results as a table."""
    table = Table("", "plan", "µs", "copy, µs", "of the copy's bandwidth")
    for row in found:
        table.add_row(*(str(row[name]) for name in ("problem", "chosen", "us", "copy_us", "fraction")))
    return table


if __name__ == "__main__":
    main()
