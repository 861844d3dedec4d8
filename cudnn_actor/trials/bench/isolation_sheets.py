"""The tables that compare both isolations: their costs, and how fast a worker is replaced."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from cudnn_actor.trials.bench.record import ISOLATIONS, SIDES_IN_FLIGHT, Moves, Report, Side
from cudnn_actor.trials.bench.sheet import Sheet, median, number, ratio, verdict
from cudnn_actor.trials.measure import percentile

__all__ = ["recovery_row", "sheets"]

_RATE, _SLOWER = 0.9, 2.0
_WITHIN_MS = {"SIGKILL, with standby": 10.0, "SIGKILL, without": 60.0}
_WITHIN_MS |= {"sticky error, with standby": 10.0, "sticky error, without": 60.0}

Measure = Callable[[Side], list[float]]


def sheets(report: Report) -> Iterator[Sheet]:
    """All tables; none if the run has not measured the isolations."""
    for loop, rows in itertools.groupby(report.sides, key=lambda side: side.loop):
        yield _side_by_side(loop, list(rows))
    if report.sides:
        yield _aims(report.sides)
    if report.moves is not None:
        yield _moves(report.moves)
    if report.recovery_ms:
        yield _recovery(report.recovery_ms)
    if report.idle:
        yield _idle(report.idle)


# What a request costs.


def _p50(side: Side) -> list[float]:
    return [timing.p50_us for timing in side.one]


def _p99(side: Side) -> list[float]:
    return [timing.p99_us for timing in side.one]


def _per_s(in_flight: int) -> Measure:
    return lambda side: side.per_s.get(in_flight, [])


def _side_by_side(loop: str, rows: list[Side]) -> Sheet:
    cells: list[tuple[str, ...]] = []
    for subject, pair in _pairs(rows):
        cells += [_side(side) for side in pair.values()]
        if len(pair) == len(ISOLATIONS):
            cells.append(_ratios(subject, pair))
    rates = (f"{n}: k/s" for n in SIDES_IN_FLIGHT)
    return Sheet(
        f"Isolations side by side, {loop}",
        ("request", "p50 µs", "p99 µs", *rates, "CPU µs: loop", "worker"),
        tuple(cells),
        "p50 and p99: the latency of one request at a time. 8, 64 and 256: thousands of requests a second, "
        "with so many in flight. CPU: the time that a request takes, with 64 in flight, of the loop's "
        "thread, and of the actor's thread or of the whole worker process. A ratio is process over thread, "
        "the median of the ratios of the rounds.",
    )


def _pairs(rows: list[Side]) -> Iterator[tuple[str, dict[str, Side]]]:
    for subject in dict.fromkeys(side.subject for side in rows):
        yield subject, {side.isolation: side for side in rows if side.subject == subject}


def _side(side: Side) -> tuple[str, ...]:
    rates = ((median(side.per_s.get(n, [])) or 0.0) / 1e3 for n in SIDES_IN_FLIGHT)
    cpu = (median(side.loop_cpu_us), median(side.worker_cpu_us))
    figures = (median(_p50(side)), median(_p99(side)), *rates, *cpu)
    return (f"{_short(side.subject)}, {side.isolation}", *(number(figure) for figure in figures))


def _ratios(subject: str, pair: dict[str, Side]) -> tuple[str, ...]:
    measures: tuple[Measure, ...] = (_p50, _p99, *(_per_s(n) for n in SIDES_IN_FLIGHT))
    measures += (lambda side: side.loop_cpu_us, lambda side: side.worker_cpu_us)
    return (
        f"{_short(subject)}, ratio",
        *(number(_process_over_thread(pair, measure), 2) for measure in measures),
    )


def _short(subject: str) -> str:
    """A shorter name, so that a row fits on a terminal."""
    return subject.removeprefix("trivial ")


def _process_over_thread(pair: dict[str, Side], measure: Measure) -> float | None:
    return ratio(measure(pair["process"]), measure(pair["thread"])) if len(pair) == len(ISOLATIONS) else None


def _aims(sides: list[Side]) -> Sheet:
    loops = list(dict.fromkeys(side.loop for side in sides))
    found = {loop: dict(_pairs([side for side in sides if side.loop == loop])) for loop in loops}
    rows = []
    for subject in dict.fromkeys(side.subject for side in sides):
        pairs = [found[loop].get(subject, {}) for loop in loops]
        rates = [verdict(_process_over_thread(pair, _per_s(64)), _RATE) for pair in pairs]
        slower = [verdict(_process_over_thread(pair, _p50), _SLOWER, at_least=False) for pair in pairs]
        rows.append((f"{_short(subject)}, 64 in flight: at least {_RATE} × thread's", *rates))
        rows.append((f"{_short(subject)}, one at a time: p50 at most {_SLOWER} ×", *slower))
    return Sheet("What was aimed at of process isolation", ("ratio", *loops), tuple(rows))


# Transfers.


def _moves(moves: Moves) -> Sheet:
    rows = [("np.copyto", _gb_per_s(moves, moves.copy_s), "1.00", *_milliseconds(moves.copy_s))]
    for name, by_isolation in (("upload", moves.up_s), ("download", moves.down_s)):
        for isolation, seconds in by_isolation.items():
            share = number(ratio(moves.copy_s, seconds), 2)
            rows.append((f"{name}, {isolation}", _gb_per_s(moves, seconds), share, *_milliseconds(seconds)))
    return Sheet(
        f"An array of {moves.nbytes >> 20} MiB",
        ("", "GB/s", "of np.copyto's", "median ms", "least"),
        tuple(rows),
        "Into a new buffer of an arena that has been used before, and out of it. The fraction is the median "
        "of the fractions of the rounds.",
    )


def _gb_per_s(moves: Moves, seconds: list[float]) -> str:
    return number(median(moves.nbytes / each / 1e9 for each in seconds))


def _milliseconds(seconds: list[float]) -> tuple[str, str]:
    return number(1e3 * (median(seconds) or 0.0)), number(1e3 * min(seconds, default=0.0))


# Recovery.


def _recovery(found: dict[str, list[float]]) -> Sheet:
    rows = (recovery_row(name, ms, _WITHIN_MS.get(name)) for name, ms in found.items())
    return Sheet(
        "From a worker's end to the next finished request",
        ("", "times", "p50 ms", "p90", "max", "aimed at: p50 ms"),
        tuple(rows),
        "SIGKILL: from the signal to the receipt of a request that is sent at once. Sticky error: from when "
        "the failing request is sent to the receipt of its second run.",
    )


def recovery_row(name: str, ms: list[float], within_ms: float | None) -> tuple[str, ...]:
    """Name, count, percentiles, and the target for the median."""
    ordered = sorted(ms)
    if not ordered:
        return (name, "0", *["–"] * 4)
    p50, p90 = percentile(ordered, 50), percentile(ordered, 90)
    met = "met" if within_ms is not None and p50 < within_ms else "missed"
    aim = "–" if within_ms is None else f"< {within_ms:,.0f} {met}"
    return (name, str(len(ordered)), number(p50), number(p90), number(ordered[-1]), aim)


def _idle(found: dict[str, list[float]]) -> Sheet:
    rows = ((name, number(median(shares), 2), number(max(shares), 2)) for name, shares in found.items())
    return Sheet("A service with nothing to do, % of one core", ("", "median", "most"), tuple(rows))
