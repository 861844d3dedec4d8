"""Records which plan was being checked when a process died, so that the next process does not run it."""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Journal"]

_KNOBS = re.compile(r"_k\d+=-?\d+")
_HELD = 4
"""For how many processes one unfinished check excludes its plan."""


class Journal:
    """A file with one line for each process, and for each begin and end of a plan's self-check.

    If a check has begun but not ended, its plan is assumed to have killed the process. The process may also
    have died of something else meanwhile, so one unfinished check excludes the plan for the next four
    processes only; two exclude it for good. Plans that differ only in their knobs count as one: cuDNN often
    offers an engine for a graph with several settings of its knobs, one after the other, and a fault that
    kills the process usually affects all of them.

    One process at a time writes the file: a service's builder process, then its successor. Each line is a
    single write, so a crash leaves no partial line.

    Parameters
    ----------
    path
        The file, which need not exist yet; None to record nothing.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._killed: set[str] | None = None
        self._file: tuple[int, weakref.finalize[..., Journal]] | None = None
        """The open file: its descriptor, and the function that closes it."""

    def may_kill(self, plan: str) -> bool:
        """Whether the plan with that tag must not run, because its self-check may have killed a process."""
        if self._killed is None:
            self._killed = self._killers()
            self._note("process", "")
        return _KNOBS.sub("", plan) in self._killed

    @contextlib.contextmanager
    def trying(self, plan: str) -> Iterator[None]:
        """Record the check in the `with` body. If it raises, no end is recorded: the context may be dead."""
        self._note("begin", plan)
        yield
        self._note("end", plan)

    def _note(self, event: str, plan: str) -> None:
        if self._path is not None:
            os.write(self._open_file(self._path), f"{event} {plan}\n".encode())

    def _open_file(self, path: Path) -> int:
        """Returns the file's descriptor. It stays open: a build of a network notes dozens of checks.

        It is opened anew if the file has been removed, as files in folders for temporary ones may be.
        """
        if self._file is not None and not os.fstat(self._file[0]).st_nlink:
            self.close()
        if self._file is None:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            self._file = descriptor, weakref.finalize(self, os.close, descriptor)
        return self._file[0]

    def close(self) -> None:
        """Close the file. A check that is noted later opens it anew. Safe to call twice."""
        file, self._file = self._file, None
        if file is not None:
            _, close = file
            close()

    def _killers(self) -> set[str]:
        """The plans that must not run, by the lines of earlier processes."""
        if self._path is None or not self._path.exists():
            return set()
        processes, in_work = 0, ""
        left_open: defaultdict[str, list[int]] = defaultdict(list)
        """The numbers of the processes in which a plan's check has not ended, by plan."""
        for line in self._path.read_text(encoding="utf-8").splitlines():
            event, _, plan = line.partition(" ")
            plan = _KNOBS.sub("", plan)
            if in_work and (event, plan) != ("end", in_work):
                left_open[in_work].append(processes)
            in_work = plan if event == "begin" else ""
            processes += event == "process"
        if in_work:
            left_open[in_work].append(processes)
        return {
            plan for plan, deaths in left_open.items() if len(deaths) > 1 or deaths[0] > processes - _HELD
        }
