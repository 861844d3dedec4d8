"""Attention: a few rows of scores at a time, of so many keys that they stay in the cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.fast.attention_rows import Masks, Place, Rows
from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step
from cudnn_actor.engines.cpu.fast.lines import Box, Floats, boxes, deal
from cudnn_actor.engines.cpu.fast.matrices import of_samples, taken
from cudnn_actor.engines.cpu.scratch import Dims, Scratch
from cudnn_actor.protocol.operations import Attention, Node
from cudnn_actor.protocol.operations.base import Specs
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["attention"]

_MOST = 1 << 15
"""Scores of a block: with what they are multiplied with, they stay in a small L2 cache."""
_ROWS, _KEYS = 64, 512
"""A block has that many, where there are as many: products of fewer are slow."""
_TASKS = 8
"""Heads are computed together only if so many calls remain."""


def attention(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `Attention`; None without elements, and with dropout."""
    assert isinstance(node, Attention)
    if node.dropout or any(not spec.size for spec in specs.values()):
        return None
    dtype = np.dtype(np.float64 if specs["q"].dtype is DType.FLOAT64 else np.float32)
    return _Attention(node, specs["q"].dims, specs["v"].dims, dtype)


@dataclass(frozen=True)
class _Attention:
    """`q`, `v`: their dims."""

    node: Attention[int]
    q: Dims
    v: Dims
    dtype: np.dtype[Any]

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs."""
        del lanes
        return Rows.footprint(self._extents, (self.q[3], self.v[3]), self.dtype.itemsize)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        steps: list[Step] = []
        k, v = (taken(operands[name], steps, len(lanes))[:, :, None] for name in ("k", "v"))
        own = {name: self._by_group(array) for name, array in self._of_rows(operands, results).items()}
        heads, rows, keys = self._extents
        dims = own["q"].shape
        tasks = [*itertools.product(boxes(dims[:3], heads), boxes(dims[3:4], rows))]
        masks = Masks(self.node.bounds(self.q[2], self.v[2]))
        of_q, of_kv = (operands.get(name) for name in ("lengths_q", "lengths_kv"))

        def call(task: tuple[Box, Box], lane: int) -> Call:
            box, (part,) = task
            place = Place(
                range(1) if self._side_by_side else range(part.start, part.stop),
                None if of_q is None else of_q[box[0]],
                None if of_kv is None else of_kv[box[0]],
                [range(each.start, each.stop) for (each,) in boxes((self.v[2],), keys)],
                masks,
            )
            given = {name: of_samples(array, box)[..., part, :] for name, array in own.items()}
            shared = (of_samples(k, box), of_samples(v, box))
            return Rows(given, shared, place, self.node.effective_scale(self.q[3]), lanes[lane].fork())

        return [*steps, deal(tasks, len(lanes), call)]

    @property
    def _size(self) -> int:
        """Heads that share keys."""
        return self.q[1] // self.v[1]

    @property
    def _side_by_side(self) -> bool:
        """Whether the heads that share keys are the rows of a matrix: where each has one row."""
        return self.q[2] == 1

    @property
    def _extents(self) -> tuple[int, int, int]:
        """The most heads, rows and keys of a block."""
        all_heads, all_rows = self.q[1:3]
        if self._side_by_side:
            all_heads, all_rows = self.v[1], self._size
        rows = min(all_rows, max(_ROWS, _MOST // self.v[2]))
        keys = min(self.v[2], max(_KEYS, _MOST // rows))
        heads = max(1, min(_MOST // (rows * keys), self.q[0] * all_heads // _TASKS))
        if self.node.slopes is not None:
            heads = 1
        elif self.node.lengths_q is not None or self.node.lengths_kv is not None:
            heads = min(heads, all_heads)
        return heads, rows, keys

    def _of_rows(self, operands: Operands, results: Operands) -> dict[str, Floats]:
        """What has rows for each head of q."""
        found = {"q": operands["q"]} | {
            name: results[name] for name in ("y", "statistics") if name in results
        }
        if "bias" in operands:
            found["bias"] = np.broadcast_to(operands["bias"], (*self.q[:3], self.v[2]))
        if self.node.slopes is not None:
            slopes = np.array(self.node.slopes, self.dtype)[:, None, None]
            found["slopes"] = np.broadcast_to(slopes, (*self.q[:3], 1))
        return found

    def _by_group(self, array: Floats) -> Floats:
        """Dims (B, G, heads of a group, rows, ...)."""
        batch, _, *rest = array.shape
        parted = array.reshape(batch, self.v[1], self._size, *rest)
        return parted.swapaxes(2, 3) if self._side_by_side else parted
