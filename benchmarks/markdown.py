"""The tables of docs/performance.md, from a recorded run and a recorded profile.

python benchmarks/markdown.py benchmarks/results/cpu-thread-DATE.json benchmarks/results/profile-DATE.json
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cudnn_actor.cli.bench import IN_FLIGHT, Hop, Report, Starving
from cudnn_actor.cli.measure import median_ratio


def lines(report: Report, profile: dict[str, Any]) -> Iterator[str]:
    for (loop, placement), hops in itertools.groupby(report.hops, key=lambda hop: (hop.loop, hop.placement)):
        yield f"**{loop}, threads on: {placement}**"
        yield from hop_table(list(hops))
    yield from work_table(report)
    for (loop, placement), rows in itertools.groupby(report.starvation, key=lambda r: (r.loop, r.placement)):
        yield f"**{loop}, threads on: {placement}**"
        yield from starvation_table(list(rows))
    yield from row("section", "CPU used by other processes, % of the cores")
    yield rule(2)
    for section, share in report.others_cpu.items():
        yield from row(section, f"{100 * share:.1f}")
    for name, found in profile["requests"].items():
        yield from profile_table(name, found)


def hop_table(hops: list[Hop]) -> Iterator[str]:
    bare, theirs = hops[0], hops[-1]
    rates = [f"{n} in flight, /s" for n in IN_FLIGHT]
    yield from row("request", "p50 µs", "p99 µs", "× bare hop", *rates, "× pykka at 64", "shared a core")
    yield rule(6 + len(IN_FLIGHT))
    for hop in hops:
        p50 = [timing.p50_us for timing in hop.one]
        yield from row(
            hop.subject,
            f"{statistics.median(p50):.1f}",
            f"{statistics.median(timing.p99_us for timing in hop.one):.0f}",
            f"{median_ratio(p50, [timing.p50_us for timing in bare.one]):.2f}",
            *(f"{statistics.median(hop.per_s[n]):,.0f}" for n in IN_FLIGHT),
            f"{median_ratio(hop.per_s[64], theirs.per_s[64]):.2f}",
            f"{statistics.fmean(hop.shared_core):.0%}" if hop.shared_core else "unknown",
        )


def work_table(report: Report) -> Iterator[str]:
    yield from row("work", "median ms", "least", "most")
    yield rule(4)
    rows = {f"convolution, {name}": ms for name, ms in report.convolutions_ms.items()}
    rows["sticky error: its request to the rerun's reply"] = report.crash_to_next_reply_ms
    for name, ms in rows.items():
        yield from row(name, f"{statistics.median(ms):.2f}", f"{min(ms):.2f}", f"{max(ms):.2f}")


def starvation_table(rows: list[Starving]) -> Iterator[str]:
    yield from row("load", "in flight", "lets go", "p50 ms", "p99 ms", "max ms", "pings/s", "callbacks/s")
    yield rule(8)
    for found in rows:
        times = (found.timing.p50_us, found.timing.p99_us, found.timing.max_us)
        yield from row(
            found.load,
            str(found.in_flight),
            f"{found.let_go:,} times" if found.lets_go else "never",
            *(f"{us / 1e3:.2f}" for us in times),
            f"{found.per_s:,.0f}",
            f"{found.callbacks_per_s:,.0f}",
        )


def profile_table(name: str, found: dict[str, Any]) -> Iterator[str]:
    ours_us, theirs_us = found["loop_us"], found["actor_us"]
    yield f"**{name}**: {ours_us:.1f} µs of the loop's thread a request, {theirs_us:.1f} of the actor's"
    yield from row("of the loop's thread, %", "", "of the actor's thread, %", "")
    yield rule(4)
    for (ours, share), (theirs, other) in zip(found["loop"][:8], found["actor"][:8], strict=True):
        yield from row(f"`{ours}`", f"{share:.1f}", f"`{theirs}`", f"{other:.1f}")


def row(*cells: str) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"


def rule(columns: int) -> str:
    return "|" + " --- |" * columns


def main() -> None:
    report, profile = (Path(path).read_bytes() for path in sys.argv[1:3])
    for line in lines(msgspec.json.decode(report, type=Report), msgspec.json.decode(profile)):
        print(line)


if __name__ == "__main__":
    main()
