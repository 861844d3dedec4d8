"""The CUDA sources that the engine generates, beyond those of the claimed rows' own plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from cudnn_actor.engines.cuda.plans import self_check_memory
from cudnn_actor.engines.cuda.plans.kernels import Expression, Leaf, Scalar, Value, elementwise, source
from cudnn_actor.engines.cuda.plans.reference import Reference
from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import PointwiseMode

from .claims import rows

__all__ = ["sources"]

_BINARY = (PointwiseMode.ADD, PointwiseMode.MUL)
_MOST_DIMS = 8


def sources() -> Iterator[tuple[str, str]]:
    """A name and a source of each; none is there twice."""
    yield "self-check", self_check_memory.source()
    seen = set()
    for name, text in itertools.chain(_elementwise(), _references()):
        if text not in seen:
            seen.add(text)
            yield name, text


def _elementwise() -> Iterator[tuple[str, str]]:
    for mode, double in itertools.product(PointwiseMode, (False, True)):
        operands: tuple[Value, ...] = (Leaf(0, DType.FLOAT32), Scalar(0))[: 1 + (mode in _BINARY)]
        yield f"{mode}-{double}", _kernel(Expression(mode, operands, 0.5), double=double)
    for dtype, double in itertools.product(DType, (False, True)):
        inner = Expression(PointwiseMode.RELU, (Leaf(0, DType.FLOAT32),), dtype=dtype)
        yield f"rounded-{dtype}-{double}", _kernel(Expression(PointwiseMode.TANH, (inner,)), double=double)
    for read, written, double in itertools.product(DType, DType, (False, True)):
        yield f"{read}-to-{written}-{double}", _kernel(Leaf(0, read), written, double=double)
    for rank in range(1, _MOST_DIMS + 1):
        yield f"{rank}d", _kernel(Leaf(0, DType.FLOAT32), rank=rank, double=False)


def _kernel(value: Value, dtype: DType = DType.FLOAT32, *, rank: int = 2, double: bool) -> str:
    strides = [tuple(3 * 5**axis for axis in reversed(range(rank)))] * 2  # with gaps: no two axes become one
    kernel = elementwise(value, dtype, double, (2,) * rank, strides)
    assert len(kernel.dims) == rank
    return source(kernel)


def _references() -> Iterator[tuple[str, str]]:
    for row in rows():
        if Reference.covers(row.graph):
            yield f"reference-{row.name}", Reference(row.graph).source
