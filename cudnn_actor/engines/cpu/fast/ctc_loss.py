"""CTC loss: the states of several samples together, in one row for each frame.

A sample's states stand behind two cells of -infinity, so that a step from the states before is one of the row
moved by a cell or two. Rows are float64, their differences and what exponentials give are of the operands'
type. Cells of samples that have ended are computed, too, and overwritten in the end.

How many states and classes there are follows from lengths and labels, which are data. Scratch is planned for
as many as dims allow, and a run uses the first part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import MOST_SCRATCH, Call, Kernel, Operands, Step, carrier_dtype
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import CTCLoss, Node
from cudnn_actor.protocol.operations.base import Specs

__all__ = ["ctc_loss"]

_CELLS = 8192
"""The cells of a block's row, about. They take a few times longer than NumPy's calls themselves."""
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
        dtype=carrier_dtype(log_probs.dtype),
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
        """The most samples of a block."""
        _, samples, classes = self.dims
        most = min(_CELLS // self.width, _MOST_SCORES // (classes * self.dtype.itemsize))
        found = min(samples, max(1, most))
        return -(-samples // 2) if found == samples and samples * self.width > _FEW_CELLS else found

    @property
    def cells(self) -> int:
        """The cells of a row."""
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
        cells, samples = (self.cells,), (self.samples,)
        found: dict[str, tuple[Dims, npt.DTypeLike]] = {
            **dict.fromkeys(("row", "next", "two", "most"), (cells, np.float64)),
            **dict.fromkeys(("one", "sum", "emitted"), (cells, self.dtype)),
            **dict.fromkeys(("is_none", "skips"), (cells, np.bool_)),
            **dict.fromkeys(("stops", "last", "spare"), (samples, np.int64)),
            **dict.fromkeys(("totals", "before", "missing"), (samples, np.float64)),
            **dict.fromkeys(("is_known", "ended"), (samples, np.bool_)),
            "classes": (cells, np.int64),
            "ends": ((self.samples, self.width), np.float64),
            "scores": ((self.samples, classes), self.dtype),
        }
        if self.with_slopes:
            found |= {
                **dict.fromkeys(("keys", "order", "starts", "places"), (cells, np.int64)),
                **dict.fromkeys(("behind", "total_of_cells"), (cells, np.float64)),
                "is_first": (cells, np.bool_),
                "sorted": (cells, self.dtype),
                "kept": ((-(-frames // self.step), self.cells), np.float64),
                "forward": ((self.step, self.cells), np.float64),
            }
        return found

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        samples, steps = self.dims[1], list[Step]()
        numbers = lanes[0].keep((self.cells,), np.int64)
        numbers[...] = np.arange(self.cells)
        blocks = [slice(start, start + self.samples) for start in range(0, samples, self.samples)]
        for first in range(0, len(blocks), len(lanes)):
            together = [
                list(_Block(self, operands, results, part, lane.fork(), numbers=numbers).calls())
                for part, lane in zip(blocks[first:], lanes, strict=False)
            ]
            steps += zip(*together, strict=True)
        return steps


class _Block:
    """Some samples, with the state of a run: the calls, which are made in order, depend on those before.

    `numbers`: from 0 on, as many as there are cells. The other arrays of a run lie in its scratch.
    """

    def __init__(
        self,
        kernel: _CTCLoss,
        operands: Operands,
        results: Operands,
        part: slice,
        scratch: Scratch,
        *,
        numbers: _Integers,
    ) -> None:
        self._of, self._frames = kernel, kernel.dims[0]
        self._log_probs = operands["log_probs"][:, part]
        self._targets = operands["targets"][part]
        self._lengths, self._used = (operands[name][part] for name in ("input_lengths", "target_lengths"))
        self._losses = results["losses"][part]
        self._slopes = results["dlog_probs"][:, part] if kernel.with_slopes else None
        self._count = len(self._losses)
        size = self._count * kernel.width + _PADS
        self._numbers = numbers[:size]
        # Arrays of cells and of samples. This block may have fewer cells and samples than others.
        of = {name: scratch.take(dims, dtype) for name, (dims, dtype) in kernel.arrays.items()}
        cells = {name: array[:size] for name, array in of.items()}
        samples = {name: array[: self._count] for name, array in of.items()}
        self._memory = cells["row"], cells["next"]
        self._two, self._most = cells["two"], cells["most"]
        self._one, self._sum, self._emitted = cells["one"], cells["sum"], cells["emitted"]
        self._is_none = cells["is_none"]
        self._skips = cells["skips"]
        """Whether an alignment may get to a cell from the one two before it."""
        self._classes = cells["classes"]
        """The place of each cell's class, among those of all samples."""
        self._stops = samples["stops"]
        self._last = samples["last"]
        """The cell of the last blank of each sample, among its own."""
        self._spare = samples["spare"]
        self._totals, self._before = samples["totals"], samples["before"]
        self._missing = samples["missing"]
        """The value of derivatives that are not computed: NaN or 0."""
        self._is_known, self._ended = samples["is_known"], samples["ended"]
        self._ends, self._scores = samples["ends"], samples["scores"]
        if kernel.with_slopes:
            self._kept, self._forward = of["kept"][:, :size], of["forward"][:, :size]
            self._total_of_cells = cells["total_of_cells"]
            self._behind = cells["behind"]
            """Backward, the row of the frame behind: from each state, that frame included, to the end."""
            self._keys, self._is_first, self._sorted = cells["keys"], cells["is_first"], cells["sorted"]
            self._of_order, self._of_starts, self._of_places = (
                cells[name] for name in ("order", "starts", "places")
            )

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
        np.copyto(self._stops, self._lengths)
        np.clip(self._stops, 0, self._frames, out=self._stops)
        self._longest = int(self._stops.max())
        np.copyto(self._last, self._used)
        np.clip(self._last, 0, kernel.labels, out=self._last)
        np.multiply(self._last, 2, out=self._last)
        np.add(self._last, _PADS, out=self._last)
        self._classes.fill(kernel.blank)
        of_cells = self._of_samples(self._classes)
        labels = of_cells[:, _PADS + 1 :: 2]
        np.copyto(labels, self._targets)
        np.clip(labels, 0, classes - 1, out=labels)
        self._is_none.fill(True)
        is_none = self._of_samples(self._is_none)[:, _PADS:]
        np.greater(self._numbers[_PADS : kernel.width], self._last[:, None], out=is_none)
        self._skips.fill(False)
        skips = self._of_samples(self._skips)[:, 2 * _PADS :]
        np.not_equal(of_cells[:, 2 * _PADS :], of_cells[:, _PADS:-_PADS], out=skips)
        np.copyto(self._skips, False, where=self._is_none)
        np.multiply(self._numbers[: self._count], classes, out=self._spare)
        np.add(of_cells, self._spare[:, None], out=of_cells)
        self._classes[-_PADS:] = 0
        if self._slopes is not None:
            self._sort_states()
        self._rows = [*self._memory]
        """The row of the last frame, and the place of the next."""
        for row in self._rows:
            row.fill(-math.inf)
        self._of_samples(self._rows[0])[:, _PADS] = 0
        self._two.fill(-math.inf)
        self._save_ends(0)

    def _sort_states(self) -> None:
        """Find the cells that are states, by their classes, and where those of each class begin.

        A class and a cell are one number. All of them differ, so they are sorted where they lie; those of
        cells that are none come last.
        """
        size, keys = len(self._numbers), self._keys
        states = size - int(np.count_nonzero(self._is_none))
        np.multiply(self._classes, size, out=keys)
        np.add(keys, self._numbers, out=keys)
        np.copyto(keys, np.iinfo(np.int64).max, where=self._is_none)
        keys.sort()
        keys, is_first = keys[:states], self._is_first[:states]
        self._order = self._of_order[:states]
        np.remainder(keys, size, out=self._order)
        np.floor_divide(keys, size, out=keys)
        is_first[0] = True
        np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
        found = int(np.count_nonzero(is_first))
        starts = self._of_starts[:states]
        starts.fill(size)
        np.copyto(starts, self._numbers[:states], where=is_first)
        starts.sort()
        self._starts = starts[:found]
        self._places = self._of_places[:found]
        """The places that have states, and where those of each begin in their order."""
        keys.take(self._starts, out=self._places, mode="clip")

    def _is_ended(self, frame: int) -> bool:
        """Whether samples end before this frame. If so, `_ended` says which."""
        np.equal(self._stops, frame, out=self._ended)
        return bool(np.count_nonzero(self._ended))

    def _save_ends(self, frame: int) -> None:
        """Keep the rows of samples that have ended before this frame."""
        if self._is_ended(frame):
            np.copyto(self._ends, self._of_samples(self._rows[0]), where=self._ended[:, None])

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
        for frame in range(start, min(start + self._of.step, self._longest)):
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
        totals, before, most, places = self._totals, self._before, self._missing, self._spare
        np.multiply(self._numbers[: self._count], self._of.width, out=places)
        np.add(places, self._last, out=places)
        self._ends.reshape(-1).take(places, out=totals, mode="clip")
        np.subtract(places, 1, out=places)  # the last label; of a sample without labels, a cell of -infinity
        self._ends.reshape(-1).take(places, out=before, mode="clip")
        np.maximum(totals, before, out=most)
        np.maximum(most, _LEAST, out=most)
        for term in (totals, before):
            np.subtract(term, most, out=term)
            np.exp(term, out=term)
        np.add(totals, before, out=totals)
        np.log(totals, out=totals)
        np.add(most, totals, out=totals)
        np.isfinite(totals, out=self._is_known)
        self._missing.fill(math.nan)
        losses = np.subtract(0.0, totals, out=before)
        if self._of.zero_infinity:
            of_none = np.equal(totals, -math.inf, out=self._ended)
            np.copyto(losses, 0.0, where=of_none)
            np.copyto(self._missing, 0.0, where=of_none)
        np.copyto(self._losses, losses, casting="same_kind")
        if self._slopes is not None:
            self._of_samples(self._total_of_cells)[...] = totals[:, None]
            self._total_of_cells[-_PADS:] = 0
            self._behind.fill(-math.inf)
            # From now on, where samples begin that are followed backward: at the last blank.
            self._ends.fill(-math.inf)
            np.add(places, 1, out=places)
            self._ends.reshape(-1)[places] = 0

    def _go_back(self, start: int) -> None:
        assert self._slopes is not None
        stop = min(start + self._of.step, self._longest)
        if start >= stop:
            return
        found, row = self._memory[0], self._behind
        self._two.fill(-math.inf)
        self._rows = [self._kept[start // self._of.step], found]
        self._go_forward(start, self._forward)
        self._two.fill(-math.inf)
        for frame in reversed(range(start, stop)):
            if self._is_ended(frame + 1):  # in the place of what lies behind their frames
                np.copyto(self._of_samples(row), self._ends, where=self._ended[:, None])
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
        np.subtract(exponents, self._total_of_cells, shares, casting="same_kind")
        np.exp(shares, shares)
        ordered = self._sorted[: len(self._order)]
        shares.take(self._order, out=ordered, mode="clip")
        into = self._slopes[frame]
        flat = into.reshape(-1) if into.flags.c_contiguous else self._scores.reshape(-1)
        flat.fill(0)
        sums = self._sum[: len(self._starts)]
        np.add.reduceat(ordered, self._starts, out=sums)
        flat[self._places] = np.subtract(0, sums, out=sums)
        if not into.flags.c_contiguous:
            np.copyto(into, self._scores)

    def _finish(self) -> None:
        """Frames behind the last of a sample, and samples whose derivatives are not known."""
        assert self._slopes is not None
        for sample in range(self._count):
            stop = int(self._stops[sample])
            self._slopes[stop:, sample] = 0
            if not self._is_known[sample]:
                self._slopes[:stop, sample] = self._missing[sample]
