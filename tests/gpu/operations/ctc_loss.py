"""The loss of sequences without alignments, and its derivatives."""

from __future__ import annotations

import math

import numpy as np

from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import CTCLoss, Specs

from .pointwise import SUBNORMAL
from .rows import BARE, FLOATS, Asked, Exact, Made, Row, Sizes, walk

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
With T frames and S labels, w(n) = 4 √n, u float32's unit roundoff (float64's for float64), and a the sum over
frames of 2 and the largest magnitude of a logarithm, a loss may be off by e u with e = (w(3 T) + 8) a. A
derivative d may be off by (3 e + w(2 S) + 8) u · \\|d\\|; below 2^-126 it may be 0.
"""

PLAIN, LAST, INT64, ZERO, NONE = "plain", "last blank", "int64 labels", "zero infinity", "no labels"
TIGHT, FRAME, BLANKS, CLASSES = "a label a frame", "one frame", "labels of blanks", "many classes"
FORMS = (PLAIN, LAST, INT64, ZERO, NONE, TIGHT, FRAME, BLANKS, CLASSES, BARE)
_FAR = (-(2**31), -1, 2**31 - 1)


def _made(asked: Asked) -> Made:
    choose = asked.choose
    frames, samples, classes, labels = _sizes(asked)
    if asked.has(FRAME, 0.05):
        frames = 1
    if asked.has(BLANKS, 0.05):
        classes = 1
    if asked.form == CLASSES:
        classes *= 30
    labels = 0 if asked.has(NONE, 0.05) else frames if asked.form == TIGHT else labels
    wide = asked.has(INT64, 0.3)
    whole = DType.INT64 if wide else DType.INT32
    dims = {
        "log_probs": (frames, samples, classes),
        "targets": (samples, labels),
        "input_lengths": (samples,),
        "target_lengths": (samples,),
    }
    dtypes = {name: DType.INT64 if choose.chance(0.5) and asked.form is None else whole for name in dims}
    del dtypes["log_probs"]
    blank = classes - 1 if asked.has(LAST, 0.3) else choose.one((0, classes // 2))
    return Made(dims, {"blank": blank, "zero_infinity": asked.has(ZERO, 0.3)}, dtypes)


def _sizes(asked: Asked) -> tuple[int, int, int, int]:
    """T, N, C and S."""
    choose = asked.choose
    match asked.sizes:
        case Sizes.ONE:
            return 1, 1, 1, 1
        case Sizes.TINY:
            return choose.size(4), choose.size(3), choose.size(4), choose.size(3)
        case Sizes.VECTOR:
            return 8 * choose.size(8), 8, 8 * choose.size(6), 4 * choose.size(4)
        case Sizes.LONG:
            frames = 300 + choose.size(1_500)
            return frames, choose.size(2), choose.size(6), choose.size(frames // 3)
    return choose.size(60), choose.size(9), choose.size(40), choose.size(24)


def _arrange(operation: CTCLoss[str], rng: np.random.Generator, values: Exact, specs: Specs) -> None:
    """Logarithms of probabilities most of the time; labels and lengths mostly in range."""
    frames, samples, classes = specs["log_probs"].dims
    labels = specs["targets"].dims[1]
    scores = values["log_probs"]
    if rng.random() < 0.8:
        values["log_probs"] = scores - np.log(np.exp(scores).sum(axis=2, keepdims=True))
    few = 1 + int(rng.integers(classes))
    targets = rng.integers(0, few, (samples, labels))
    if rng.random() < 0.1:
        targets[...] = operation.blank
    same = rng.random(targets.shape) < rng.choice([0.0, 0.3, 1.0])
    for place in range(1, labels):
        targets[:, place] = np.where(same[:, place], targets[:, place - 1], targets[:, place])
    lengths = rng.integers(frames // 2, frames + 1, samples)
    used = rng.integers(0, min(labels, max(1, frames // 2)) + 1, samples)
    if rng.random() < 0.3:
        lengths[rng.integers(samples)] = rng.choice([0, 1, frames])
        used[rng.integers(samples)] = labels
    for array in (targets, lengths, used):
        if array.size and rng.random() < 0.2:
            wrong = rng.random(array.shape) < 0.2
            array[wrong] = rng.choice([*_FAR, classes, frames + 1, labels + 1], int(wrong.sum()))
    values |= {"targets": targets, "input_lengths": lengths, "target_lengths": used}


def _bounds(operation: CTCLoss[str], values: Exact, specs: Specs) -> Exact:
    log_probs = values["log_probs"]
    frames, labels = len(log_probs), values["targets"].shape[1]
    sizes = np.where(np.isfinite(log_probs), np.abs(log_probs), 0).max(axis=2, initial=0)
    error = (walk(3 * frames) + 8) * (sizes + 2).sum(axis=0)
    found = {"losses": error}
    if "dlog_probs" in specs:
        slopes = operation.evaluate(np, values, specs)["dlog_probs"]
        share = 3 * error[:, None] + walk(2 * labels + 1) + 8
        found["dlog_probs"] = np.where(np.isfinite(slopes), np.abs(slopes) * share + SUBNORMAL, 0)
    return found


ROWS = (
    Row(
        CTCLoss,
        FLOATS,
        ranks=(3,),
        forms=FORMS,
        make=_made,
        bounds=_bounds,
        arrange=_arrange,
        sampled=False,
        specials=(math.nan, -math.inf, math.inf),
    ),
)
