"""How the scores of attention are cut into blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.fast.attention_dropout import Drawing, drawing_bytes, weight_numbers
from cudnn_actor.engines.cpu.fast.attention_scores import Masks, Visibility
from cudnn_actor.engines.cpu.fast.kernels import Operands, carrier_dtype
from cudnn_actor.engines.cpu.fast.lines import Floats, boxes_of_elements
from cudnn_actor.engines.cpu.scratch import Dims, Scratch
from cudnn_actor.protocol.operations import Attention, AttentionBackward
from cudnn_actor.protocol.operations.base import Specs

__all__ = ["Heads"]

_MOST = 1 << 15
"""The most scores of a block: together with the values, they stay in a small L2 cache."""
_ROWS, _KEYS = 64, 512
"""The fewest rows and keys of a block, where there are as many: products of fewer are slow."""
_TASKS = 8
"""The fewest calls that there must be for several heads to be computed together in one call."""


@dataclass(frozen=True)
class Heads:
    """The heads, rows and keys of an attention, and how its scores are cut into blocks.

    `q`, `v`: the dims of these operands.
    """

    node: Attention[int] | AttentionBackward[int]
    q: Dims
    v: Dims
    dtype: np.dtype[Any]

    @staticmethod
    def of(node: Attention[int] | AttentionBackward[int], specs: Specs) -> Heads | None:
        """The heads of an operation; None without elements."""
        if any(not spec.size for spec in specs.values()):
            return None
        dtype = carrier_dtype(specs["q"].dtype)
        return Heads(node, specs["q"].dims, specs["v"].dims, dtype)

    @property
    def size(self) -> int:
        """How many heads share keys."""
        return self.q[1] // self.v[1]

    @property
    def side_by_side(self) -> bool:
        """Whether heads that share keys have one row each. Then they are computed as the rows of one
        matrix."""
        return self.q[2] == 1

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return self.node.effective_scale(self.q[3])

    @property
    def extents(self) -> tuple[int, int, int]:
        """The most heads, rows and keys of a block."""
        all_heads, all_rows = self.q[1:3]
        if self.side_by_side:
            all_heads, all_rows = self.v[1], self.size
        rows = min(all_rows, max(_ROWS, _MOST // self.v[2]))
        keys = min(self.v[2], max(_KEYS, _MOST // rows))
        heads = max(1, min(_MOST // (rows * keys), self.q[0] * all_heads // _TASKS))
        if self.node.slopes is not None:
            heads = 1
        elif self.node.lengths_q is not None or self.node.lengths_kv is not None:
            heads = min(heads, all_heads)
        return heads, rows, keys

    def by_group(self, array: Floats) -> Floats:
        """An array (B, H, rows, ...) as (B, G, heads of a group, rows, ...)."""
        batch, _, *rest = array.shape
        parted = array.reshape(batch, self.v[1], self.size, *rest)
        return parted.swapaxes(2, 3) if self.side_by_side else parted

    def drawing_bytes(self) -> int:
        """The bytes of scratch that each lane needs to draw a block's dropout."""
        return drawing_bytes(self.extents, self.node.dropout, self.dtype)

    def drawing(self, operands: Operands, scratch: Scratch) -> Drawing | None:
        """The drawing of a block's dropout, with its arrays in `scratch`; None without dropout."""
        if not self.node.dropout:
            return None
        return Drawing(self.extents, self.node.dropout, self.dtype, operands["state"], scratch)

    def operands_by_row(self, operands: Operands, scratch: Scratch) -> dict[str, Floats]:
        """The operands that have a value for each row, by name: the bias, the slopes, and the number of the
        row's first weight. Those that the operation does not have are left out."""
        found = {}
        if self.node.dropout:
            found["numbers"] = self.by_group(weight_numbers(self.q, self.v[2], scratch))
        if "bias" in operands:
            found["bias"] = self.by_group(np.broadcast_to(operands["bias"], (*self.q[:3], self.v[2])))
        if self.node.slopes is not None:
            slopes = np.array(self.node.slopes, self.dtype)[:, None, None]
            found["slopes"] = self.by_group(np.broadcast_to(slopes, (*self.q[:3], 1)))
        return found

    def visibility(self, operands: Operands, scratch: Scratch) -> Callable[[slice, slice], Visibility]:
        """A function that takes samples and rows, as slices, and returns which keys these see."""
        masks = Masks(self.node.bounds(self.q[2], self.v[2]), scratch)
        blocks = [
            range(each.start, each.stop) for (each,) in boxes_of_elements((self.v[2],), self.extents[2])
        ]
        lengths_q, lengths_kv = (operands.get(name) for name in ("lengths_q", "lengths_kv"))

        def of_part(samples: slice, rows: slice) -> Visibility:
            return Visibility(
                range(1) if self.side_by_side else range(rows.start, rows.stop),
                None if lengths_q is None else lengths_q[samples],
                None if lengths_kv is None else lengths_kv[samples],
                blocks,
                masks,
            )

        return of_part
