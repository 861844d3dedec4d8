"""The tables of a run: times, and how many times the rival's they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group

from benchmarks.recording import Row
from cudnn_actor.trials.bench.sheet import Sheet, as_text, median, number, ratio

from .sides import SERVICES, SIDES

__all__ = ["sheets", "shown"]

_AIMS = {"thread": "most", "extra": "most_extra"}
_RIVAL = "onnxruntime"
"""Of cases that are compared with no other side, but have an aim in milliseconds."""


def sheets(found: Sequence[Row]) -> Iterator[Sheet]:
    """The tables of what a run has measured."""
    yield Sheet(
        "Milliseconds of a run",
        ("", *SIDES),
        tuple(
            (row["part"], *(number(median(row["wall_ms"].get(side, ())), 2) for side in SIDES))
            for row in found
        ),
        "The median of the turns. One request at a time: its caller sends the next one once it has the "
        "answer. So this is how long a caller waits.",
    )
    yield Sheet(
        "How many times the rival's time",
        ("", "rival", *SERVICES),
        tuple(
            (row["part"], row["rival"] or _RIVAL, *(_times(row, side) for side in SERVICES)) for row in found
        ),
        "Medians of the turns' ratios, one request at a time.",
    )
    yield Sheet(
        "The same of the shortest runs, and of CPU seconds; and what is aimed at",
        ("", *(f"{side}, {what}" for side in _AIMS for what in ("shortest", "CPU", "aim"))),
        tuple((row["part"], *(cell for side in _AIMS for cell in _aimed(row, side))) for row in found),
        "An aim is for the median of the turns' ratios, or for milliseconds.",
    )

    if any(row.get("flight_ms", {}).get(side) for row in found for side in SERVICES):
        yield _in_flight(found)


def _in_flight(found: Sequence[Row]) -> Sheet:
    columns = [*((side, "flight_ms") for side in SERVICES), *((side, "flight_cpu_ms") for side in _AIMS)]
    names = tuple(f"{side}, CPU" if what == "flight_cpu_ms" else side for side, what in columns)
    return Sheet(
        "How many times the rival's time, with 8 requests in flight",
        ("", "rival", *names),
        tuple(
            (row["part"], row["rival"] or _RIVAL, *(_times(row, side, what) for side, what in columns))
            for row in found
        ),
        "The time of all runs divided by their number, where 8 callers each send the next request once "
        "theirs is answered. So this is of throughput: a service takes and answers requests on its event "
        "loop's thread while it computes others on as many threads as its rival, which computes one run "
        "after the other. CPU seconds have both threads. Runs of 8 ms or more are not measured so.",
    )


def _times(row: Row, side: str, what: str = "wall_ms") -> str:
    return number(_ratio(row, side, what), 2)


def _ratio(row: Row, side: str, what: str) -> float | None:
    times = row.get(what, {})
    return ratio(times.get(side, []), times.get(row["rival"] or _RIVAL, []))


def _aimed(row: Row, side: str) -> tuple[str, str, str]:
    most, unit = row[_AIMS[side]], "" if row["rival"] else " ms"
    reached = _ratio(row, side, "wall_ms") if row["rival"] else median(row["wall_ms"].get(side, []))
    if reached is None:
        return ("–", "–", f"{most:g}{unit}")
    verdict = "met" if reached <= most else "missed"
    return (_times(row, side, "least_ms"), _times(row, side, "cpu_ms"), f"{most:g}{unit}, {verdict}")


def shown(found: list[Row]) -> Group:
    """The tables for a terminal."""
    return Group(*map(as_text, sheets(found)))
