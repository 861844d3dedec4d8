"""What was being checked when a process died of it: so that the next one does not try it again."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Journal"]

_KNOBS = re.compile(r"_k\d+=-?\d+")
_HELD = 4


class Journal:
    """A file with a line for each process, for each plan whose self-check has begun, and for its end.

    A plan has killed a process if its check has not ended. The check may also have been cut short by a death
    that it did not cause, so once is held against it for the next four processes, and twice for good. Plans
    that differ in their knobs alone count as one: cuDNN often
    offers an engine for a graph with several settings of its knobs, one after the other, and what killed the
    process is mostly wrong with all of them.

    One process writes it at a time: a service's builder process, then its successor. A line is one write, so
    a death leaves whole lines.

    Parameters
    ----------
    path
        The file, which need not be there yet; None to note nothing.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._killed: set[str] | None = None

    def killed(self, plan: str) -> bool:
        """Whether a self-check of the plan of that tag has killed a process before this one."""
        if self._killed is None:
            self._killed = self._killers()
            self._note("process", "")
        return _KNOBS.sub("", plan) in self._killed

    @contextlib.contextmanager
    def trying(self, plan: str) -> Iterator[None]:
        """A check. One that an error leaves has not ended: what it raised may be the end of the context."""
        self._note("begin", plan)
        yield
        self._note("end", plan)

    def _note(self, what: str, plan: str) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{what} {plan}\n")

    def _killers(self) -> set[str]:
        if self._path is None or not self._path.exists():
            return set()
        processes, in_work = 0, ""
        left_open: defaultdict[str, list[int]] = defaultdict(list)
        """In which processes, by number, the checks of a plan have not ended."""
        for line in self._path.read_text(encoding="utf-8").splitlines():
            what, _, plan = line.partition(" ")
            plan = _KNOBS.sub("", plan)
            if in_work and (what, plan) != ("end", in_work):
                left_open[in_work].append(processes)
            in_work = plan if what == "begin" else ""
            processes += what == "process"
        if in_work:
            left_open[in_work].append(processes)
        return {
            plan for plan, deaths in left_open.items() if len(deaths) > 1 or deaths[0] > processes - _HELD
        }
