"""Times a process from its start to its first result, with and without plans on disk."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.gpu.first_result import PLAN
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.sheet import Sheet, median, number

__all__ = ["STORES", "Cold", "measure", "sheets"]

STORES = ("no store", "empty store", "filled store")
_LIMIT_S = 120.0
_ROOT = Path(__file__).parents[2]

Steps = dict[str, float]
"""Seconds of each step of a process, in order."""


class Cold(msgspec.Struct, kw_only=True):
    """Processes that were started, from their start to their result on the host."""

    runs: dict[str, list[Steps]] = {}
    """By store; and "steps": those that took the libraries' own steps one by one."""
    errors: dict[str, str] = {}


def measure(setting: Setting) -> Cold:
    """Blocks for half a minute."""
    found = Cold()
    with tempfile.TemporaryDirectory() as filled:
        setting.say("cold start, filling the store")
        _run(setting, ["--plan-store", filled], Cold(), "")
        for _ in range(setting.choose(5, 1)):
            for store in STORES:
                with tempfile.TemporaryDirectory() as empty:
                    folders = {"no store": [], "empty store": [empty], "filled store": [filled]}
                    words = [word for folder in folders[store] for word in ("--plan-store", folder)]
                    _run(setting, words, found, store)
            _run(setting, ["--steps"], found, "steps")
    return found


def _run(setting: Setting, words: list[str], found: Cold, kind: str) -> None:
    """Run one process; none where one of its kind has failed."""
    if kind in found.errors:
        return
    setting.say(f"cold start, {kind or 'filling the store'}")
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu.first_result"]
    command += ["--device", setting.device, "--began", repr(began), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=True, cwd=_ROOT
        )
    except subprocess.SubprocessError as error:
        output = getattr(error, "stderr", None) or str(error)
        found.errors[kind] = output.strip().splitlines()[-1]
        return
    marks = msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, float])
    times = itertools.pairwise([0.0, *marks.values()])
    steps = {name: after - before for name, (before, after) in zip(marks, times, strict=True)}
    found.runs.setdefault(kind, []).append(steps)


def sheets(found: Cold) -> Iterator[Sheet]:
    """The tables, by store and step by step."""
    rows = []
    for store in STORES:
        took = [sum(steps.values()) for steps in found.runs.get(store, [])]
        if took:
            first_plan = median(steps[PLAN] for steps in found.runs[store]) or 0.0
            seconds = (median(took), min(took), max(took))
            rows.append((store, *(number(value, 2) for value in seconds), number(1e3 * first_plan, 0)))
    yield Sheet(
        "Cold start: from the start of a process to its first result",
        ("", "s", "least", "most", "first plan: ms"),
        tuple(rows),
    )
    for kind, title in (
        ("steps", "the libraries' own steps first"),
        ("no store", "as the service takes them"),
    ):
        if kind in found.runs:
            yield _steps_sheet(found.runs[kind], title)
    if found.errors:
        lines = tuple((kind, text[:70]) for kind, text in found.errors.items())
        yield Sheet("Cold starts that failed", ("", "error"), lines)


def _steps_sheet(runs: list[Steps], title: str) -> Sheet:
    rows = tuple((name, number(1e3 * (median(steps[name] for steps in runs) or 0.0), 0)) for name in runs[0])
    return Sheet(f"Cold start without a store, {title}", ("step", "ms"), rows)
