"""Scores of attention, of some rows and keys at a time, with biases and ALiBi added, and hidden keys
masked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.attention_dropout import Drawing
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.scratch import Scratch, footprint

__all__ = ["Block", "Masks", "Scores", "Visibility"]

Mask = npt.NDArray[np.bool_]


class Masks:
    """The masks of keys that rows do not see because they are too far before or behind them.

    Blocks of the same size and with the same distance between rows and keys share a mask, which `scratch`
    keeps. `bounds`: how many keys a position sees before and behind itself, as `Attention.bounds` gives them.
    """

    def __init__(self, bounds: tuple[int | None, int | None], scratch: Scratch) -> None:
        self._left, self._right = bounds
        self._scratch = scratch
        self._found: dict[tuple[int, int, int], Mask] = {}

    def of(self, rows: range, keys: range) -> Mask | None:
        """True where a position of `rows` does not see one of `keys`; None if each sees all."""
        left, right = self._left, self._right
        if (left is None or rows[-1] - keys[0] <= left) and (right is None or keys[-1] - rows[0] <= right):
            return None
        at = (rows[0] - keys[0], len(rows), len(keys))
        if at not in self._found:
            before = np.subtract.outer(np.array(rows), np.array(keys))
            hidden = self._scratch.keep(before.shape, np.bool_)
            hidden.fill(False)
            if left is not None:
                hidden |= before > left
            if right is not None:
                hidden |= -before > right
            self._found[at] = hidden
        return self._found[at]

    def visible_keys(self, rows: range, keys: range) -> range:
        """The part of `keys` that a position of `rows` may see."""
        start = keys.start if self._left is None else max(keys.start, rows[0] - self._left)
        stop = keys.stop if self._right is None else min(keys.stop, rows[-1] + self._right + 1)
        return range(start, max(start, stop))


class Visibility(NamedTuple):
    """Some rows, and the keys that they may see. Lengths are arrays of one number, or None."""

    rows: range
    lengths_q: npt.NDArray[Any] | None
    lengths_kv: npt.NDArray[Any] | None
    blocks: Sequence[range]
    masks: Masks


class Block(NamedTuple):
    """Scores of some rows and some keys.

    `matrix`: the scores of all heads below each other. `shared`: the block's keys and values. `apart`: memory
    for ALiBi's distances of keys from rows.
    """

    keys: range
    scores: Floats
    matrix: Floats
    shared: tuple[Floats, Floats]
    bias: Floats | None
    apart: Floats | None
    hidden: Mask | None


class Scores:
    """Computes the scores of some rows of some heads.

    Parameters
    ----------
    own
        q and, where they are given, bias and slopes: dims (heads..., rows, ...).
    shared
        k and v, dims (heads..., positions, features), as BLAS takes them.
    visibility
        The rows, and which keys they see.
    scale
        The factor of the scores.
    drawing
        The drawing of dropout; None without dropout.
    """

    def __init__(
        self,
        own: Mapping[str, Floats],
        shared: tuple[Floats, Floats],
        visibility: Visibility,
        scale: float,
        scratch: Scratch,
        *,
        drawing: Drawing | None,
    ) -> None:
        q = own["q"]
        self._drawing = drawing
        self._own, self._visibility, self.scale = own, visibility, q.dtype.type(scale)
        self.queries = scratch.take(q.shape, q.dtype)
        self._blocks = self._make_blocks(shared, scratch)

    @staticmethod
    def footprint(extents: tuple[int, int, int], features: int, itemsize: int) -> int:
        """Bytes of scratch for a block. `extents`: its heads, rows and keys. `features`: of a key."""
        heads, rows, keys = extents
        arrays = ((heads * rows, features), (heads * rows, keys), (rows, keys))
        return footprint(*arrays, itemsize=itemsize)

    def _make_blocks(self, shared: tuple[Floats, Floats], scratch: Scratch) -> list[Block]:
        own, visibility = self._own, self._visibility
        dims, dtype = own["q"].shape[:-1], own["q"].dtype
        most = max(map(len, visibility.blocks))
        scores = scratch.take((math.prod(dims) * most,), dtype)
        apart = scratch.take((dims[-1] * most,), dtype)
        found = []
        for keys in filter(
            len, (visibility.masks.visible_keys(visibility.rows, each) for each in visibility.blocks)
        ):
            part, size = slice(keys.start, keys.stop), len(keys)
            matrix = scores[: math.prod(dims) * size].reshape(-1, size)
            block = Block(
                keys,
                matrix.reshape(*dims, size),
                matrix,
                (shared[0][..., part, :], shared[1][..., part, :]),
                own["bias"][..., part] if "bias" in own else None,
                apart[: dims[-1] * size].reshape(-1, size) if "slopes" in own else None,
                visibility.masks.of(visibility.rows, keys),
            )
            found.append(block)
        return found

    @property
    def keys(self) -> list[range]:
        """The keys of each block."""
        return [block.keys for block in self._blocks]

    def begin(self) -> tuple[int, list[Block]]:
        """Multiply the queries by the scale.

        Returns how many of the rows are no padding, and the blocks that have keys which are no padding. Both
        are read in each run.
        """
        rows, keys = self._count_unpadded()
        blocks = [block for block in self._blocks if block.keys.start < keys] if rows else []
        if blocks:
            np.multiply(self._own["q"], self.scale, self.queries)
        return rows, blocks

    def _count_unpadded(self) -> tuple[int, int]:
        """How many of the rows, and of all keys, are no padding."""
        visibility, rows = self._visibility, self._own["q"].shape[-2]
        keys = visibility.blocks[-1].stop
        if visibility.lengths_q is not None:
            counted = int(visibility.lengths_q[0]) - visibility.rows.start
            rows = min(max(counted, 0), rows) if len(visibility.rows) == rows else rows * (counted > 0)
        return rows, keys if visibility.lengths_kv is None else min(
            max(int(visibility.lengths_kv[0]), 0), keys
        )

    def compute(self, block: Block) -> None:
        """Compute a block's scores: -infinity for hidden keys and for padding."""
        np.matmul(self.queries, block.shared[0].swapaxes(-1, -2), block.scores)
        if block.bias is not None:
            np.add(block.scores, block.bias, block.scores)
        if block.apart is not None:
            self._subtract_alibi(block.scores, block.apart, block.keys)
        if block.hidden is not None:
            np.copyto(block.scores, -np.inf, where=block.hidden)
        _, keys = self._count_unpadded()
        if block.keys.stop > keys:
            block.scores[..., keys - block.keys.start :] = -np.inf

    def factors(self, block: Block) -> Floats | None:
        """The factors of a block's weights, with the dims of its matrix; None without dropout."""
        return None if self._drawing is None else self._drawing.factors(self._own["numbers"], block.keys)

    def drop(self, block: Block) -> None:
        """Multiply the weights, which lie in the place of the block's scores, by their factors of dropout."""
        factors = self.factors(block)
        if factors is not None:
            np.multiply(block.matrix, factors, block.matrix)

    def _subtract_alibi(self, scores: Floats, apart: Floats, keys: range) -> None:
        """Subtract ALiBi's share: the distance of a key from a row, times the head's slope."""
        rows = np.array(self._visibility.rows, apart.dtype)
        np.subtract(rows[:, None], np.array(keys, apart.dtype), apart)
        np.absolute(apart, apart)
        np.multiply(apart, self._own["slopes"], apart)
        np.subtract(scores, apart, scores)
