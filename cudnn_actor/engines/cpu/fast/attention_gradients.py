"""Gradients of attention: the scores are computed again, a few rows and keys at a time.

With weights p, dp = dy v^T and ds = p (dp - sum of dy y) of a row, these are

    dv = p^T dy,   dq = scale · ds k,   dk = scale · ds^T q,   dbias = ds.

With dropout, dp and the p of dv are multiplied by the factors of the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.fast.attention_heads import Heads
from cudnn_actor.engines.cpu.fast.attention_scores import Block, Scores
from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step, deal, in_turn
from cudnn_actor.engines.cpu.fast.lines import Box, Floats, boxes_of_elements
from cudnn_actor.engines.cpu.fast.matrices import blas_operand
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.operations import AttentionBackward, Node
from cudnn_actor.protocol.operations.base import Specs

__all__ = ["attention_backward"]


def attention_backward(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `AttentionBackward`; None without elements."""
    assert isinstance(node, AttentionBackward)
    heads = Heads.of(node, specs)
    if heads is None:
        return None
    return _Backward(heads, specs["dbias"].dims if "dbias" in specs else None)


@dataclass(frozen=True)
class _Backward:
    """The kernel of `AttentionBackward`. `dbias`: the dims of this result; None if it is not wanted."""

    heads: Heads
    dbias: tuple[int, ...] | None

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs."""
        del lanes
        heads = self.heads
        (_, rows, keys), features, itemsize = heads.extents, (heads.q[3], heads.v[3]), heads.dtype.itemsize
        sums = footprint(*((heads.v[2], each) for each in features), itemsize=itemsize)
        return heads.drawing_bytes() + sums + _Rows.footprint((1, rows, keys), features, itemsize)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        steps: list[Step] = []
        k, v = (blas_operand(operands[name], steps, lanes) for name in ("k", "v"))
        heads = self.heads
        own = {name: heads.by_group(operands[name]) for name in ("q", "dy", "y", "statistics")}
        own |= heads.operands_by_row(operands, lanes[0]) | {"dq": heads.by_group(results["dq"])}
        memories = [lane.fork() for lane in lanes]
        drawings = [heads.drawing(operands, memory) for memory in memories]
        visibility = heads.visibility(operands, lanes[0])
        dbias = results.get("dbias")

        def call(task: list[tuple[int, int]], lane: int) -> Call:
            calls: list[Call] = []
            for sample, group in task:
                scratch = memories[lane].fork()
                shared = (k[sample, group], v[sample, group])
                sums = (
                    scratch.take(shared[0].shape, heads.dtype),
                    scratch.take(shared[1].shape, heads.dtype),
                )
                calls += [partial(each.fill, 0) for each in sums]
                for head, (part,) in self._rows():
                    given = {name: array[sample, group, head][part] for name, array in own.items()}
                    if dbias is not None:
                        given["dbias"] = self._of_bias(dbias, sample, group * heads.size + head, part)
                    of_rows = visibility(slice(sample, sample + 1), part)
                    own_scratch = scratch.fork()
                    scores = Scores(given, shared, of_rows, heads.scale, own_scratch, drawing=drawings[lane])
                    calls.append(_Rows(given, sums, scores, own_scratch))
                for name, found in zip(("dk", "dv"), sums, strict=True):
                    calls.append(partial(np.copyto, results[name][sample, group], found))
            return in_turn(calls)

        if dbias is not None:
            steps.append((partial(dbias.fill, 0),))
        return [*steps, deal(self._tasks(), len(lanes), call)]

    def _rows(self) -> list[tuple[int, Box]]:
        """The blocks of rows of the heads that share keys: for each, the number of the head, and its rows."""
        heads = self.heads
        count, rows = (1, heads.size) if heads.side_by_side else (heads.size, heads.q[2])
        return [*itertools.product(range(count), boxes_of_elements((rows,), heads.extents[1]))]

    def _tasks(self) -> list[list[tuple[int, int]]]:
        """The pairs of a sample and a head of k, by task. Pairs that add to the same gradient of the bias are
        one task, since lanes must not add to it at the same time."""
        samples, groups = self.heads.v[:2]
        shared = (False, False) if self.dbias is None else (self.dbias[0] == 1, self.dbias[1] == 1)
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for sample, group in itertools.product(range(samples), range(groups)):
            key = (0 if shared[0] else sample, 0 if shared[1] else group)
            found.setdefault(key, []).append((sample, group))
        return [*found.values()]

    def _of_bias(self, dbias: Floats, sample: int, head: int, part: slice) -> Floats:
        """The part of dbias to which some rows of a head add: one row for each, or a single row for all of
        them."""
        of_sample: Floats = dbias[0 if dbias.shape[0] == 1 else sample]
        one, each = slice(0, 1), slice(head, head + self.heads.size)
        if self.heads.side_by_side:
            where: tuple[Any, Any] = (one if dbias.shape[1] == 1 else each, 0)
        else:
            where = (0 if dbias.shape[1] == 1 else head, one if dbias.shape[2] == 1 else part)
        found: Floats = of_sample[where]
        return found.reshape(-1, dbias.shape[-1])


class _Rows:
    """A call that adds the shares of some rows of one head to the gradients.

    Parameters
    ----------
    own
        The arrays of these rows, by name: dy, y, statistics, the arrays that `Scores` takes, dq, and dbias if
        it is wanted.
    sums
        dk and dv of all positions. The shares are added to these.
    """

    def __init__(
        self, own: Mapping[str, Floats], sums: tuple[Floats, Floats], scores: Scores, scratch: Scratch
    ) -> None:
        (rows, features), (_, values) = own["q"].shape, own["dy"].shape
        dtype, most = own["q"].dtype, max(map(len, scores.keys), default=0)
        self._own, self._sums, self._scores = own, sums, scores
        self._dy, self._products = (scratch.take((rows, values), dtype) for _ in range(2))
        self._dq = scratch.take((rows, features), dtype)
        self._base, self._apart = (scratch.take((rows, 1), dtype) for _ in range(2))
        self._unseen = scratch.take((rows, 1), np.bool_)
        self._slopes = scratch.take((rows * most,), dtype)
        self._more = scratch.take((max(rows, most) * max(features, values),), dtype)

    @staticmethod
    def footprint(extents: tuple[int, int, int], features: tuple[int, int], itemsize: int) -> int:
        """Bytes of scratch for a block. `extents`: its heads, rows and keys. `features`: of keys, and of
        values."""
        _, rows, keys = extents
        more = (max(rows, keys), max(features))
        own = (
            (rows, features[1]),
            (rows, features[1]),
            (rows, features[0]),
            *[(rows,)] * 3,
            (rows, keys),
            more,
        )
        return footprint(*own, itemsize=itemsize) + Scores.footprint(extents, features[0], itemsize)

    def __call__(self) -> None:
        """Add the shares of these rows, and store dq."""
        own = self._own
        rows, blocks = self._scores.begin()
        self._dq.fill(0)
        if blocks:
            np.copyto(self._dy, own["dy"])
            np.multiply(self._dy, own["y"], self._products)
            np.add.reduce(self._products, 1, out=self._apart, keepdims=True)
            np.copyto(self._base, own["statistics"])
            np.equal(self._base, -np.inf, self._unseen)
            np.copyto(self._base, 0, where=self._unseen)
        for block in blocks:
            self._add(block, rows)
        np.multiply(self._dq, self._scores.scale, own["dq"])

    def _add(self, block: Block, rows: int) -> None:
        weights, (k, v), (dk, dv) = block.matrix, block.shared, self._sums
        self._scores.compute(block)
        weights[rows:] = -np.inf
        np.subtract(weights, self._base, weights)
        np.exp(weights, weights)
        slopes = self._slopes[: weights.size].reshape(weights.shape)
        np.matmul(self._dy, v.T, slopes)
        factors = self._scores.factors(block)
        if factors is not None:
            np.multiply(slopes, factors, slopes)
        np.subtract(slopes, self._apart, slopes)
        np.multiply(slopes, weights, slopes)
        if factors is not None:
            np.multiply(weights, factors, weights)
        keys = slice(block.keys.start, block.keys.stop)
        self._add_product(weights.T, self._dy, dv[keys])
        self._add_product(slopes, k, self._dq)
        self._add_product(slopes.T, self._scores.queries, dk[keys])
        if "dbias" in self._own:
            into = self._own["dbias"][:, keys]
            if len(into) < len(slopes):
                slopes = np.add.reduce(slopes, 0, keepdims=True)
            np.add(into, slopes, into)

    def _add_product(self, a: Floats, b: Floats, into: Floats) -> None:
        product = self._more[: into.size].reshape(into.shape)
        np.matmul(a, b, product)
        np.add(into, product, into)
