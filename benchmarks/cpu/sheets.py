"""The tables of a run: times, and how many times the rival's they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group

from benchmarks.recording import Row
from cudnn_actor.trials.bench.sheet import Sheet, as_text, median, number, ratio

from .sides import SERVICES, SIDES

__all__ = ["sheets", "shown"]

_RIVAL = "onnxruntime"
"""Of cases that are compared with no other side, but have an aim in milliseconds."""


def sheets(found: Sequence[Row]) -> Iterator[Sheet]:
    """What a run has measured."""
    yield Sheet(
        "Milliseconds of a run",
        ("", *SIDES),
        tuple(
            (row["part"], *(number(median(row["wall_ms"].get(side, ())), 2) for side in SIDES))
            for row in found
        ),
        "The median of the turns.",
    )
    yield Sheet(
        "How many times the rival's time",
        ("", "rival", *SERVICES, "least", "CPU", "aim"),
        tuple(_ratios(row) for row in found),
        "Medians of the turns' ratios; of `thread` also the ratio of the shortest runs, and of CPU seconds.",
    )


def _ratios(row: Row) -> tuple[str, ...]:
    wall, cpu, rival, most = row["wall_ms"], row["cpu_ms"], row["rival"] or _RIVAL, row["most"]
    theirs, ours = wall.get(rival, []), wall.get("thread", [])
    least = row["least_ms"]
    of_least = least["thread"] / least[rival] if ours and theirs else None
    reached = ratio(ours, theirs) if row["rival"] else median(ours)
    met = "" if reached is None else ", met" if reached <= most else ", missed"
    return (
        row["part"],
        rival,
        *(number(ratio(wall.get(side, []), theirs), 2) for side in SERVICES),
        number(of_least, 2),
        number(ratio(cpu.get("thread", []), cpu.get(rival, [])), 2),
        f"{most:g}{'' if row['rival'] else ' ms'}{met}",
    )


def shown(found: list[Row]) -> Group:
    """The tables for a terminal."""
    return Group(*map(as_text, sheets(found)))
