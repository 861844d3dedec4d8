"""In a clone that has no compiled tests yet, the processes of pytest-xdist share the compiling of them.

Each process collects all tests, and all of them begin at the same time, in the same order. So each would
compile every test, and rewrite its assertions, as the others do at that moment, which takes nine seconds.
Instead, a process first imports a share of the tests. When it collects the rest, it finds what the others
have compiled.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from .left_out import left_out

__all__ = ["FOLDERS_OF_MARKERS", "import_share", "own_share", "share"]

FOLDERS_OF_MARKERS = ("gpu", "support")
"""Folders of tests that all have a marker, which has the folder's name."""
HERE = Path(__file__).parent


def import_share(config: pytest.Config) -> None:
    """Import this process' share of the tests that it is to collect.

    What cannot be imported is left to pytest, which imports it again and reports why.
    """
    for name in own_share(config):
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


def own_share(config: pytest.Config) -> list[str]:
    """The names of modules that this process imports first: none if it is not one of pytest-xdist's."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return []
    files = _files(config.invocation_params.dir / word.split("::")[0] for word in config.args)
    run = [file for file in files if not _is_left_out(file, config.option.markexpr)]
    ours = share(run, int(worker["workerid"].removeprefix("gw")), worker["workercount"])
    return [".".join(file.relative_to(HERE.parent).with_suffix("").parts) for file in ours]


def share(files: Sequence[Path], number: int, count: int) -> list[Path]:
    """The share of one of `count` processes: files that follow each other, of about as many bytes as others'.

    Tests of one folder import the same modules beside them, which are compiled once then, too.
    """
    ends = [*itertools.accumulate(file.stat().st_size for file in files)]
    return [file for file, end in zip(files, ends, strict=True) if (end - 1) * count // ends[-1] == number]


def _files(places: Iterable[Path]) -> list[Path]:
    """The files of tests of this folder that pytest finds at these places."""
    found = {file for place in places for file in ([place] if place.is_file() else place.rglob("test_*.py"))}
    return sorted(file for file in found if file.is_relative_to(HERE) and file.match("test_*.py"))


def _is_left_out(file: Path, expression: str) -> bool:
    folder = file.relative_to(HERE).parts[0]
    return folder in FOLDERS_OF_MARKERS and left_out(folder, expression)
