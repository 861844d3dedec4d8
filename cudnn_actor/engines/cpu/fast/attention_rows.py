"""Some rows of attention, one block of keys after the other.

With each block, what has been summed up is brought to the new largest score, so that no more scores are kept.
M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018; T. Dao et al., "FlashAttention:
fast and memory-efficient exact attention with IO-awareness", NeurIPS 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from cudnn_actor.engines.cpu.fast.attention_scores import Block, Scores
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.fast.sums import ones
from cudnn_actor.engines.cpu.scratch import Scratch, footprint

__all__ = ["Rows"]


class Rows:
    """A call that computes some rows of some heads.

    Parameters
    ----------
    own
        q, y and, where they are given, statistics, bias and slopes: dims (heads..., rows, ...).
    v
        The values of all keys.
    scores
        Computes the scores of these rows.
    """

    def __init__(self, own: Mapping[str, Floats], v: Floats, scores: Scores, scratch: Scratch) -> None:
        q = own["q"]
        dims, count, dtype = q.shape[:-1], math.prod(q.shape[:-1]), q.dtype
        self._own, self._least = own, dtype.type(np.finfo(dtype).min)
        self._sums, self._more = (scratch.take((*dims, v.shape[-1]), dtype) for _ in range(2))
        numbers = [scratch.take((count, 1), dtype) for _ in range(4)]
        self._largest, self._factors, self._total, self._added = numbers
        self._of_rows = [each.reshape(*dims, 1) for each in numbers]
        self._empty = scratch.take((count, 1), np.bool_)
        self._scores = scores

    @staticmethod
    def footprint(extents: tuple[int, int, int], features: tuple[int, int], itemsize: int) -> int:
        """Bytes of scratch for a block. `extents`: its heads, rows and keys. `features`: of keys, and of
        values."""
        count = extents[0] * extents[1]
        own = footprint(*[(count, features[1])] * 2, *[(count,)] * 5, itemsize=itemsize)
        return own + Scores.footprint(extents, features[0], itemsize)

    def __call__(self) -> None:
        """Compute the rows."""
        rows, blocks = self._scores.begin()
        if not blocks:
            self._clear(0)
            return
        first, *others = blocks
        self._begin(first)
        for block in others:
            self._add_block(block)
        self._finish()
        if rows < self._own["q"].shape[-2]:
            self._clear(rows)

    def _begin(self, block: Block) -> None:
        self._scores.compute(block)
        # Of at least the least number: where nothing is seen, all powers are 0, and none is NaN.
        np.maximum.reduce(block.matrix, 1, out=self._largest, keepdims=True, initial=self._least)
        np.subtract(block.matrix, self._largest, block.matrix)
        np.exp(block.matrix, block.matrix)
        np.matmul(block.matrix, ones(len(block.keys), self._total.dtype), self._total)
        self._scores.drop(block)
        np.matmul(block.scores, block.shared[1], self._sums)

    def _add_block(self, block: Block) -> None:
        self._scores.compute(block)
        np.maximum.reduce(block.matrix, 1, out=self._added, keepdims=True, initial=self._least)
        np.maximum(self._added, self._largest, out=self._added)
        np.subtract(self._largest, self._added, self._factors)
        np.exp(self._factors, self._factors)
        np.copyto(self._largest, self._added)
        np.subtract(block.matrix, self._largest, block.matrix)
        np.exp(block.matrix, block.matrix)
        np.matmul(block.matrix, ones(len(block.keys), self._total.dtype), self._added)
        self._scores.drop(block)
        np.multiply(self._total, self._factors, self._total)
        np.add(self._total, self._added, self._total)
        np.matmul(block.scores, block.shared[1], self._more)
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
        """Store the results of rows that see no key."""
        self._own["y"][..., start:, :] = 0
        if "statistics" in self._own:
            self._own["statistics"][..., start:, :] = -np.inf
