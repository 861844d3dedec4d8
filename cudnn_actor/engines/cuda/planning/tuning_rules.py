"""How tuning decides which pieces and candidates it measures, and which of two plans is faster.

A measured time differs a little from run to run, so a difference is compared with the differences of runs of
the same plan. A candidate that is not clearly faster does not replace the first choice: so plans do not
change from one tuning to the next without a reason.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple, TypeVar

__all__ = ["TIE", "Few", "Gain", "finalists", "gain_of", "is_gain", "shortlist", "worth_tuning"]

T = TypeVar("T")

TIE = 0.02
"""The share of a piece's time that a candidate must save to be taken."""
_LEAST_SHARE = 0.005
"""The share of a run that a piece must take to be tuned: a gain on a smaller one could not be measured."""
_SURE = 3.0
"""The number of standard errors that a gain must be away from 0."""
_LEAST_US = 0.5
"""The least gain in microseconds that counts: the device's events count in such steps."""
_NEAR = 1.5
"""A candidate that takes more times as long as the first choice, by itself, is not tried in the whole."""
_NORMAL = 1.4826
"""Standard deviations in a median absolute deviation, of normally distributed numbers."""


def worth_tuning(times: Iterable[tuple[str, float]]) -> list[str]:
    """The keys of the pieces that are worth tuning. Pieces that take the most time in a run come first.

    `times`: the key and the microseconds of each piece of a run. Equal pieces have one key.
    """
    total: defaultdict[str, float] = defaultdict(float)
    for key, us in times:
        total[key] += us
    least = _LEAST_SHARE * sum(total.values())
    return sorted((key for key, us in total.items() if us >= least), key=lambda key: -total[key])


def shortlist(candidates: Iterable[tuple[Hashable, T]], most: int) -> list[T]:
    """At most `most` candidates: the first ones of each kind, as many of each kind if there are enough.

    `candidates`: each with its kind. Those of one kind come in the order in which they are expected to be
    fast, the fastest first.
    """
    kinds: defaultdict[Hashable, list[tuple[int, T]]] = defaultdict(list)
    for number, (kind, candidate) in enumerate(candidates):
        kinds[kind].append((number, candidate))
    in_turns = chain.from_iterable(zip_longest(*kinds.values()))
    chosen = [each for each in in_turns if each is not None][:most]
    return [candidate for _, candidate in sorted(chosen, key=lambda each: each[0])]


class Few:
    """Chooses a few of cuDNN's candidates for a piece: the first ones of each engine that can be built.

    cuDNN ranks an engine's configurations. Of 29 products and convolutions whose candidates were all timed on
    an H100, the fastest that is left misses the fastest of all by 30 % for one, by 4 and 5 % for two, and by
    at most 0.4 % for the others. 100 are built instead of 314, and builds take the most time of tuning.

    Parameters
    ----------
    configurations
        cuDNN's name of each candidate: its engine, and perhaps knobs.
    of_each, most
        The most of one engine that may be built, if there are other engines, and the most in all.
    """

    def __init__(self, configurations: Iterable[str], of_each: int, most: int) -> None:
        self._of_each = of_each if len(set(map(_engine, configurations))) > 1 else most
        self._most = most
        self._built: Counter[str] = Counter()

    def allows(self, configuration: str) -> bool:
        """Whether a candidate with this configuration is to be built."""
        return self._built[_engine(configuration)] < self._of_each and self._built.total() < self._most

    def note(self, configuration: str) -> None:
        """Note that a candidate with this configuration has been built."""
        self._built[_engine(configuration)] += 1


def _engine(configuration: str) -> str:
    return configuration.partition("_")[0]


def finalists(first_us: float, others_us: Sequence[float], most: int) -> list[int]:
    """The indices of the candidates that are tried in the whole run: at most `most`, the fastest by
    themselves.

    By itself, a plan finds its operands in the caches. So a plan that is a little slower by itself may be the
    faster one in the whole run.
    """
    near = [number for number, us in enumerate(others_us) if us <= _NEAR * first_us]
    return sorted(sorted(near, key=others_us.__getitem__)[:most])


class Gain(NamedTuple):
    """The microseconds by which a run is shorter, and their standard error."""

    us: float
    error_us: float


def gain_of(runs: Sequence[tuple[float, float]]) -> Gain:
    """The gain of a plan over another one. `runs`: the microseconds of the other plan and of this, by turns.

    The two runs of a turn have the same clock and temperature, so they are compared with each other.
    """
    gains = [before - after for before, after in runs]
    middle = statistics.median(gains)
    spread = _NORMAL * statistics.median([abs(gain - middle) for gain in gains])
    return Gain(middle, math.sqrt(math.pi / 2 / len(gains)) * spread)


def is_gain(gain: Gain, of_us: float) -> bool:
    """Whether a gain on pieces that take `of_us` together in a run is more than chance and `TIE`."""
    return gain.us > max(TIE * of_us, _SURE * gain.error_us, _LEAST_US)
