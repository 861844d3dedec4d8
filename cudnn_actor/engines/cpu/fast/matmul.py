"""Products of matrices and of batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step, deal
from cudnn_actor.engines.cpu.fast.lines import Box, Floats, boxes_of_elements
from cudnn_actor.engines.cpu.fast.matrices import copy_step, product_steps
from cudnn_actor.engines.cpu.scratch import Scratch
from cudnn_actor.protocol.operations import MatMul, Node
from cudnn_actor.protocol.operations.base import Specs

__all__ = ["matmul"]

_EXACT = 1 << 24
"""Float32 has all whole numbers up to that."""
_LARGEST = 255 * 255
"""Products of bytes are no larger."""
_ROUNDED = 1 << 15
"""Elements of sums that become integers at a time."""


def matmul(node: Node, specs: Specs) -> _MatMul | None:
    """A kernel of `MatMul`; None without elements."""
    assert isinstance(node, MatMul)
    if any(not spec.size for spec in specs.values()):
        return None
    a = specs["a"]
    exact = np.dtype(np.float32 if a.dims[-1] * _LARGEST <= _EXACT else np.float64)
    return _MatMul(None if a.dtype.is_floating else exact)


@dataclass(frozen=True)
class _MatMul:
    """`sums`: the dtype in which the products of integers are added up exactly; None for floats."""

    sums: np.dtype[Any] | None

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch of a lane: none."""
        del lanes
        return 0

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        a, b, y = operands["a"], operands["b"], results["y"]
        rank = max(a.ndim, b.ndim)
        a, b = (each[(None,) * (rank - each.ndim)] for each in (a, b))
        if self.sums is None:
            return product_steps(a, b, y, lanes)
        of_a, of_b, sums = (lanes[0].keep(each.shape, self.sums) for each in (a, b, y))
        return [
            copy_step(a, of_a, len(lanes)),
            copy_step(b, of_b, len(lanes)),
            *product_steps(of_a, of_b, sums, lanes),
            _integers(sums, y, len(lanes)),
        ]


def _integers(sums: Floats, y: npt.NDArray[Any], lanes: int) -> Step:
    """A step that stores whole numbers in an integer array, at whose limits they saturate."""
    limits = np.iinfo(y.dtype)

    def call(box: Box, lane: int) -> Call:
        del lane
        part, into = sums[box], y[box]

        def run() -> None:
            np.clip(part, limits.min, limits.max, out=part)
            np.copyto(into, part, casting="unsafe")

        return run

    return deal([*boxes_of_elements(y.shape, _ROUNDED)], lanes, call)
