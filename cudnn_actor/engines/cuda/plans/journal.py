"""What was being checked when a process died of it: so that the next one does not try it again."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Journal"]

_KNOBS = re.compile(r"_k\d+=-?\d+")


class Journal:
    """A file with a line for each plan whose self-check has begun, and another one for each that has ended.

    Plans that differ in their knobs alone count as one: cuDNN often offers an engine for a graph with several
    settings of its knobs, one after the other, and what killed the process is mostly wrong with all of them.

    One process writes it at a time: a child that builds plans, then its successor. A line is one write, so
    a death leaves whole lines, and the plan that was its cause as the one without an end.

    Parameters
    ----------
    path
        The file, which need not be there yet; None to note nothing.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._killed: set[str] | None = None

    def killed(self, plan: str) -> bool:
        """Whether a self-check of the plan of that tag was never ended, by a process before this one."""
        if self._killed is None:
            self._killed = {_KNOBS.sub("", tag) for tag in self._left_open()}
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

    def _left_open(self) -> set[str]:
        if self._path is None or not self._path.exists():
            return set()
        left: set[str] = set()
        for line in self._path.read_text(encoding="utf-8").splitlines():
            what, _, plan = line.partition(" ")
            (left.add if what == "begin" else left.discard)(plan)
        return left
