"""Products of groups of rows, whose bounds are read in each run; a block is of one expert."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step, deal
from cudnn_actor.engines.cpu.fast.lines import Box, Floats, boxes_of_elements
from cudnn_actor.engines.cpu.fast.matrices import blas_operand, result_for_blas
from cudnn_actor.engines.cpu.scratch import Scratch
from cudnn_actor.protocol.operations import GroupedMatMul, GroupedMatMulBackwardWeights, Node
from cudnn_actor.protocol.operations.base import Specs

__all__ = ["grouped_matmul", "grouped_matmul_backward_weights"]

_COLUMNS = 128
"""The fewest columns of a block."""
_BLOCKS = 16
"""A product is cut into at least this many blocks. With as many experts, each is a block."""


def grouped_matmul(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `GroupedMatMul`; None without elements."""
    assert isinstance(node, GroupedMatMul)
    return _Grouped(_products, "weights", "y") if all(spec.size for spec in specs.values()) else None


def grouped_matmul_backward_weights(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `GroupedMatMulBackwardWeights`; None without elements."""
    assert isinstance(node, GroupedMatMulBackwardWeights)
    return _Grouped(_gradients, "dy", "dweights") if all(spec.size for spec in specs.values()) else None


@dataclass(frozen=True)
class _Grouped:
    """`other`, `result`: names of the operand beside the tokens, and of the result."""

    bind_block: Callable[[Floats, Floats, Floats, list[int], int], Call]
    other: str
    result: str

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch of a lane: none."""
        del lanes
        return 0

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        steps: list[Step] = []
        tokens, other = (blas_operand(operands[name], steps, lanes) for name in ("tokens", self.other))
        offsets, result = operands["offsets"], results[self.result]
        into, copies = result_for_blas(result, lanes)
        bounds: list[int] = []

        def read() -> None:
            bounds[:] = [0, *np.clip(np.sort(offsets), 0, len(tokens)).tolist()]

        columns = into.shape[-1]
        parts = -(-_BLOCKS // len(offsets))
        cut = [*boxes_of_elements((columns,), max(_COLUMNS, -(-columns // parts)))]

        def call(block: tuple[int, Box], lane: int) -> Call:
            del lane
            expert, (part,) = block
            return self.bind_block(tokens, other[..., part], into[..., part], bounds, expert)

        products = deal([*itertools.product(range(len(offsets)), cut)], len(lanes), call)
        return [*steps, (read,), products, *copies]


def _products(tokens: Floats, weights: Floats, y: Floats, bounds: list[int], expert: int) -> Call:
    matrix, last = weights[expert], expert == len(weights) - 1

    def run() -> None:
        start, end = bounds[expert : expert + 2]
        if start < end:
            np.matmul(tokens[start:end], matrix, y[start:end])
        if last:
            y[end:] = 0

    return run


def _gradients(tokens: Floats, dy: Floats, dweights: Floats, bounds: list[int], expert: int) -> Call:
    into = dweights[expert]

    def run() -> None:
        start, end = bounds[expert : expert + 2]
        if start < end:
            np.matmul(tokens[start:end].T, dy[start:end], into)
        else:
            into[...] = 0

    return run
