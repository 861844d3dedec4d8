"""A recorded run of both isolations, made up: every subject, every way, figures of known ratios."""

from __future__ import annotations

import itertools

from cudnn_actor.trials.bench.record import (
    APART,
    ISOLATIONS,
    SIDE_SUBJECTS,
    SIDES_IN_FLIGHT,
    Moves,
    Report,
    Side,
)
from cudnn_actor.trials.measure import Timing

__all__ = ["cpu_run"]

ROUNDS = 3
RATES, SLOWER = {"asyncio": 1.0, "uvloop": 0.8}, {"asyncio": 2.5, "uvloop": 1.5}
"""By loop: what a process makes of a thread's rate and latency."""


def cpu_run() -> Report:
    """A report of the parts that compare isolations."""
    return Report(
        date="2026-01-02T03:04:05+00:00",
        quick=False,
        machine={},
        versions={},
        hops=[],
        convolutions_ms={},
        crash_to_next_reply_ms=[],
        starvation=[],
        others_cpu={f"{APART}asyncio": 0.5},
        sides=[_side(*of) for of in itertools.product(RATES, ISOLATIONS, SIDE_SUBJECTS)],
        moves=Moves(
            nbytes=64 << 20,
            copy_s=_some(0.013),
            up_s={name: _some(0.015) for name in ISOLATIONS},
            down_s={name: _some(0.03) for name in ISOLATIONS},
        ),
        recovery_ms={
            "SIGKILL, with standby": _some(7.0),
            "sticky error, with standby": _some(12.0),
            "SIGKILL, without": _some(42.0),
            "sticky error, without": _some(44.0),
            "sticky error, thread": _some(2.0),
        },
        idle={name: _some(0.3) for name in ("thread: this process", "process: the worker")},
    )


def _some(centre: float) -> list[float]:
    return [centre * factor for factor in (0.97, 1.0, 1.03)]


def _side(loop: str, isolation: str, subject: str) -> Side:
    rate, slower = (RATES[loop], SLOWER[loop]) if isolation == "process" else (1.0, 1.0)
    return Side(
        loop=loop,
        isolation=isolation,
        subject=subject,
        one=[Timing(count=900, p50_us=us, p99_us=9 * us, max_us=1e5) for us in _some(1000.0 * slower)],
        per_s={n: _some(1e5 * rate) for n in SIDES_IN_FLIGHT},
        loop_cpu_us=_some(12.5),
        worker_cpu_us=_some(123.4),
    )
