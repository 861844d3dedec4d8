"""Random numbers without a generator: a function of a seed and of counters.

The supervision core is pure, and a fault plan must mean the same in every process. So neither may hold a
generator with changing state. A number here depends only on the arguments: the n-th number of a seed is
the same for every caller, however often it is drawn.
"""

from __future__ import annotations

__all__ = ["random01"]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def random01(seed: int, *counters: int) -> float:
    """A pseudo-random number in [0, 1) that depends only on the arguments."""
    mixed = _mix(seed & _MASK)
    for counter in counters:
        mixed = _mix((mixed + (counter + 1) * _GAMMA) & _MASK)
    return (mixed >> 11) / (1 << 53)


def _mix(bits: int) -> int:
    # The finaliser of SplitMix64: https://doi.org/10.1145/2660193.2660195
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)
