"""The harness of the command: its threads, and how it ends in every case.

The run's first event loop has its own thread. The main thread, the only one that signals interrupt, is
a caller under alarms, or waits. A watchdog reports what waits for what, and ends a run that does not end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from cudnn_actor.cli.user_error import UserError
from cudnn_actor.models import InvalidModel, UnsupportedModel
from cudnn_actor.processes.launching import close_launchers
from cudnn_actor.protocol import InvalidRequest
from cudnn_actor.trials.chaos import processes
from cudnn_actor.trials.chaos.crowd import run_under_alarms
from cudnn_actor.trials.chaos.load import Ground
from cudnn_actor.trials.chaos.load_kinds import LoadKind
from cudnn_actor.trials.chaos.one_run import Interrupted, Outcome, run_once
from cudnn_actor.trials.chaos.report import Report, report_of
from cudnn_actor.trials.chaos.settings import Settings
from cudnn_actor.trials.chaos.strikes import injected_errors
from cudnn_actor.trials.chaos.tally import Tally
from cudnn_actor.trials.chaos.watchdog import Watchdog

__all__ = ["Harness"]

_AROUND_S = 240.0
"""Time in addition to load and deadline: two starts, the plans, the last answers and the stop, each at
most."""
_LAST_S = 15.0
"""Seconds within which the processes that the service leaves to the interpreter's exit must have ended."""
_LOOK_S = 0.1
_INTERRUPTED = 130


class Harness:
    """One run of the command.

    Parameters
    ----------
    settings
        The settings.
    console
        Where the progress is shown.
    finish
        Called with the report.
    """

    def __init__(self, settings: Settings, console: Console, finish: Callable[[Report], None]) -> None:
        self._settings = settings
        self._console = console
        self._finish = finish
        self._tally = Tally(injected_errors(settings))
        self._ending = threading.Event()
        self._began_s = time.monotonic()
        self._interrupted = False
        self._alarms = 0
        self._ground: Ground | None = None
        self._news = threading.Event()
        """Set when the load begins, and when the run is over."""
        self._over = threading.Event()
        self._result: Outcome | Exception | None = None
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.completed:>4.0f} of {task.total:g} s"),
            BarColumn(bar_width=20),
            TextColumn("[cyan]{task.fields[rate]:>8,.0f}/s[/]  faults {task.fields[faults]:<4}"),
            TextColumn("lost {task.fields[lost]}  wrong {task.fields[wrong]}"),
            console=console,
            transient=True,
        )
        self._bar = self._progress.add_task(
            "chaos", total=settings.seconds, rate=0.0, faults=0, lost=0, wrong=0
        )

    def run(self) -> int:
        """Run, report, and return the exit status. On the main thread. Raises as `chaos.run` does."""
        settings = self._settings
        limit_s = settings.seconds + settings.deadline_s + _AROUND_S
        with self._told_of_interrupts(), Watchdog(self._tally, limit_s, self._give_up):
            with self._progress:
                self._announce()
                threading.Thread(target=self._run_trial, name="chaos", daemon=True).start()
                self._be_a_caller()
                _wait_for(self._over)
            return self._close_and_report()

    def _announce(self) -> None:
        faults, load = (", ".join(kinds) or "none" for kinds in (self._settings.faults, self._settings.load))
        print_ = self._console.print
        print_(f"[bold]cudnn-actor chaos[/] seed {self._settings.seed}, faults: {faults}", soft_wrap=True)
        print_(f"load: {load}", soft_wrap=True)

    # The run's own thread.

    def _run_trial(self) -> None:
        try:
            asyncio.run(self._trial())
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self._end_with(error)

    async def _trial(self) -> None:
        outcome = await run_once(
            self._settings, self._tally, self._ending, show=self._show, ready=self._note_ready
        )
        self._end_with(outcome)  # now, since a loop with tasks that do not end takes long to close

    def _end_with(self, result: Outcome | Exception) -> None:
        if self._result is None:
            self._result = result
        self._news.set()
        self._over.set()

    def _note_ready(self, ground: Ground) -> None:
        took_s = time.monotonic() - self._began_s
        self._console.print(f"the load begins: the service has started and is warm after {took_s:.1f} s")
        if LoadKind.ALARMS in self._settings.load:
            ground.others.add("main")
            self._ground = ground
        self._news.set()

    def _show(self) -> None:
        tally, settings = self._tally, self._settings
        now = tally.now_s
        self._progress.update(
            self._bar,
            completed=min(now, settings.seconds),
            rate=tally.finished / now,
            faults=len(tally.faults),
            lost=tally.overdue(settings.deadline_s),
            wrong=tally.wrong,
        )

    # The main thread.

    def _be_a_caller(self) -> None:
        _wait_for(self._news)
        if (ground := self._ground) is not None:
            try:
                self._alarms = run_under_alarms(ground, self._settings)
            finally:
                ground.others.discard("main")

    @contextlib.contextmanager
    def _told_of_interrupts(self) -> Iterator[None]:
        """The first Ctrl-C ends the load early, and the results are reported; the second ends the process."""
        before = signal.getsignal(signal.SIGINT)
        if before in (signal.SIG_IGN, None):  # a background job: it stays ignored
            yield
            return
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._interrupted:
            self._exit(_INTERRUPTED)
        self._interrupted = True
        self._ending.set()

    def _close_and_report(self) -> int:
        """End what is left of the run, and report it. Returns the exit status. Raises `UserError`."""
        result = self._result
        closing = threading.Thread(target=close_launchers, name="chaos-closing", daemon=True)
        closing.start()
        closing.join(_LAST_S)
        left = processes.end_all()
        if isinstance(result, Interrupted):
            return _INTERRUPTED
        if isinstance(result, (InvalidRequest, InvalidModel, UnsupportedModel, ImportError)):
            raise UserError(str(result)) from result
        if isinstance(result, Exception):
            raise result
        assert result is not None
        words = [f"{each.role} {each.pid} was still there" for each in left]
        result = result._replace(stuck=(*result.stuck, *words))
        report = self._report(result)
        self._finish(report)
        status = _INTERRUPTED if self._interrupted else int(not report.good)
        if closing.is_alive() or result.stuck:  # the interpreter's own exit might wait for it
            self._exit(status)
        return status

    def _report(self, outcome: Outcome) -> Report:
        return report_of(self._settings, self._tally, outcome, alarms=self._alarms)

    # Ending at once.

    def _give_up(self) -> None:
        """Report the results so far and end this process: the run has not ended. On the watchdog's thread."""
        self._progress.stop()
        lost, seconds = self._tally.lost_requests(), self._tally.now_s
        stuck = ("the run did not end",)
        outcome = Outcome(self._settings.engine, lost, {}, None, "", seconds, stuck)
        try:
            self._finish(self._report(outcome))
        finally:
            self._exit(1)

    def _exit(self, status: int) -> None:
        with contextlib.suppress(Exception):
            self._console.show_cursor(True)
            processes.end_all()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        os._exit(status)


def _wait_for(event: threading.Event) -> None:
    """Wait in short intervals, so that Ctrl-C is handled meanwhile.

    A signal interrupts a wait in progress. It does not interrupt a wait that begins just after the signal, or
    when the kernel delivers the signal to another thread: its handler would run only after the wait.
    """
    while not event.wait(_LOOK_S):
        pass
