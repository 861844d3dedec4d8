"""CTC loss: the states of several samples together, in one row for each frame.

A sample's states stand behind two cells of -infinity, so that a step from the states before is one of the row
moved by a cell or two. Rows are float64, their differences and what exponentials give are of the operands'
type. Cells of samples that have ended are computed, too, and overwritten in the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import MOST_SCRATCH, Call, Kernel, Operands, Step, carried
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import CTCLoss, Node
from cudnn_actor.protocol.operations.base import Specs

__all__ = ["ctc_loss"]

_CELLS = 8192
"""Of a block's row, about: a few times more than what calls of NumPy cost themselves."""
_MOST_SCORES = 16 << 20
"""Bytes of a block's numbers of a frame, unless those of one sample are more."""
_FEW_CELLS = 2048
"""Samples with fewer cells in all are one block."""
_PADS = 2
"""Cells before a sample's states."""
_LEAST = -np.finfo(np.float64).max

_Floats = npt.NDArray[Any]
_Integers = npt.NDArray[np.int64]


def ctc_loss(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `CTCLoss`; None without samples."""
    assert isinstance(node, CTCLoss)
    log_probs, targets = specs["log_probs"], specs["targets"]
    if not log_probs.dims[1]:
        return None
    return _CTCLoss(
        dims=log_probs.dims,
        labels=targets.dims[1],
        dtype=carried(log_probs.dtype),
        blank=node.blank,
        zero_infinity=node.zero_infinity,
        with_slopes="dlog_probs" in specs,
    )


@dataclass(frozen=True)
class _CTCLoss:
    dims: Dims
    labels: int
    dtype: np.dtype[Any]
    blank: int
    zero_infinity: bool
    with_slopes: bool

    @property
    def width(self) -> int:
        """Cells of a sample."""
        return _PADS + 2 * self.labels + 1

    @property
    def samples(self) -> int:
        """Of a block, at most."""
        _, samples, classes = self.dims
        most = min(_CELLS // self.width, _MOST_SCORES // (classes * self.dtype.itemsize))
        found = min(samples, max(1, most))
        return -(-samples // 2) if found == samples and samples * self.width > _FEW_CELLS else found

    @property
    def cells(self) -> int:
        """Of a row."""
        return self.samples * self.width + _PADS

    @property
    def step(self) -> int:
        """Frames of a call: their forward rows are kept at the same time, where derivatives are wanted."""
        frames = self.dims[0]
        fits = frames * self.cells * 8 <= MOST_SCRATCH // 4
        return max(frames, 1) if fits else math.isqrt(frames) + 1

    def footprint(self, lanes: int) -> int:
        """Rows of a block, and if derivatives are wanted those of some frames."""
        del lanes
        return sum(footprint(dims, itemsize=np.dtype(kind).itemsize) for dims, kind in self.arrays.values())

    @property
    def arrays(self) -> dict[str, tuple[Dims, npt.DTypeLike]]:
        """Dims and dtypes of a block's scratch."""
        frames, _, classes = self.dims
        cells, rows = (self.cells,), {"ends": (self.samples, self.width)}
        found: dict[str, tuple[Dims, npt.DTypeLike]] = {
            **dict.fromkeys(("row", "next", "two", "most"), (cells, np.float64)),
            **dict.fromkeys(("one", "sum", "emitted"), (cells, self.dtype)),
            "ends": (rows["ends"], np.float64),
            "scores": ((self.samples, classes), self.dtype),
        }
        if self.with_slopes:
            found["kept"] = ((-(-frames // self.step), self.cells), np.float64)
            found["forward"] = ((self.step, self.cells), np.float64)
            found["totals"] = (cells, np.float64)
            found["sorted"] = (cells, self.dtype)
        return found

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        samples, steps = self.dims[1], list[Step]()
        blocks = [slice(start, start + self.samples) for start in range(0, samples, self.samples)]
        for first in range(0, len(blocks), len(lanes)):
            together = [
                list(_Block(self, operands, results, part, lane.fork()).calls())
                for part, lane in zip(blocks[first:], lanes, strict=False)
            ]
            steps += zip(*together, strict=True)
        return steps


class _Block:
    """Some samples, with the state of a run: the calls, which are made in order, depend on those before.

    Besides its scratch, a run allocates a few numbers for each cell, and 8 bytes for each label.
    """

    def __init__(
        self, kernel: _CTCLoss, operands: Operands, results: Operands, part: slice, scratch: Scratch
    ) -> None:
        self._of, self._frames = kernel, kernel.dims[0]
        self._log_probs = operands["log_probs"][:, part]
        self._targets = operands["targets"][part]
        self._lengths, self._used = (operands[name][part] for name in ("input_lengths", "target_lengths"))
        self._losses = results["losses"][part]
        self._slopes = results["dlog_probs"][:, part] if kernel.with_slopes else None
        self._count = len(self._losses)
        size = self._count * kernel.width + _PADS
        taken = {name: scratch.take(dims, dtype) for name, (dims, dtype) in kernel.arrays.items()}
        self._memory = taken["row"][:size], taken["next"][:size]
        self._two, self._most = taken["two"][:size], taken["most"][:size]
        self._one, self._sum, self._emitted = (taken[name][:size] for name in ("one", "sum", "emitted"))
        self._ends, self._scores = taken["ends"][: self._count], taken["scores"][: self._count]
        if kernel.with_slopes:
            self._kept, self._forward = taken["kept"][:, :size], taken["forward"][:, :size]
            self._totals, self._sorted = taken["totals"][:size], taken["sorted"]

    def calls(self) -> Iterator[Call]:
        """Yields the calls of a run: each of some frames."""
        starts = range(0, self._frames, self._of.step)
        yield self._begin
        yield from (partial(self._go_forward, start) for start in starts)
        yield self._add_up
        if self._slopes is not None:
            yield from (partial(self._go_back, start) for start in reversed(starts))
            yield self._finish

    def _of_samples(self, row: _Floats) -> _Floats:
        """A row as one of cells for each sample; the last cells of all belong to none."""
        return row[:-_PADS].reshape(self._count, self._of.width)

    def _begin(self) -> None:
        """Read labels and lengths, and stand at the first blank."""
        kernel, classes = self._of, self._of.dims[2]
        self._stops: _Integers = np.clip(self._lengths, 0, self._frames).astype(np.int64)
        labels = np.clip(self._used, 0, kernel.labels).astype(np.int64)
        numbers = np.arange(self._count)
        self._last = _PADS + 2 * labels
        """The cell of the last blank of each sample, among its own."""
        of_cells = np.full((self._count, kernel.width), kernel.blank, np.int64)
        of_cells[:, _PADS + 1 :: 2] = np.clip(self._targets, 0, classes - 1)
        places = np.arange(kernel.width)
        is_state = (places >= _PADS) & (places <= self._last[:, None])
        skips = np.zeros(is_state.shape, np.bool_)
        skips[:, 2 * _PADS :] = of_cells[:, 2 * _PADS :] != of_cells[:, _PADS:-_PADS]
        skips &= is_state
        ends = np.zeros(_PADS, np.bool_)
        self._is_none = np.concatenate([~is_state.ravel(), ~ends])
        self._skips = np.concatenate([skips.ravel(), ends])
        """Whether an alignment may get to a cell from the one two before it."""
        of_cells += numbers[:, None] * classes
        self._classes = np.concatenate([of_cells.ravel(), np.zeros(_PADS, np.int64)])
        """The place of each cell's class, among those of all samples."""
        if self._slopes is not None:
            states = np.flatnonzero(is_state)
            self._order = states[np.argsort(self._classes[states], kind="stable")]
            found = self._classes[self._order]
            self._starts = np.flatnonzero(np.diff(found, prepend=-1))
            self._found = found[self._starts]
            """The places that have states, and where those of each begin in their order."""
        self._rows = [*self._memory]
        """The row of the last frame, and the place of the next."""
        for row in self._rows:
            row.fill(-math.inf)
        self._of_samples(self._rows[0])[:, _PADS] = 0
        self._two.fill(-math.inf)
        self._save_ends(0)

    def _save_ends(self, frame: int) -> None:
        """Keep the rows of samples that have ended before this frame."""
        ended = np.flatnonzero(self._stops == frame)
        if ended.size:
            self._ends[ended] = self._of_samples(self._rows[0])[ended]

    def _read(self, frame: int) -> None:
        """The logarithm of the probability of each state; -infinity of cells that are none."""
        scores = self._log_probs[frame]
        if not scores.flags.c_contiguous:
            np.copyto(self._scores, scores)
            scores = self._scores
        scores.reshape(-1).take(self._classes, out=self._emitted, mode="clip")
        np.copyto(self._emitted, -math.inf, where=self._is_none)

    def _go_forward(self, start: int, into: _Floats | None = None) -> None:
        if self._slopes is not None and into is None:
            self._kept[start // self._of.step] = self._rows[0]
        for frame in range(start, min(start + self._of.step, int(self._stops.max()))):
            row, found = self._rows
            if into is not None:
                found = into[frame - start]
            self._read(frame)
            np.copyto(self._two[2:], row[:-2], where=self._skips[2:])
            self._log_of_sum(row[1:], row[:-1], self._two[1:], found[1:])
            np.add(found, self._emitted, found)
            self._of_samples(found)[:, :_PADS] = -math.inf
            found[-_PADS:] = -math.inf
            if into is not None:
                self._rows[0] = found
                continue
            self._rows.reverse()
            self._save_ends(frame + 1)

    def _log_of_sum(self, a: _Floats, b: _Floats, c: _Floats, into: _Floats) -> None:
        """The logarithm of a sum of three exponentials; -infinity if all are 0, NaN if one is NaN."""
        size = len(into)
        most, one, total = self._most[:size], self._one[:size], self._sum[:size]
        np.maximum(a, b, out=most)
        np.maximum(most, c, out=most)
        np.maximum(most, _LEAST, out=most)  # infinities have no difference
        np.subtract(a, most, total, casting="same_kind")
        np.exp(total, total)
        for term in (b, c):
            np.subtract(term, most, one, casting="same_kind")
            np.exp(one, one)
            np.add(total, one, total)
        np.log(total, total)
        np.add(most, total, into)

    def _add_up(self) -> None:
        """The losses."""
        numbers = np.arange(self._count)
        last, before = (self._ends[numbers, self._last - back] for back in (0, 1))
        before[self._last == _PADS] = -math.inf
        most = np.maximum(np.maximum(last, before), _LEAST)
        totals = most + np.log(np.exp(last - most) + np.exp(before - most))
        self._missing = np.where(np.isfinite(totals), 0.0, math.nan)
        """What derivatives are where they are not computed: NaN, or 0."""
        losses = 0.0 - totals
        if self._of.zero_infinity:
            losses[totals == -math.inf] = self._missing[totals == -math.inf] = 0.0
        self._unknown = ~np.isfinite(totals)
        self._losses[...] = losses
        if self._slopes is not None:
            self._of_samples(self._totals)[...] = totals[:, None]
            self._totals[-_PADS:] = 0
            self._behind = np.full(len(self._totals), -math.inf)
            """Backward, the row of the frame behind: from each state, that frame included, to the end."""
            self._two.fill(-math.inf)

    def _go_back(self, start: int) -> None:
        assert self._slopes is not None
        stop = min(start + self._of.step, int(self._stops.max()))
        if start >= stop:
            return
        found, row = self._memory[0], self._behind
        self._two.fill(-math.inf)
        self._rows = [self._kept[start // self._of.step], found]
        self._go_forward(start, self._forward)
        self._two.fill(-math.inf)
        for frame in reversed(range(start, stop)):
            ended = np.flatnonzero(self._stops == frame + 1)
            if ended.size:
                self._of_samples(row)[ended] = -math.inf  # in the place of what lies behind their frames
                self._of_samples(row)[ended, self._last[ended]] = 0
            self._read(frame)
            np.copyto(self._two[:-2], row[2:], where=self._skips[2:])
            self._log_of_sum(row[:-1], row[1:], self._two[:-1], found[:-1])
            found[-_PADS:] = -math.inf
            self._write(frame, found)
            np.add(found, self._emitted, row)
            self._of_samples(row)[:, :_PADS] = -math.inf
            row[-_PADS:] = -math.inf

    def _write(self, frame: int, behind: _Floats) -> None:
        """The derivatives of a frame, from the logarithms of the probabilities to get to the end."""
        assert self._slopes is not None
        exponents, shares = self._most, self._one
        np.add(self._forward[frame % self._of.step], behind, exponents)
        np.subtract(exponents, self._totals, shares, casting="same_kind")
        np.exp(shares, shares)
        ordered = self._sorted[: len(self._order)]
        shares.take(self._order, out=ordered, mode="clip")
        into = self._slopes[frame]
        flat = into.reshape(-1) if into.flags.c_contiguous else self._scores.reshape(-1)
        flat.fill(0)
        flat[self._found] = 0 - np.add.reduceat(ordered, self._starts)
        if not into.flags.c_contiguous:
            np.copyto(into, self._scores)

    def _finish(self) -> None:
        """Frames behind the last of a sample, and samples whose derivatives are not known."""
        assert self._slopes is not None
        for sample, stop in enumerate(self._stops.tolist()):
            self._slopes[stop:, sample] = 0
            if self._unknown[sample]:
                self._slopes[:stop, sample] = self._missing[sample]
