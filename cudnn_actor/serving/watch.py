"""Watches the repository: a folder of `NAME/VERSION/model.onnx`.

The highest version of each name serves. A file that is new or has changed is loaded once two looks in
succession find it the same: a file that is still being copied changes. Files of weights beside the model
count as parts of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
from collections.abc import Collection, Iterator
from operator import attrgetter
from pathlib import Path

from cudnn_actor.actors.logs import Log
from cudnn_actor.protocol.errors import CudnnActorError
from cudnn_actor.serving.catalog import Catalog, Origin, Stamp

__all__ = ["Watch", "found_models"]

log = Log("cudnn_actor")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_NAME_OF = attrgetter("name")
_MODEL = "model.onnx"
_MOST_FILES = 10_000
"""How many files of a version are looked at."""


def found_models(folder: Path) -> dict[str, Origin]:
    """The highest version of each model in a folder, by name. Raises `OSError` if it cannot be read."""
    found = {}
    for of_model in sorted(folder.iterdir()):
        if _NAME.fullmatch(of_model.name) and of_model.is_dir():
            versions = [each.name for each in of_model.iterdir() if _VERSION.fullmatch(each.name)]
            having = [each for each in versions if (of_model / each / _MODEL).is_file()]
            if having:
                highest = max(having, key=int)
                path = of_model / highest / _MODEL
                found[of_model.name] = Origin(path, highest, _stamp(path.parent))
    return found


def _stamp(folder: Path) -> Stamp:
    """A stamp that changes when a version's files do.

    Files of weights may have any names, and lie in folders of their own. So all files count but hidden ones,
    such as editors make.
    """
    stamp = []
    for file in itertools.islice(_files_in(folder), _MOST_FILES):
        with contextlib.suppress(OSError):  # it has gone since, or is a link to nothing
            found = file.stat()
            stamp.append((os.fspath(file), found.st_ino, found.st_size, found.st_mtime_ns))
    return tuple(stamp)


def _files_in(folder: Path) -> Iterator[Path | os.DirEntry[str]]:
    """The files of a version: the model and its settings, then all files, also in folders within.

    `os.scandir` takes less than half the time of `Path.iterdir` for each file, once a second.
    """
    yield from (folder / _MODEL, folder / "model.toml")
    whole = folder.resolve()
    folders, seen = [os.fspath(folder)], {whole}
    for each in folders:
        with contextlib.suppress(OSError), os.scandir(each) as entries:
            for entry in sorted(entries, key=_NAME_OF):
                if entry.name.startswith("."):
                    continue
                if not _is_folder(entry):
                    yield entry
                elif (real := Path(entry.path).resolve()) not in seen and real.is_relative_to(whole):
                    seen.add(real)
                    folders.append(entry.path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, for example
        return False


class Watch:
    """Loads and unloads a catalog's models as the files of its repository come, change and go.

    Parameters
    ----------
    catalog
        The models.
    folder
        The repository.
    taken
        Names that belong to models from elsewhere; folders of these names are ignored.
    """

    def __init__(self, catalog: Catalog, folder: Path, *, taken: Collection[str] = ()) -> None:
        self._catalog = catalog
        self._folder = folder
        self._taken = frozenset(taken)
        self._before: dict[str, Origin] = {}
        self._mine: set[str] = set()

    async def look(self, *, at_once: bool = False) -> None:
        """Look once. Load each model whose file is new or has changed, once two looks in succession have
        found the same file; with `at_once`, at this look. Errors of loads are logged.

        Raises `OSError` if the folder cannot be read.
        """
        found = await asyncio.to_thread(found_models, self._folder)
        before, self._before = self._before, found
        for name in self._mine - found.keys():
            self._mine.discard(name)
            self._catalog.remove(name)
        for name, origin in found.items():
            if name in self._taken or not (at_once or before.get(name) == origin):
                continue
            new = name not in self._mine
            self._mine.add(name)
            entry = self._catalog.add(name, origin)
            if new or (entry.wanted and entry.origin != origin):
                await self._load(name, origin)

    async def _load(self, name: str, origin: Origin) -> None:
        # The catalog logs the error, and its index shows it. The next change of the file causes another
        # attempt.
        with contextlib.suppress(CudnnActorError):
            await self._catalog.load(name, origin)

    async def keep_looking(self, every_s: float) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.look()
            except OSError as error:
                log.warning("serving.repository_unreadable", path=str(self._folder), error=str(error))
            except Exception as error:  # noqa: BLE001 - it must not end without a word; the next look may succeed
                log.warning("serving.look_failed", path=str(self._folder), error=repr(error))
