"""Some rows of attention, one block of keys after the other.

With each block, what has been summed up is brought to the new largest score, so that no more scores are kept.
M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018; T. Dao et al., "FlashAttention:
fast and memory-efficient exact attention with IO-awareness", NeurIPS 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.scratch import Scratch, footprint

__all__ = ["Masks", "Place", "Rows"]

Mask = npt.NDArray[np.bool_]


class Masks:
    """Which scores are hidden by the bounds on what a position sees: the same for all blocks of an offset.

    `bounds`: as `Attention.bounds` gives them.
    """

    def __init__(self, bounds: tuple[int | None, int | None]) -> None:
        self._left, self._right = bounds
        self._found: dict[tuple[int, int, int], Mask] = {}

    def of(self, rows: range, keys: range) -> Mask | None:
        """True where a position of `rows` does not see one of `keys`; None if each sees all."""
        left, right = self._left, self._right
        if (left is None or rows[-1] - keys[0] <= left) and (right is None or keys[-1] - rows[0] <= right):
            return None
        at = (rows[0] - keys[0], len(rows), len(keys))
        if at not in self._found:
            before = np.subtract.outer(np.array(rows), np.array(keys))
            hidden = np.zeros(before.shape, bool)
            if left is not None:
                hidden |= before > left
            if right is not None:
                hidden |= -before > right
            self._found[at] = hidden
        return self._found[at]

    def seen(self, rows: range, keys: range) -> range:
        """Those of `keys` that a position of `rows` may see."""
        start = keys.start if self._left is None else max(keys.start, rows[0] - self._left)
        stop = keys.stop if self._right is None else min(keys.stop, rows[-1] + self._right + 1)
        return range(start, max(start, stop))


class Place(NamedTuple):
    """Which rows, and what they see. Lengths are arrays of one number, or None."""

    rows: range
    lengths_q: npt.NDArray[Any] | None
    lengths_kv: npt.NDArray[Any] | None
    blocks: Sequence[range]
    masks: Masks


class _Block(NamedTuple):
    """Scores of some keys; `matrix`: of all heads below each other. `apart`: how far keys are from rows."""

    keys: range
    of_keys: Floats
    of_values: Floats
    scores: Floats
    matrix: Floats
    ones: Floats
    bias: Floats | None
    apart: Floats | None
    hidden: Mask | None


class Rows:
    """A call that computes some rows of some heads.

    Parameters
    ----------
    own
        q, y and, where they are given, statistics, bias and slopes: dims (heads..., rows, ...).
    shared
        k and v, dims (heads..., positions, features), as BLAS takes them.
    place
        Which rows, and which keys they see.
    scale
        What scores are multiplied with.
    """

    def __init__(
        self,
        own: Mapping[str, Floats],
        shared: tuple[Floats, Floats],
        place: Place,
        scale: float,
        scratch: Scratch,
    ) -> None:
        q, v = own["q"], shared[1]
        dims, count, dtype = q.shape[:-1], math.prod(q.shape[:-1]), q.dtype
        self._own, self._place = own, place
        self._scale, self._least = dtype.type(scale), dtype.type(np.finfo(dtype).min)
        self._queries = scratch.take(q.shape, dtype)
        self._sums, self._more = (scratch.take((*dims, v.shape[-1]), dtype) for _ in range(2))
        numbers = [scratch.take((count, 1), dtype) for _ in range(4)]
        self._largest, self._factors, self._total, self._added = numbers
        self._of_rows = [each.reshape(*dims, 1) for each in numbers]
        self._empty = scratch.take((count, 1), np.bool_)
        self._blocks = self._bound(shared, scratch)

    @staticmethod
    def footprint(extents: tuple[int, int, int], features: tuple[int, int], itemsize: int) -> int:
        """Bytes of scratch for so many heads, rows and keys of a block, and features of keys and values."""
        heads, rows, keys = extents
        count = heads * rows
        arrays = (
            (count, features[0]),
            *[(count, features[1])] * 2,
            *[(count,)] * 5,
            (count, keys),
            (rows, keys),
        )
        return footprint(*arrays, itemsize=itemsize)

    def _bound(self, shared: tuple[Floats, Floats], scratch: Scratch) -> list[_Block]:
        (k, v), own, place = shared, self._own, self._place
        dims, dtype = own["q"].shape[:-1], own["q"].dtype
        most = max(map(len, place.blocks))
        scores = scratch.take((math.prod(dims) * most,), dtype)
        apart = scratch.take((dims[-1] * most,), dtype)
        found = []
        for keys in filter(len, (place.masks.seen(place.rows, each) for each in place.blocks)):
            part, size = slice(keys.start, keys.stop), len(keys)
            matrix = scores[: math.prod(dims) * size].reshape(-1, size)
            found.append(
                _Block(
                    keys,
                    k[..., part, :].swapaxes(-1, -2),
                    v[..., part, :],
                    matrix.reshape(*dims, size),
                    matrix,
                    np.ones((size, 1), dtype),
                    own["bias"][..., part] if "bias" in own else None,
                    apart[: dims[-1] * size].reshape(-1, size) if "slopes" in own else None,
                    place.masks.of(place.rows, keys),
                )
            )
        return found

    def __call__(self) -> None:
        """Compute the rows."""
        rows, keys = self._counted()
        blocks = [block for block in self._blocks if block.keys.start < keys] if rows else []
        if not blocks:
            self._clear(0)
            return
        np.multiply(self._own["q"], self._scale, self._queries)
        first, *others = blocks
        self._begin(first, keys)
        for block in others:
            self._go_on(block, keys)
        self._finish()
        if rows < self._own["q"].shape[-2]:
            self._clear(rows)

    def _counted(self) -> tuple[int, int]:
        """How many of the rows, and of all keys, are no padding."""
        place, rows = self._place, self._own["q"].shape[-2]
        keys = place.blocks[-1].stop
        if place.lengths_q is not None:
            counted = int(place.lengths_q[0]) - place.rows.start
            rows = min(max(counted, 0), rows) if len(place.rows) == rows else rows * (counted > 0)
        return rows, keys if place.lengths_kv is None else min(max(int(place.lengths_kv[0]), 0), keys)

    def _score(self, block: _Block, keys: int) -> None:
        np.matmul(self._queries, block.of_keys, block.scores)
        if block.bias is not None:
            np.add(block.scores, block.bias, block.scores)
        if block.apart is not None:
            self._lower(block.scores, block.apart, block.keys)
        if block.hidden is not None:
            np.copyto(block.scores, -np.inf, where=block.hidden)
        if block.keys.stop > keys:
            block.scores[..., keys - block.keys.start :] = -np.inf

    def _lower(self, scores: Floats, apart: Floats, keys: range) -> None:
        """Subtract ALiBi's part."""
        rows = np.array(self._place.rows, apart.dtype)
        np.subtract(rows[:, None], np.array(keys, apart.dtype), apart)
        np.absolute(apart, apart)
        np.multiply(apart, self._own["slopes"], apart)
        np.subtract(scores, apart, scores)

    def _begin(self, block: _Block, keys: int) -> None:
        self._score(block, keys)
        # Of at least the least number: where nothing is seen, all powers are 0, and none is NaN.
        np.maximum.reduce(block.matrix, 1, out=self._largest, keepdims=True, initial=self._least)
        np.subtract(block.matrix, self._largest, block.matrix)
        np.exp(block.matrix, block.matrix)
        np.matmul(block.matrix, block.ones, self._total)
        np.matmul(block.scores, block.of_values, self._sums)

    def _go_on(self, block: _Block, keys: int) -> None:
        self._score(block, keys)
        np.maximum.reduce(block.matrix, 1, out=self._added, keepdims=True, initial=self._least)
        np.maximum(self._added, self._largest, out=self._added)
        np.subtract(self._largest, self._added, self._factors)
        np.exp(self._factors, self._factors)
        np.copyto(self._largest, self._added)
        np.subtract(block.matrix, self._largest, block.matrix)
        np.exp(block.matrix, block.matrix)
        np.matmul(block.matrix, block.ones, self._added)
        np.multiply(self._total, self._factors, self._total)
        np.add(self._total, self._added, self._total)
        np.matmul(block.scores, block.of_values, self._more)
        np.multiply(self._sums, self._of_rows[1], self._sums)
        np.add(self._sums, self._more, self._sums)

    def _finish(self) -> None:
        if "statistics" in self._own:
            np.log(self._total, self._added)
            np.add(self._added, self._largest, self._added)
            np.copyto(self._own["statistics"], self._of_rows[3])
        np.equal(self._total, 0, self._empty)
        np.copyto(self._total, 1, where=self._empty)
        np.divide(self._sums, self._of_rows[2], self._own["y"])

    def _clear(self, start: int) -> None:
        """Store the results of rows that see nothing."""
        self._own["y"][..., start:, :] = 0
        if "statistics" in self._own:
            self._own["statistics"][..., start:, :] = -np.inf
