"""The tables of docs/measurements.md, from a recorded run and a recorded profile.

With `--page docs/measurements.md` they replace, there, those of the two files that the page names, and so
does the section of both isolations, which stands between two comments. Its prose is yours to read again.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cudnn_actor.trials.bench.isolation_sheets import sheets
from cudnn_actor.trials.bench.record import APART, IN_FLIGHT, SUBJECTS, Hop, Report, Starving
from cudnn_actor.trials.bench.sheet import Sheet, number
from cudnn_actor.trials.measure import median_ratio
from cudnn_actor.trials.placement import PLACEMENTS

__all__ = [
    "BEGIN",
    "END",
    "as_markdown",
    "exchange",
    "isolation_section",
    "named_in",
    "of_files",
    "row",
    "rule",
    "update",
    "wrapped",
]

BEGIN, END = "<!-- isolation: begin -->", "<!-- isolation: end -->"
_GPU_BEGINS = "<!-- gpu: begin -->"
_WIDTH = 120


def lines(report: Report, profile: dict[str, Any]) -> Iterator[str]:
    for (loop, placement), hops in itertools.groupby(report.hops, key=lambda hop: (hop.loop, hop.placement)):
        yield f"**{loop}, threads on: {placement}**"
        yield from hop_table(list(hops))
    yield from aims_table(report)
    yield from work_table(report)
    for (loop, placement), rows in itertools.groupby(report.starvation, key=lambda r: (r.loop, r.placement)):
        yield f"**{loop}, threads on: {placement}**"
        yield from starvation_table(list(rows))
    for name, found in profile["requests"].items():
        yield from profile_table(name, found)
    yield from row("section", "CPU used by other processes, % of the cores")
    yield rule(2)
    for section, share in report.others_cpu.items():
        if not section.startswith(APART):
            yield from row(section, f"{100 * share:.1f}")


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


def aims_table(report: Report) -> Iterator[str]:
    """The table of the aims on asyncio, by placement."""
    found = {(hop.placement, hop.subject): hop for hop in report.hops if hop.loop == "asyncio"}
    bare, ping, convolution, theirs = SUBJECTS

    def p50_against_the_hop(subject: str, placement: str) -> float:
        ours, hops = ([t.p50_us for t in found[placement, name].one] for name in (subject, bare))
        return median_ratio(ours, hops)

    def per_s(subject: str, placement: str) -> float:
        return statistics.median(found[placement, subject].per_s[64])

    def times_pykka(subject: str, placement: str) -> float:
        return median_ratio(found[placement, subject].per_s[64], found[placement, theirs].per_s[64])

    yield from row("aim", *PLACEMENTS)
    yield rule(1 + len(PLACEMENTS))
    for name, subject, measure, aim, least in (
        (f"{ping}, one in flight: within 1.5 of the bare hop", ping, p50_against_the_hop, 1.5, False),
        (f"{ping}, 64 in flight: 100,000/s", ping, per_s, 100_000.0, True),
        (f"{ping}, 64 in flight: 4 times pykka's way", ping, times_pykka, 4.0, True),
        (
            f"{convolution}, one in flight: within 3 of the bare hop",
            convolution,
            p50_against_the_hop,
            3.0,
            False,
        ),
        (f"{convolution}, 64 in flight: 15,000/s", convolution, per_s, 15_000.0, True),
    ):
        values = [measure(subject, placement) for placement in PLACEMENTS]
        yield from row(name, *(outcome(value, value >= aim if least else value <= aim) for value in values))


def outcome(value: float, met: bool) -> str:
    return (
        f"{value:,.0f}, {'met' if met else 'missed'}"
        if value > 100
        else f"{value:.2f}, {'met' if met else 'missed'}"
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


# Both isolations.


def _others_sheet(report: Report) -> Sheet:
    """CPU that other processes used during the run."""
    shares = {name: share for name, share in report.others_cpu.items() if name.startswith(APART)}
    rows = ((name.removeprefix(APART), number(100 * share)) for name, share in shares.items())
    return Sheet("CPU that other processes used meanwhile", ("section", "% of the cores"), tuple(rows))


def isolation_section(report: Report) -> str:
    """The text between the comments; empty for a run that has not measured this."""
    found = list(sheets(report))
    if not found:
        return ""
    found.append(_others_sheet(report))
    head = ["## Thread and process isolation, CPU engine", "", "Of the same run.", ""]
    return "\n".join([*head, *(line for sheet in found for line in as_markdown(sheet))])


def exchange(text: str, begin: str, end: str, section: str, *, before: str | None = None) -> str:
    """A page's text with a section between two comments in the place of the one that stands there.

    Where none does yet, it is put before the words `before`, or at the page's end.
    """
    block = f"{begin}\n{section}{end}\n"
    head, found, rest = text.partition(begin)
    if found:
        after = rest.partition(f"{end}\n")[2]
        return f"{head}{block}{after}"
    head, found, rest = text.partition(before) if before is not None else (text, "", "")
    if found:
        return f"{head}{block}\n{found}{rest}"
    return f"{text.rstrip()}\n\n{block}"


# Lines.


def as_markdown(sheet: Sheet) -> Iterator[str]:
    """The lines of a sheet, an empty one at the end."""
    yield from (f"**{sheet.title}**", "")
    yield from row(*sheet.columns)
    yield rule(len(sheet.columns))
    for cells in sheet.rows:
        yield from row(*cells)
    yield ""
    if sheet.note:
        yield from (*wrapped(sheet.note), "")


def wrapped(text: str) -> list[str]:
    """The lines of a paragraph."""
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def row(*cells: str) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"


def rule(columns: int) -> str:
    return "|" + " --- |" * columns


def of_files(run: Path, profile: Path) -> list[str]:
    report = msgspec.json.decode(run.read_bytes(), type=Report)
    return list(lines(report, msgspec.json.decode(profile.read_bytes())))


def named_in(text: str) -> list[Path]:
    """The run and the profile that a page names."""
    root = Path(__file__).parents[1]
    names = re.findall(r"benchmarks/results/(?:cpu|profile)-[\w-]+\.json", text)
    return [root / name for name in names]


def update(page: Path, run: Path, profile: Path) -> None:
    """Exchange a page's tables, line by line: those of two runs have the same shape."""
    text = page.read_text(encoding="utf-8")
    old_run, old_profile = named_in(text)
    exchanges = zip(of_files(old_run, old_profile), of_files(run, profile), strict=True)
    done, rest = "", text.replace(old_run.name, run.name).replace(old_profile.name, profile.name)
    for old, new in exchanges:
        before, found, rest = rest.partition(f"{old}\n")
        if not found:
            raise SystemExit(f"not on the page: {old}")
        done += f"{before}{new}\n"
    section = isolation_section(msgspec.json.decode(run.read_bytes(), type=Report))
    text = done + rest
    if section:
        text = exchange(text, BEGIN, END, section, before=_GPU_BEGINS)
    page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    if args.page is None:
        print("\n".join(of_files(args.run, args.profile)))
        print(isolation_section(msgspec.json.decode(args.run.read_bytes(), type=Report)))
    else:
        update(args.page, args.run, args.profile)


if __name__ == "__main__":
    main()
