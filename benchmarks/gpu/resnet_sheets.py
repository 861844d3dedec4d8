"""ResNet-50's figures as tables: sums by direction, each convolution, and what tuning gains."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from benchmarks.gpu import ceilings
from benchmarks.gpu.resnet import Measured, Resnet, Series, name_of
from benchmarks.gpu.sheet import Sheet, median, number, verdict

__all__ = ["AIMS", "sheets", "total_us"]

AIMS = {"fwd": 1.05, "dgrad": 1.3, "wgrad": 1.3}
"""PyTorch's time over ours, in sum, at batch 32."""
_AIMED_BATCH = 32


def summed(series: Series, how: str) -> str:
    """The sum over the convolutions that were run so, and of how many where that is not all of them."""
    count = len(shared(series, how))
    text = number(total_us(series, how), 0)
    return text if count in (0, len(series.rows)) else f"{text} of {count}"


def total_us(series: Series, how: str, beside: Iterable[str] = ()) -> float | None:
    """The sum of the medians over the convolutions that were run so, and in all the ways beside it.

    None where there is none of them.
    """
    rows = shared(series, how, *beside)
    return math.fsum(median(row.us[how]) or 0.0 for row in rows) if rows else None


def shared(series: Series, *ways: str) -> list[Measured]:
    """The convolutions that were run in all these ways."""
    return [row for row in series.rows if all(row.us.get(how) for how in ways)]


def gain(series: Series, ours: str, theirs: str) -> float | None:
    """Their time over ours, in sum."""
    mine, other = total_us(series, ours, [theirs]), total_us(series, theirs, [ours])
    return other / mine if mine and other else None


def sheets(found: Resnet) -> Iterator[Sheet]:
    """The tables of this part."""
    yield from ceilings.sheets(found.ceilings)
    yield _alone(found)
    yield _called(found)
    yield from _each(found)
    yield from _tuning(found)
    yield from _refused(found)
    if found.left_out:
        rows = tuple((name,) for name in found.left_out)
        yield Sheet("Left out for want of time", ("convolutions",), rows)


def _alone(found: Resnet) -> Sheet:
    rows = []
    for series in found.series:
        mine, tuned, theirs = (f"{name}, alone" for name in ("heuristic", "tuned", "torch"))
        aim = AIMS[series.direction] if series.batch == _AIMED_BATCH and not series.tf32 else 1.0
        best = tuned if len(shared(series, tuned)) == len(series.rows) else mine
        us = total_us(series, best)
        floor = math.fsum(row.floor_us for row in shared(series, best))
        complete = len(shared(series, best)) == len(series.rows)
        rows.append(
            (
                name_of(series),
                *(summed(series, how) for how in (mine, tuned, theirs)),
                verdict(gain(series, mine, theirs), aim),
                verdict(gain(series, tuned, theirs), aim),
                number(series.flops / us / 1e6 if us and complete else None),
                number(floor / us if us else None, 2),
            )
        )
    return Sheet(
        "ResNet-50's 23 convolutions, µs of the device in sum",
        ("", "heur.", "tuned", "PyTorch", "gain", "tuned gain", "TFLOP/s", "ceiling"),
        tuple(rows),
        "bf16 lies in NHWC, f32 in NCHW. Each convolution is captured in a CUDA graph, so the host's time is "
        "not included. PyTorch has benchmark=True. Gain: PyTorch's time over ours, for the convolutions that "
        "both can run. The aim with N=32 is 1.05 for fwd, 1.3 for dgrad and wgrad, and 1 elsewhere. TFLOP/s "
        "and ceiling (the fraction of what products or memory allow, whichever bounds a convolution) are of "
        "the tuned plans if all were tuned. The first convolution has 3 channels in both.",
    )


def _called(found: Resnet) -> Sheet:
    rows = [
        (
            name_of(series),
            *(summed(series, how) for how in ("actor", "heuristic", "tuned", "torch")),
            number(gain(series, "actor", "torch"), 2),
            number(gain(series, "heuristic", "torch"), 2),
        )
        for series in found.series
    ]
    return Sheet(
        "The same as they are called, µs in sum",
        ("", "actor", "heuristic", "tuned", "PyTorch", "gain, actor", "gain"),
        tuple(rows),
        "Actor: heuristic plans, requests that are submitted to the service all at once, until the last "
        "reply. The others: calls in a loop, timed by events of the device. If a convolution takes less time "
        "than its call, this is the host's time, in ours and in PyTorch's.",
    )


def _refused(found: Resnet) -> Iterator[Sheet]:
    errors = Counter(
        (how, text[:55]) for series in found.series for row in series.rows for how, text in row.errors.items()
    )
    rows = tuple((how, str(count), text) for (how, text), count in errors.most_common())
    if rows:
        yield Sheet("ResNet-50: what failed", ("how", "times", "error"), rows)


def _each(found: Resnet) -> Iterator[Sheet]:
    """Every convolution, where all three directions were aimed at something."""
    mine = [s for s in found.series if s.batch == _AIMED_BATCH and s.dtype == "bfloat16"]
    if not mine:
        return
    ways = ("heuristic, alone", "tuned, alone", "torch, alone")
    rows = []
    for place, row in enumerate(mine[0].rows):
        cells = [number(median(series.rows[place].us.get(how, []))) for series in mine for how in ways]
        rows.append((row.conv, *cells))
    heads = [f"{series.direction} {how}" for series in mine for how in ("heur.", "tuned", "torch")]
    yield Sheet("Each of them, µs of the device: bf16, N=32", ("", *heads), tuple(rows))


def _tuning(found: Resnet) -> Iterator[Sheet]:
    rows = []
    for series in found.series:
        how = "alone" if shared(series, "tuned, alone") else ""
        plain, tuned = (f"{name}, {how}".rstrip(", ") for name in ("heuristic", "tuned"))
        both = shared(series, plain, tuned)
        if not both:
            continue
        speedups = [(median(row.us[plain]) or 0.0) / (median(row.us[tuned]) or 1.0) for row in both]
        rows.append(
            (
                name_of(series),
                number(gain(series, tuned, plain), 2),
                number(median(speedups), 2),
                number(max(speedups), 2),
                str(sum(speedup > 1.05 for speedup in speedups)),
                number(sum(row.build_s or 0.0 for row in both), 2),
                number(sum(row.tune_s or 0.0 for row in both)),
                str(sum(row.tried for row in both)),
                str(sum(len(row.discarded) for row in both)),
            )
        )
    if rows:
        heads = ("", "in sum", "median", "most", "over 1.05", "building s", "tuning s", "tried", "distrusted")
        note = (
            "Times as fast as the heuristic plan; how many of them gain over 5 %; seconds for all of them; "
            "candidates that ran, and that gave wrong results or wrote where they may not."
        )
        yield Sheet("Tuned plans against heuristic ones", heads, tuple(rows), note)
