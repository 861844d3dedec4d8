"""The loss of connectionist temporal classification: how improbable a sequence without an alignment is.

The definition is PyTorch's, of `ctc_loss`; the recursions are those of A. Graves et al., "Connectionist
Temporal Classification", ICML 2006, section 4.1, in logarithms.
https://docs.pytorch.org/docs/main/generated/torch.nn.functional.ctc_loss.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.operations.base import (
    ALLOCATED,
    Array,
    Operation,
    Specs,
    T,
    require,
    require_elements,
    require_floating,
)
from cudnn_actor.protocol.operations.example import ROUNDED, Example
from cudnn_actor.protocol.types.checks import is_whole
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["CTCLoss"]

_RANKS = {
    "log_probs": (3, "(T, N, C): frames, samples, classes"),
    "targets": (2, "(N, S): the labels of each sample, padded"),
    "input_lengths": (1, "(N,)"),
    "target_lengths": (1, "(N,)"),
}
_MOST_STATES = 1 << 22
"""States of all frames and samples in what a check of a plan evaluates: that takes about a second."""


class CTCLoss(Operation[T], tag=True):
    """The negative logarithm of the probability of labels, summed over all alignments with frames.

    An alignment has a class for each frame. It gives the labels if they are what remains of it when equal
    neighbours are joined, and blanks are left out after that. Its probability is the product of those of its
    classes. Answered by a `Receipt`.

    The loss is infinite if there is no such alignment: labels need a frame each, and a blank between equal
    neighbours. Nothing is ever read outside of a tensor, whatever the labels and lengths are.

    Parameters
    ----------
    log_probs
        Dims (T, N, C), of a floating-point dtype: logarithms of the probabilities of C classes, for T frames
        of N samples. What a logarithm of a softmax gives.
    targets
        Dims (N, S), int32 or int64: the labels of each sample, from 0 to C - 1. A label below 0 counts as 0,
        and one above C - 1 as C - 1. What is behind a sample's labels has no effect.
    input_lengths, target_lengths
        Dims (N,), int32 or int64: how many frames and labels each sample has, from 0 to T and to S. A number
        out of range counts as the nearest in range.
    losses
        Result, dims (N,): float64 if log_probs is, else float32.
    dlog_probs
        Result, or None: the derivative of each sample's loss with respect to its log_probs, of their dims and
        dtype. 0 in frames behind a sample's last. Of a sample whose loss is infinite or NaN, the derivative
        is NaN in all of its frames.
    blank
        The class of blanks, from 0 to C - 1.
    zero_infinity
        Whether an infinite loss and its derivatives are 0 instead.
    """

    kind = "ctc_loss"
    inputs = ("log_probs", "targets", "input_lengths", "target_lengths")
    outputs = ("losses", "dlog_probs")
    optional = frozenset({"dlog_probs"})
    takes_empty = True
    log_probs: T
    targets: T
    input_lengths: T
    target_lengths: T
    losses: T = ALLOCATED
    dlog_probs: T | None = None
    blank: int = 0
    zero_infinity: bool = False

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        require_floating(specs, "log_probs")
        for name, (rank, dims) in _RANKS.items():
            if specs[name].rank != rank:
                raise InvalidRequest(
                    field=name,
                    value=specs[name].dims,
                    problem=f"has rank {specs[name].rank}, and {rank} is needed",
                    fix=f"give it dims {dims}",
                )
        log_probs = specs["log_probs"]
        require_elements(specs, "log_probs", (2,), "classes")
        _, samples, classes = log_probs.dims
        require(specs, "targets", (samples, specs["targets"].dims[1]), DType.INT32, DType.INT64)
        for name in ("input_lengths", "target_lengths"):
            require(specs, name, (samples,), DType.INT32, DType.INT64)
        if not is_whole(self.blank) or not 0 <= self.blank < classes:
            raise InvalidRequest(
                field="blank",
                value=self.blank,
                problem=f"is none of the {classes} classes of log_probs",
                fix=f"use one from 0 to {classes - 1}",
            )
        return {
            "losses": TensorSpec.packed((samples,), self.compute((log_probs.dtype,))),
            "dlog_probs": TensorSpec.packed(log_probs.dims, log_probs.dtype),
        }

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        if "dlog_probs" in d:
            raise InvalidRequest(
                field="outputs",
                value=Words("the gradient of ctc_loss"),
                problem="depends on wrt by CTCLoss, which has no second derivatives",
                fix="differentiate its losses once",
            )
        of_samples = g.reshape(d["losses"], (1, *d["losses"].dims, 1))
        return {"log_probs": g.output(self, "dlog_probs") * of_samples}

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        """Labels that are equal in some places, and lengths that differ; short ones of large problems."""
        log_probs, targets = specs["log_probs"], specs["targets"]
        frames, samples, classes = log_probs.dims
        scores = draw(log_probs)
        states = max(64, _MOST_STATES // max(1, samples))  # of a sample, in all frames
        labels = min(targets.dims[1], math.isqrt(states) // 2)
        length = min(frames, states // (2 * labels + 1))
        labels = min(labels, length // 2)
        steps = xp.arange(targets.size, dtype=xp.int64).reshape(targets.dims)
        return {
            "log_probs": scores - xp.log(xp.exp(scores).sum(axis=2, keepdims=True)),
            "targets": (steps * 7 // 3 + draw(targets).astype(xp.int64) + 3) % classes,
            "input_lengths": xp.maximum(length - 3 - draw(specs["input_lengths"]), -(-length // 2)),
            "target_lengths": xp.maximum(labels - 3 - draw(specs["target_lengths"]), labels // 2),
        }

    def work(self, specs: Specs) -> int:
        frames, samples, classes = specs["log_probs"].dims
        states = 2 * specs["targets"].dims[1] + 1
        return frames * samples * (classes + 8 * states)

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        if hasattr(xp, "asnumpy"):  # CuPy, on which each of the many steps would be several launches
            given = {name: xp.asnumpy(value) for name, value in values.items()}
            return {name: xp.asarray(of) for name, of in self.evaluate(np, given, specs).items()}
        lattice = _Lattice(xp, *(values[name] for name in self.inputs), blank=self.blank)
        of_none = lattice.log_likelihoods == -math.inf
        losses = 0.0 - lattice.log_likelihoods
        found = {"losses": np.where(of_none, 0.0, losses) if self.zero_infinity else losses}
        if "dlog_probs" in specs:
            slopes = lattice.slopes()
            inside = np.arange(len(slopes))[:, None] < lattice.frames
            slopes[inside & ~np.isfinite(losses)] = math.nan
            if self.zero_infinity:
                slopes[:, of_none] = 0.0
            found["dlog_probs"] = slopes
        return found


class _Lattice:
    """The states of alignments, frame by frame, of all samples together.

    A state is a place in the labels with blanks before, between and behind them: blanks have even numbers. An
    alignment stays in its state, or goes on to the next one, or to the label behind a blank if that label is
    another one.

    Attributes
    ----------
    log_likelihoods
        Of each sample: the logarithm of the probability of its labels.
    frames
        How many each sample has.
    """

    def __init__(
        self,
        xp: Any,
        log_probs: Array,
        targets: Array,
        input_lengths: Array,
        target_lengths: Array,
        *,
        blank: int,
    ) -> None:
        frames, samples, classes = log_probs.shape
        self._xp, self._log_probs, self._of_samples = xp, log_probs, np.arange(samples)
        self.frames = np.clip(input_lengths, 0, frames)
        labels = np.clip(target_lengths, 0, targets.shape[1])
        most = int(labels.max(initial=0))
        self._classes = np.full((samples, 2 * most + 1), blank, np.int64)
        """The class of each sample's states."""
        self._classes[:, 1::2] = np.clip(targets[:, :most], 0, classes - 1)
        self._is_used = np.arange(2 * most + 1) <= 2 * labels[:, None]
        self._skips = np.zeros(self._classes.shape, np.bool_)
        """Whether an alignment may get to a state from the one two before it."""
        self._skips[:, 2:] = self._classes[:, 2:] != self._classes[:, :-2]
        self._is_last = np.zeros(self._classes.shape, np.bool_)
        """Whether an alignment may end in a state: in the last label, and in the blank behind it."""
        self._is_last[self._of_samples, 2 * labels] = True
        self._is_last[self._of_samples, np.maximum(2 * labels - 1, 0)] = True
        self._longest = int(self.frames.max(initial=0))
        self._step = math.isqrt(self._longest) + 1
        self._kept = [*self._rows_to_keep()]
        """The forward row before every `_step`-th frame, and the last one."""
        last = self._kept.pop()
        self.log_likelihoods: Array = _log_of_sum(np.where(self._is_last, last, -math.inf).T)

    def _rows_to_keep(self) -> Iterator[Array]:
        """Before the first frame, all alignments are at the first blank: it gets to the first two states."""
        row = np.full(self._classes.shape, -math.inf, self._log_probs.dtype)
        row[:, 0] = 0.0
        for frame in range(self._longest):
            if frame % self._step == 0:
                yield row
            row = self._advance(row, frame)
        yield row

    def _advance(self, row: Array, frame: int) -> Array:
        """The logarithms of the probabilities to be in each state a frame later, from those now."""
        one, two = (np.full(row.shape, -math.inf, row.dtype) for _ in range(2))
        one[:, 1:] = row[:, :-1]
        two[:, 2:] = np.where(self._skips[:, 2:], row[:, :-2], -math.inf)
        found = _log_of_sum((row, one, two)) + self._emission(frame)
        return np.where(frame < self.frames[:, None], found, row)

    def _emission(self, frame: int) -> Array:
        """The logarithm of the probability of each state's class; -infinity of states behind the last."""
        found = self._xp.take_along_axis(self._log_probs[frame], self._classes, 1)
        return np.where(self._is_used, found, -math.inf)

    def _forward_rows(self) -> Iterator[tuple[int, Array]]:
        """Yields frames and their rows, the last first. They are computed again from those that were kept."""
        for start in reversed(range(0, self._longest, self._step)):
            row, rows = self._kept[start // self._step], []
            for frame in range(start, min(start + self._step, self._longest)):
                row = self._advance(row, frame)
                rows.append((frame, row))
            yield from reversed(rows)

    def slopes(self) -> Array:
        """The derivatives of the losses: of each frame and class, the probability to be there, negative."""
        slopes = np.zeros(self._log_probs.shape, self._log_probs.dtype)
        shape = self._classes.shape
        behind = np.where(self._is_last, 0.0, -math.inf).astype(slopes.dtype)
        """The logarithms of the probabilities to get from each state to the end."""
        for frame, row in self._forward_rows():
            inside = frame < self.frames[:, None]
            shares = np.where(inside, np.exp(row + behind - self.log_likelihoods[:, None]), 0.0)
            np.subtract.at(slopes[frame], (self._of_samples[:, None], self._classes), shares)
            through = behind + self._emission(frame)
            one, two = (np.full(shape, -math.inf, slopes.dtype) for _ in range(2))
            one[:, :-1] = through[:, 1:]
            two[:, :-2] = np.where(self._skips[:, 2:], through[:, 2:], -math.inf)
            behind = np.where(inside, _log_of_sum((through, one, two)), behind)
        return slopes


def _log_of_sum(terms: Any) -> Array:
    """The logarithm of a sum of exponentials along the first axis."""
    most = np.maximum.reduce(terms)
    most = np.where(most == -math.inf, 0, most)
    with np.errstate(divide="ignore"):
        return most + np.log(sum(np.exp(term - most) for term in terms))


def examples() -> tuple[Example, ...]:
    """A loss of labels in five classes."""
    operation = CTCLoss(
        log_probs="log_probs",
        targets="targets",
        input_lengths="input_lengths",
        target_lengths="target_lengths",
        losses="losses",
        dlog_probs="dlog_probs",
        blank=2,
    )
    dims = {"log_probs": (12, 4, 5), "targets": (4, 5), "input_lengths": (4,), "target_lengths": (4,)}
    whole = dict.fromkeys(["targets", "input_lengths", "target_lengths"], DType.INT32)
    return (Example(dims=dims, dtypes=whole, operations=(operation,), tolerance=ROUNDED),)
