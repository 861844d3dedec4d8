"""How long to measure."""

from __future__ import annotations

import msgspec

__all__ = ["FULL", "QUICK", "Plan"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long to measure."""

    rounds: int
    slice_s: float
    """Seconds of each measurement of a round."""
    starving_s: float
    repeats: int
    moves: int
    """Of 64 MiB, each way."""
    kills: int
    """Of each kind."""
    idle_rounds: int
    idle_s: float


FULL = Plan(
    rounds=7,
    slice_s=0.15,
    starving_s=1.5,
    repeats=15,
    moves=15,
    kills=20,
    idle_rounds=3,
    idle_s=1.0,
)
QUICK = Plan(
    rounds=1,
    slice_s=0.003,
    starving_s=0.02,
    repeats=2,
    moves=1,
    kills=2,
    idle_rounds=1,
    idle_s=0.02,
)
