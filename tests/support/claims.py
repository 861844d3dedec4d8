"""What the CUDA engine is claimed to run, one row a graph. To claim more, add rows to `rows`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from cudnn_actor.protocol import DType, GraphTensor, Layout, Node, OperationGraph, TensorSpec, Window
from cudnn_actor.protocol.operations import (
    AvgPool,
    AvgPoolBackward,
    LayerNorm,
    LayerNormBackward,
    MaxPool,
    MaxPoolBackward,
    RMSNorm,
    RMSNormBackward,
)

from ..gpu.support_matrix import cells
from ..gpu.support_record import latest

__all__ = ["Row", "graph_of", "rows"]

FLOATS = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


class Row(NamedTuple):
    """A graph, and what is claimed of it.

    Parameters
    ----------
    whole
        Whether one plan of cuDNN's runs all of it; if not, any plan will do.
    recorded
        The plan that a GPU has run, as in the record; empty if there is none.
    """

    name: str
    graph: OperationGraph
    whole: bool
    recorded: str = ""


def rows() -> Iterator[Row]:
    """Every claim, always in the same order."""
    yield from _convolutions()
    yield from _poolings()
    yield from _norms()


def _convolutions() -> Iterator[Row]:
    """The cells of the support matrix, as `docs/support.md` has them: with the seed of its record."""
    record = latest()
    assert record is not None
    for cell in cells():
        outcome = record.cells[cell.name]
        if outcome.ran:
            graph = cell.case(record.setting.seed).graph()
            yield Row(cell.name, graph, whole=not outcome.split, recorded=outcome.plan)


def _poolings() -> Iterator[Row]:
    """By kernels of our own: every class, dtype and number of spatial dims."""
    for dtype, rank in itertools.product(DType, (1, 2, 3)):
        window = Window.symmetric(rank, 3, pad=1, stride=2)
        x = TensorSpec.packed((2, 3, *range(9, 9 + rank)), dtype, Layout.NHWC)
        y = TensorSpec.packed(window.output_dims(x.dims), dtype, Layout.NHWC)
        index = TensorSpec.packed(y.dims, DType.INT64)
        named = f"{dtype}-{rank}d"
        yield _own(f"max_pool-{named}", MaxPool, {"x": x}, {"y": y}, window=window)
        yield _own(f"max_pool_index-{named}", MaxPool, {"x": x}, {"y": y, "index": index}, window=window)
        given = {"dy": y, "index": index}
        yield _own(f"max_pool_bwd-{named}", MaxPoolBackward, given, {"dx": x}, window=window)
        for padding in (False, True) if dtype.is_floating else ():
            of = {"window": window, "include_padding": padding}
            kind = f"{named}-{'with' if padding else 'without'}_padding"
            yield _own(f"avg_pool-{kind}", AvgPool, {"x": x}, {"y": y}, **of)
            yield _own(f"avg_pool_bwd-{kind}", AvgPoolBackward, {"dy": y}, {"dx": x}, **of)


def _norms() -> Iterator[Row]:
    """By kernels of our own: every class and dtype, with all operands and with none that may be left out."""
    for dtype in FLOATS:
        wide = DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
        x = TensorSpec.packed((4, 3, 40), dtype)
        statistic = TensorSpec.packed((4, 3, 1), wide)
        plain = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
        for name, operation in plain.items():
            yield _own(f"{name}-{dtype}-plain", operation, {"x": x}, {"y": x})
        for weights in dict.fromkeys((dtype, wide)):
            w, kind = TensorSpec.packed((40,), weights), f"{dtype}-{weights}_weights"
            mean = {"mean": statistic, "inverse_deviation": statistic}
            rms = {"inverse_rms": statistic}
            of_scale, of_both = {"dx": x, "dscale": w}, {"dx": x, "dscale": w, "dbias": w}
            yield _own(f"layer_norm-{kind}", LayerNorm, {"x": x, "scale": w, "bias": w}, {"y": x, **mean})
            yield _own(f"rms_norm-{kind}", RMSNorm, {"x": x, "scale": w}, {"y": x, **rms})
            given = {"dy": x, "x": x}
            yield _own(f"layer_norm_bwd-{kind}", LayerNormBackward, given | mean | {"scale": w}, of_both)
            yield _own(f"rms_norm_bwd-{kind}", RMSNormBackward, given | rms | {"scale": w}, of_scale)


def _own(name: str, *operands: Any, **attributes: Any) -> Row:
    return Row(name, graph_of(*operands, **attributes), whole=False)


def graph_of(
    operation: Callable[..., Node],
    inputs: Mapping[str, TensorSpec],
    outputs: Mapping[str, TensorSpec],
    **fields: Any,
) -> OperationGraph:
    """A graph of one operation with these operands, by the names of its fields."""
    specs = {**inputs, **outputs}
    node = operation(**{name: number for number, name in enumerate(specs)}, **fields)
    node.check(specs)
    tensors = (
        GraphTensor(uid=number, dims=spec.dims, strides=spec.strides, dtype=spec.dtype)
        for number, spec in enumerate(specs.values())
    )
    return OperationGraph(tensors=tuple(tensors), operations=(node,))
