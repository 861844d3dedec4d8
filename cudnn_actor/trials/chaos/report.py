"""The report of a run: tables, and a record from which the tables can be made again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cudnn_actor.trials.bench.record import machine, now, versions
from cudnn_actor.trials.chaos.faults import FaultKind
from cudnn_actor.trials.chaos.load_kinds import LoadKind
from cudnn_actor.trials.chaos.one_run import Outcome
from cudnn_actor.trials.chaos.settings import STALL_S, Settings
from cudnn_actor.trials.chaos.tally import (
    BIN_S,
    InjectedFault,
    Life,
    LostRequest,
    Recovery,
    Stall,
    Tally,
    WrongAnswer,
)
from cudnn_actor.trials.measure import percentile

__all__ = ["Report", "faults_met", "print_report", "report_of"]

_PACKAGES = ("cudnn-actor", "numpy", "pykka", "msgspec", "cupy-cuda13x", "nvidia-cudnn-frontend")
_IDLE_S = 0.5
"""A life that lasts longer than this should have answered a request."""
_SHOWN = 10
"""The most wrong answers and lost requests that are printed; the record has more."""


class RecoveryTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long after faults of a kind the service answered again, in milliseconds."""

    faults: int
    over: int
    """The number of faults after which it has answered; the times are for these."""
    p50_ms: float | None
    p90_ms: float | None
    max_ms: float | None


class LifeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long incarnations served, in seconds, and how soon they answered, in milliseconds."""

    lives: int
    served_s: float
    """All of them together."""
    p50_s: float
    idle: int
    """How many incarnations lasted over half a second and answered nothing."""
    first_p50_ms: float | None
    first_p90_ms: float | None
    first_max_ms: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    date: str
    device: str
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: Settings
    seconds: float
    stopped: str
    counts: dict[str, int]
    errors: dict[str, int]
    events: dict[str, int]
    injected: dict[str, int]
    recovery: dict[FaultKind, RecoveryTimes]
    faults: list[InjectedFault]
    recoveries: list[Recovery]
    life: LifeTimes
    lives: list[Life]
    bin_s: float
    finished: list[int]
    """Requests finished in each interval of `bin_s` since the load began."""
    lost: list[LostRequest]
    wrong: list[WrongAnswer]
    stalls: list[Stall]
    """Requests that took longer than `settings.STALL_S`."""
    longest_s: float
    senders: dict[LoadKind, int]
    """Requests by kind of sender."""
    messages: dict[str, int]
    """Requests by class of message."""
    alarms: int
    """Calls that an alarm interrupted."""
    stuck: tuple[str, ...]
    """The parts of the run that did not end in time."""
    left_out: tuple[str, ...] = ()
    """Kinds of load that the model does not allow, each with the reason."""

    @property
    def good(self) -> bool:
        """Whether the run shows no fault of the service.

        No request was lost, or stalled, no answer was wrong, the service did not end before its time, and
        all that the run had begun ended in time. The other counts are reported only. Two of them look like
        faults: `unrecovered` counts the last faults of a run, after which nothing was sent any more (what
        does not recover loses requests, or stalls them), and `buffers_left` those whose references were lost
        with a call that an alarm interrupted.
        """
        counts = self.counts
        return not (counts["lost"] or counts["wrong"] or counts["stalls"] or self.stopped or self.stuck)


def report_of(settings: Settings, tally: Tally, outcome: Outcome, *, alarms: int = 0) -> Report:
    """The report of a run that has ended."""
    stalls = tally.stalled_requests()
    return Report(
        date=now(),
        device=outcome.device,
        machine=machine(),
        versions=versions(_PACKAGES),
        settings=msgspec.structs.replace(settings, model=Path(settings.model).name),  # without its folder
        seconds=outcome.seconds,
        stopped=outcome.stopped,
        counts=_counts(tally, outcome, len(stalls)),
        errors=dict(tally.outcomes),
        events=dict(tally.events),
        injected=outcome.injected,
        recovery={kind: _times(kind, tally) for kind in settings.faults},
        faults=tally.faults,
        recoveries=tally.recoveries,
        life=_life(tally.lives()),
        lives=tally.lives(),
        bin_s=BIN_S,
        finished=[tally.bins[place] for place in range(max(tally.bins, default=0) + 1)],
        lost=outcome.lost,
        wrong=tally.wrongs,
        stalls=stalls,
        longest_s=max([tally.longest_s, *(stall.took_s for stall in stalls)]),
        senders=dict(tally.senders),
        messages=dict(tally.messages),
        alarms=alarms,
        stuck=outcome.stuck,
        left_out=outcome.left_out,
    )


def _counts(tally: Tally, outcome: Outcome, stalls: int) -> dict[str, int]:
    errors, statistics = tally.outcomes, outcome.statistics
    return {
        "requests": tally.requests,
        "answered": tally.ended_requests,
        "finished": tally.finished,
        "lost": len(outcome.lost),
        "wrong": tally.wrong,
        "stalls": stalls,
        "retried": 0 if statistics is None else statistics.replayed,
        "outcome_unknown": errors["OutcomeUnknown"],
        "quarantined": errors["QuarantinedRequest"],
        "elsewhere": tally.elsewhere,
        "server_killed": errors["ServiceStopped"],
        "stale": errors["StaleBufferError"],
        "impure": tally.impure.total(),
        "impure_applied": tally.impure["applied"],
        "impure_unknown": tally.impure["OutcomeUnknown"],
        "torn": tally.torn,
        "cancelled": errors["CancelledError"],
        "deadline": errors["DeadlineExceeded"],
        "alarmed": errors["Alarmed"],
        "injected_errors": errors["ExecutionFailed"] + errors["OutOfMemory"],
        "faults": len(tally.faults),
        "unrecovered": tally.unrecovered_faults,
        "restarts": tally.events["Restarting"],
        "buffers_left": 0 if statistics is None else statistics.live_buffers,
    }


def _times(kind: FaultKind, tally: Tally) -> RecoveryTimes:
    took = sorted(1e3 * recovery.took_s for recovery in tally.recoveries if recovery.kind is kind)
    p50, p90, longest = (percentile(took, 50), percentile(took, 90), took[-1]) if took else (None,) * 3
    faults = sum(fault.kind is kind for fault in tally.faults)
    return RecoveryTimes(faults=faults, over=len(took), p50_ms=p50, p90_ms=p90, max_ms=longest)


def _life(lives: list[Life]) -> LifeTimes:
    first = sorted(1e3 * life.first_s for life in lives if life.first_s is not None)
    p50, p90, longest = (percentile(first, 50), percentile(first, 90), first[-1]) if first else (None,) * 3
    return LifeTimes(
        lives=len(lives),
        served_s=sum(life.lasted_s for life in lives),
        p50_s=percentile(sorted(life.lasted_s for life in lives), 50),
        idle=sum(life.lasted_s > _IDLE_S and not life.finished for life in lives),
        first_p50_ms=p50,
        first_p90_ms=p90,
        first_max_ms=longest,
    )


_WORDS = {
    "answered": "requests that ended",
    "finished": "  in an answer",
    "cancelled": "  cancelled by their caller",
    "deadline": "  given up after a tiny timeout",
    "alarmed": "  interrupted by an alarm",
    "injected_errors": "  in an injected error",
    "outcome_unknown": "  in OutcomeUnknown",
    "stale": "  in StaleBufferError",
    "quarantined": "  in QuarantinedRequest",
    "elsewhere": "  in an answer of the server that is killed",
    "server_killed": "  in ServiceStopped: their server was killed",
    "impure": "requests that read what they write",
    "impure_applied": "  applied once, as what they wrote shows",
    "impure_unknown": "  in OutcomeUnknown, what they wrote torn",
    "torn": "buffers torn by crashes",
    "retried": "requests run again after a crash",
    "restarts": "restarts",
    "buffers_left": "buffers left by interrupted calls",
    "lost": "lost",
    "wrong": "wrong",
    "stalls": f"stalled for over {STALL_S:g} s",
}


def print_report(report: Report, console: Console) -> None:
    """Print the tables, and every failure."""
    console.print(_count_table(report))
    if report.recovery:
        console.print(_recovery_table(report))
    console.print(_life_words(report.life), soft_wrap=True)
    console.print(f"sent by {_numbers(report.senders)}", soft_wrap=True)
    console.print(f"sent: {_numbers(report.messages)}", soft_wrap=True)
    for lost in report.lost[:_SHOWN]:
        where = f"{lost.sender} task {lost.task}, burst {lost.burst}, sent after {lost.sent_s:.2f} s"
        console.print(f"[red]lost[/]: {escape(lost.request)} ({where})", soft_wrap=True)
    for wrong in report.wrong[:_SHOWN]:
        where = f"seed {report.settings.seed}, task {wrong.task}, burst {wrong.burst}"
        console.print(f"[red]wrong[/]: {escape(wrong.request)} ({where})", soft_wrap=True)
        console.print(f"  expected {escape(wrong.expected)}", soft_wrap=True)
        console.print(f"  got      {escape(wrong.got)}", soft_wrap=True)
        for line in wrong.story:
            console.print(f"  [dim]before   {escape(line)}[/]", soft_wrap=True)
    for stall in report.stalls[:_SHOWN]:
        where = f"{stall.sender} task {stall.task}, burst {stall.burst}, sent after {stall.sent_s:.2f} s"
        met = _numbers(faults_met(report, stall)) or "no fault of a process"
        words = f"{escape(stall.request)} took {stall.took_s:.1f} s ({where}; it met {met})"
        console.print(f"[red]stalled[/]: {words}", soft_wrap=True)
    if report.stalls:
        fewest = min(sum(faults_met(report, stall).values()) for stall in report.stalls)
        console.print(f"each stalled request met at least {fewest} faults of processes", soft_wrap=True)
    for why in report.left_out:
        console.print(f"[yellow]left out[/]: {escape(why)}", soft_wrap=True)
    for stuck in report.stuck:
        console.print(f"[red]not ended[/]: {escape(stuck)}", soft_wrap=True)
    if report.stopped:
        console.print(f"[red]the service ended before its time[/]: {escape(report.stopped)}", soft_wrap=True)
    console.print(f"[bold]{summary_line(report)}[/]", soft_wrap=True)


def faults_met(report: Report, stall: Stall) -> Counter[str]:
    """The faults of processes, and of starts of them, that came while a request waited, by their kind."""
    until = stall.sent_s + stall.took_s
    return Counter(
        str(fault.kind)
        for fault in report.faults
        if fault.kind not in (FaultKind.FAIL, FaultKind.MEMORY) and stall.sent_s <= fault.at_s <= until
    )


def summary_line(report: Report) -> str:
    """The last line."""
    counts = report.counts
    return (
        f"{counts['answered']:,} requests, {counts['faults']:,} faults: "
        f"lost: {counts['lost']}   wrong: {counts['wrong']}   "
        f"stalls over {STALL_S:g} s: {counts['stalls']}   (the longest took {report.longest_s:.2f} s)"
    )


def _life_words(life: LifeTimes) -> str:
    times = (life.first_p50_ms, life.first_p90_ms, life.first_max_ms)
    first = " / ".join("-" if each is None else f"{each:.1f}" for each in times)
    return (
        f"{life.lives:,} lives, {life.p50_s:.2f} s each (p50), {life.served_s:.1f} s in all; from the"
        f" beginning of a life to its first finished request, p50 / p90 / max: {first} ms; over {_IDLE_S:g} s"
        f" without one: {life.idle}"
    )


def _numbers(counts: Mapping[LoadKind, int] | Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in counts.items())


def _count_table(report: Report) -> Table:
    table = Table(title=f"{report.seconds:.1f} s on {report.device}", title_justify="left", pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("count", justify="right", no_wrap=True)
    for name, words in _WORDS.items():
        count = report.counts[name]
        bad = count and name in ("lost", "wrong", "stalls")
        table.add_row(words, f"[bold red]{count:,}[/]" if bad else f"{count:,}")
    return table


def _recovery_table(report: Report) -> Table:
    title = "From a fault to the next finished request"
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("fault", no_wrap=True)
    for name in ("faults", "p50 ms", "p90 ms", "max ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind, times in report.recovery.items():
        figures = (times.p50_ms, times.p90_ms, times.max_ms)
        table.add_row(
            kind.value, str(times.faults), *("-" if each is None else f"{each:.1f}" for each in figures)
        )
    return table
