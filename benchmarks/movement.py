"""Operations that move elements, on a GPU, as fractions of the bandwidth of a plain copy in the same run.

    python -m benchmarks.movement --out benchmarks/results

Needs a GPU, not PyTorch. Each plan is the one that a service would use, checked, and timed as a captured CUDA
graph: the best of three batches, as of the plain copy. This is the driver's; it reads and writes as many
bytes together as the operation must. Tensors are larger than the caches.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rich.table import Table

from benchmarks.operations import beside_copy, best, each, run_alone
from benchmarks.problem import graph_of
from benchmarks.recording import Row
from cudnn_actor.engines.cuda.checking.self_check import SelfCheck
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.tuning import time_plan
from cudnn_actor.protocol import (
    DType,
    Graph,
    GraphBuilder,
    Layout,
    OperationGraph,
    ResampleMode,
    Tensor,
    TensorSpec,
    Transpose,
)

__all__ = ["Problem", "problems"]

_RUNS = 20
_DTYPES = (DType.INT8, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)
_IMAGES = (256, 64, 112, 112)
_ROWS = (8192, 8192)
_LONG = (16, 1 << 22)


class Problem(NamedTuple):
    """A graph, and how many bytes it must read and write."""

    name: str
    graph: OperationGraph
    nbytes: int


def transposes() -> Iterator[Problem]:
    """The transposes of matrices, of images in both directions, and of heads, with packed results."""
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
    """The functions of images in both layouts, with one result each."""
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


def indexed(dtype: DType) -> Iterator[Problem]:
    """Reads and writes at places that indices name, and larger images."""
    # Indices as the self-check draws them: anywhere in the tensor.
    rows, images, some = _ROWS, (_IMAGES[0] // 4, *_IMAGES[1:]), _ROWS[0] // 4
    of: dict[str, tuple[tuple[int, ...], tuple[int, ...], _Function]] = {
        "rows by index": (rows, rows[:1], lambda g, x, places: g.take(x, places, 0)),
        "elements by index in rows": (rows, rows, lambda g, x, places: g.take_along_axis(x, places, 1)),
        "a quarter of the rows changed": (
            rows,
            (some,),
            lambda g, x, places: g.put(x, places, g.input("updates", (some, rows[1]), dtype)),
        ),
        "twice as large, nearest": (images, (), lambda g, x, _: g.resize(x, scales=(2, 2), axes=(2, 3))),
        "twice as large, linear": (
            images,
            (),
            lambda g, x, _: g.resize(x, scales=(2, 2), axes=(2, 3), mode=ResampleMode.LINEAR),
        ),
    }
    for name, (dims, places, build) in of.items():
        g = GraphBuilder()
        x = g.input("x", dims, dtype)
        graph = g.build(y=build(g, x, g.input("places", places, DType.INT64) if places else x))
        yield Problem(f"{name}, {dtype.value}", graph.body, _whole(graph))


def ordered(dtype: DType) -> Iterator[Problem]:
    """Sorting and cumulative functions, along rows and columns of a matrix, and along few long rows."""
    of: dict[str, tuple[tuple[int, int], Callable[[GraphBuilder, Tensor], Tensor]]] = {
        "sort of rows": (_ROWS, lambda g, x: g.sort(x)),
        "sort of columns": (_ROWS, lambda g, x: g.sort(x, 0)),
        "sort of long rows": (_LONG, lambda g, x: g.sort(x)),
        "places of sorted rows": (_ROWS, lambda g, x: g.argsort(x)),
        "ten largest of rows": (_ROWS, lambda g, x: g.top_k(x, 10).values),
        "cumulative sum of rows": (_ROWS, lambda g, x: g.cumsum(x, 1)),
        "cumulative sum of columns": (_ROWS, lambda g, x: g.cumsum(x, 0)),
        "cumulative sum of long rows": (_LONG, lambda g, x: g.cumsum(x, 1)),
        "cumulative product of rows": (_ROWS, lambda g, x: g.cumprod(x, 1)),
    }
    for name, (dims, build) in of.items():
        g = GraphBuilder()
        graph = g.build(y=build(g, g.input("x", dims, dtype)))
        yield Problem(f"{name}, {dtype.value}", graph.body, _whole(graph))


def resampled(dtype: DType) -> Iterator[Problem]:
    """Cubic resizing, and samples at places of a grid."""
    dims = (_IMAGES[0] // 4, *_IMAGES[1:])
    for mode in (ResampleMode.NEAREST, ResampleMode.LINEAR, ResampleMode.CUBIC):
        g = GraphBuilder()
        x, grid = g.input("x", dims, dtype), g.input("grid", (dims[0], *dims[2:], 2), dtype)
        graph = g.build(y=g.grid_sample(x, grid, mode=mode))
        yield Problem(f"grid sample, {mode.value}, {dtype.value}", graph.body, _whole(graph))
    g = GraphBuilder()
    x = g.input("x", dims, dtype)
    graph = g.build(y=g.resize(x, scales=(2, 2), axes=(2, 3), mode=ResampleMode.CUBIC))
    yield Problem(f"twice as large, cubic, {dtype.value}", graph.body, _whole(graph))


def listed(dtype: DType) -> Iterator[Problem]:
    """Rows and elements that lists of indices name, read and written."""
    rows, batches = _ROWS, (64, 128, _ROWS[1])
    g = GraphBuilder()
    places = g.input("places", (rows[0], 2), DType.INT64)
    graph = g.build(y=g.gather_nd(g.input("x", batches, dtype), places))
    yield Problem(f"rows by lists of indices, {dtype.value}", graph.body, _whole(graph))
    g = GraphBuilder()
    places = g.input("places", (1 << 22, 2), DType.INT64)
    graph = g.build(y=g.gather_nd(g.input("x", rows, dtype), places))
    touched = sum(port.spec.nbytes for port in graph.outputs) * 2 + (1 << 26)  # elements, and the indices
    yield Problem(f"elements by lists of indices, {dtype.value}", graph.body, touched)
    g = GraphBuilder()
    x, places = g.input("x", batches, dtype), g.input("places", (2048, 2), DType.INT64)
    updates = g.input("updates", (2048, batches[2]), dtype)
    graph = g.build(y=g.scatter_nd(x, places, updates))
    name = f"a quarter of the rows changed by lists of indices, {dtype.value}"
    yield Problem(name, graph.body, _whole(graph))


_Function = Callable[[GraphBuilder, Tensor, Tensor], Tensor]
_AROUND = ((0, 0), (0, 0), (1, 1), (1, 1))


def problems() -> Iterator[Problem]:
    """All problems."""
    yield from transposes()
    yield from indexed(DType.BFLOAT16)
    yield from indexed(DType.FLOAT32)
    for dtype in (DType.BFLOAT16, DType.FLOAT32):
        yield from ordered(dtype)
        yield from resampled(dtype)
        yield from listed(dtype)
    for dtype in (DType.BFLOAT16, DType.FLOAT32):
        yield from functions(dtype)


def measure(builder: CudaBuilder, problem: Problem) -> Row:
    """Microseconds of the plan and of the copy, and the bandwidth as a fraction of the copy's."""
    start = time.monotonic()
    plan = builder.build(problem.graph, workspace_limit=None)
    check = SelfCheck(problem.graph, builder.context)
    try:
        us = check.fault(plan) or best(lambda: time_plan(check, plan, _RUNS))
    finally:
        check.close()
    found = {"problem": problem.name, "chosen": plan.tag, "us": us} | beside_copy(us, problem.nbytes)
    return found | {"measured_in_s": round(time.monotonic() - start, 1)}


def main() -> None:
    run_alone(
        "movement",
        __doc__,
        lambda builder, only: each(problems(), functools.partial(measure, builder), only),
        sheet,
    )


def sheet(found: list[Row]) -> Table:
    """The results as a table."""
    table = Table("", "plan", "µs", "copy, µs", "of the copy's bandwidth")
    for row in found:
        table.add_row(*(str(row[name]) for name in ("problem", "chosen", "us", "copy_us", "fraction")))
    return table


if __name__ == "__main__":
    main()
