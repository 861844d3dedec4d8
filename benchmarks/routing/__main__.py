"""Ways to give a pool's requests to its members, simulated with recorded service times.

    python -m benchmarks.routing --out benchmarks/results

A row for each setting and way. No device is needed, and the same seed gives the same figures.

- `p50_ms`, `p99_ms`, `p999_ms`, `max_ms`: from a request's arrival to its answer, without the first tenth.
- `p99_runs`: `p99_ms` in mean device times of a request.
- `down_percent`, `thrown_away_percent`: of the members' time, that in which they were down, and that in which
  they ran what a failure has ended.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from ..recording import Row, keep
from .service_times import mixes
from .simulation import Failures, Setting, simulate
from .ways import WAYS

__all__ = ["main", "rows", "settings"]

_MEMBERS = (8, 64, 1000)
_LOADS = (0.5, 0.7, 0.8, 0.9, 0.95)
_LOAD = 0.8
"""Of the settings that differ otherwise."""
_MTBF_US, _NOTICED_US = 30e6, 150e3
"""Far more failures than there are, so that they show; a process on an H200 takes 117 to 182 ms to end."""
_RESTARTS_US = {"250 ms": 250e3, "1 s": 1e6}
_MEMBERS_THAT_FAIL = 256
"""Where fewer are simulated, more requests are, up to four times as many, so that failures are seen."""
_REQUESTS_OF_A_MEMBER = 200
"""At least: queues have to fill."""


def settings(members: int, requests: int) -> Iterator[tuple[str, Setting]]:
    """The settings for one number of members, and what is special about each."""
    h200, h100, alone = mixes()
    requests = max(requests, members * _REQUESTS_OF_A_MEMBER)
    base = Setting(members=members, mix=h200, load=_LOAD, requests=requests)
    for load in _LOADS:
        yield "", replace(base, load=load)
    yield "", replace(base, mix=alone)
    yield "", replace(base, mix=h100)
    yield "1 of 8 at half speed", replace(base, slow=max(1, members // 8))
    many = replace(base, requests=requests * max(1, min(4, _MEMBERS_THAT_FAIL // members)))
    for word, restart_us in _RESTARTS_US.items():
        failures = Failures(mtbf_us=_MTBF_US, noticed_us=_NOTICED_US, restart_us=restart_us)
        yield f"restarts of {word}", replace(many, failures=failures)
        yield (
            f"restarts of {word}, waited for",
            replace(many, failures=replace(failures, elsewhere=False)),
        )


def rows(members: list[int], requests: int, seed: int) -> Iterator[Row]:
    """Yields a row for each number of members, setting and way."""
    for count in members:
        for special, setting in settings(count, requests):
            for way, made in WAYS.items():
                found = simulate(setting, made(), seed)
                whole_us = setting.members * found.span_us
                p99_us = found.percentile_us(99)
                yield {
                    "members": count,
                    "requests": setting.mix.name,
                    "load": setting.load,
                    "special": special,
                    "way": way,
                    "p50_ms": round(found.percentile_us(50) / 1e3, 3),
                    "p99_ms": round(p99_us / 1e3, 3),
                    "p999_ms": round(found.percentile_us(99.9) / 1e3, 3),
                    "max_ms": round(found.percentile_us(100) / 1e3, 1),
                    "p99_runs": round(p99_us / setting.mix.mean_us, 2),
                    "failures": found.failures,
                    "down_percent": round(100 * found.down_us / whole_us, 3),
                    "thrown_away_percent": round(100 * found.thrown_away_us / whole_us, 4),
                    "unanswered": len(found.unanswered),
                }


def sheet(found: list[Row]) -> Table:
    """The table for a terminal: the 99th percentile by way, and what failures cost."""
    table = Table(title="From arrival to answer, 99th percentile, ms")
    for name in ("members", "requests", "load", "special"):
        table.add_column(name)
    for name in (*WAYS, "failures", "down %", "thrown away %"):
        table.add_column(name, justify="right")
    settings_of: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in found:
        key = tuple(str(row[name]) for name in ("members", "requests", "load", "special"))
        settings_of.setdefault(key, {})[row["way"]] = row
    for key, by_way in settings_of.items():
        last = next(reversed(by_way.values()))
        figures = [f"{by_way[way]['p99_ms']:.2f}" if way in by_way else "" for way in WAYS]
        failed = [str(last[name]) for name in ("failures", "down_percent", "thrown_away_percent")]
        table.add_row(*key, *figures, *failed)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, nargs="*", default=_MEMBERS)
    parser.add_argument("--requests", type=int, default=100_000, help="in each simulation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = parser.parse_args()
    found = rows(list(given.members), given.requests, given.seed)
    keep(found, sheet, given.out, "routing", seed=given.seed, arrivals=given.requests)


if __name__ == "__main__":
    main()
