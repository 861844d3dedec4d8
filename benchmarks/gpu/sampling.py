"""Where threads spend their time, seen from a third thread many times a second.

No profiler hooks the calls, so short functions look no dearer than they are. What is seen is the wall's time,
waiting included, and a line that lets go of the interpreter's lock (a call into a library, a wait) is seen
more often than one that keeps it: the sampler runs when it gets that lock.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

import msgspec

__all__ = ["Sampled", "sampled"]

_TOP = 25
_EVERY_S = 0.5e-3
_SWITCH_S = 5e-6
"""Shorter than usual, so that the sampler interrupts what computes."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """A function's own share of a thread's samples."""

    function: str
    percent: float
    line: int
    """The one that was seen most often."""


@contextmanager
def sampled(others: Mapping[str, threading.Thread]) -> Iterator[dict[str, list[Sampled]]]:
    """Sample this thread, as "loop", and others during the block; the answer is filled at its end."""
    threads = {"loop": threading.get_ident(), **{name: other.ident or 0 for name, other in others.items()}}
    seen: dict[str, Counter[tuple[str, int]]] = {name: Counter() for name in threads}
    answer: dict[str, list[Sampled]] = {}
    ended = threading.Event()
    sampler = threading.Thread(target=_sample, args=(threads, seen, ended), name="sampler", daemon=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    sampler.start()
    try:
        yield answer
    finally:
        ended.set()
        sampler.join()
        sys.setswitchinterval(interval)
        answer.update({name: _ranked(lines) for name, lines in seen.items()})


def _sample(
    threads: dict[str, int], seen: dict[str, Counter[tuple[str, int]]], ended: threading.Event
) -> None:
    while not ended.wait(_EVERY_S):
        frames = sys._current_frames()
        for name, thread in threads.items():
            frame = frames.get(thread)
            if frame is not None:
                seen[name][_function(frame), _line(frame)] += 1


def _function(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_filename.rsplit('/', 1)[-1]} {code.co_qualname}"


def _line(frame: FrameType) -> int:
    """The line that runs; instructions that the compiler added may have none, and then a function's first."""
    line: int | None = frame.f_lineno
    return frame.f_code.co_firstlineno if line is None else line


def _ranked(lines: Counter[tuple[str, int]]) -> list[Sampled]:
    functions: Counter[str] = Counter()
    for (function, _), count in lines.items():
        functions[function] += count
    return [
        Sampled(
            function=function,
            percent=round(100 * count / lines.total(), 2),
            line=max((seen, line) for (name, line), seen in lines.items() if name == function)[1],
        )
        for function, count in functions.most_common(_TOP)
    ]
