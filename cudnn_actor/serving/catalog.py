"""The models that the server has by name: which version serves, and why others do not.

A name's version is replaced in one step, once its successor is warm; runs of the old one finish on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cudnn_actor.actors.logs import Log
from cudnn_actor.models import Model
from cudnn_actor.protocol.errors import CudnnActorError
from cudnn_actor.serving.failures import require_known, require_version
from cudnn_actor.serving.served import Served
from cudnn_actor.serving.statistics import ModelCounts

__all__ = ["Catalog", "Entry", "Lend", "Origin", "Retire"]

log = Log("cudnn_actor")


@dataclass(frozen=True)
class Origin:
    """The file of a version of a model, and what tells whether it has changed since."""

    path: Path
    version: str
    stamp: tuple[int, ...] = ()


Load = Callable[[str, Origin], Coroutine[Any, Any, Served]]
Lend = Callable[[str, Model | None], None]
Retire = Callable[[Served], Coroutine[Any, Any, None]]


@dataclass
class Entry:
    """A model that the server knows by name.

    Parameters
    ----------
    name
        Its name.
    origin
        What it was last loaded from, or failed to load from.
    served
        The version that answers; None for none.
    reason
        Why there is none, or why the last one could not be loaded; "" without a reason.
    loading
        Whether one is being loaded.
    wanted
        Whether it is to serve: not after it was unloaded.
    """

    name: str
    origin: Origin
    served: Served | None = None
    reason: str = ""
    loading: bool = False
    wanted: bool = True
    counts: ModelCounts = field(default_factory=ModelCounts)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def state(self) -> str:
        """The protocol's word for it."""
        if self.served is not None:
            return "READY"
        return "LOADING" if self.loading else "UNAVAILABLE"


class Catalog:
    """The models by name.

    Parameters
    ----------
    load
        Loads and warms the model of a file, which is served under a name. Raises `CudnnActorError`.
    changed
        Called when what serves under a name, or its state, has changed. None if nothing is to be called.
    retire
        Awaited with a version that serves no more, before it is closed. None if nothing is to be awaited.
    lend
        Called with a name and the model that serves under it from now on; the model is None if no model does.
        None if nothing is to be called.
    """

    def __init__(
        self,
        load: Load,
        lend: Lend | None = None,
        *,
        changed: Callable[[], None] | None = None,
        retire: Retire | None = None,
    ) -> None:
        self._load = load
        self._lend: Lend = lend or _lend_nothing
        self._changed: Callable[[], None] = changed or _nothing
        self._retire: Retire | None = retire
        self._entries: dict[str, Entry] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def entries(self) -> Iterable[Entry]:
        """All models, by name."""
        return [self._entries[name] for name in sorted(self._entries)]

    def entry(self, name: str) -> Entry:
        """A model. Raises `NotServed` if there is none of that name."""
        return require_known(name, self._entries.get(name))

    def served(self, name: str, version: str = "") -> tuple[Entry, Served]:
        """A model and the version that answers for it. Raises `NotServed`."""
        entry = self.entry(name)
        return entry, require_version(name, entry.served, version, loading=entry.loading)

    def add(self, name: str, origin: Origin) -> Entry:
        """Have a model of a name, which is not loaded yet; the one that there is, if there is one."""
        return self._entries.setdefault(name, Entry(name, origin))

    async def load(self, name: str, origin: Origin | None = None) -> None:
        """Load a model, anew if it is loaded, and switch to it once it is warm.

        `origin`: its file; the one it had unless given. Raises `NotServed`, and as `CudnnRef.load`: then what
        served goes on.
        """
        entry = self.entry(name)
        async with entry.lock:
            entry.wanted, entry.loading = True, True
            entry.origin = origin or entry.origin
            self._changed()
            try:
                served = await self._load(name, entry.origin)
            except CudnnActorError as error:
                entry.reason = str(error)
                log.warning("serving.load_failed", model=name, path=str(entry.origin.path), error=str(error))
                raise
            finally:
                entry.loading = False
                self._changed()
            served.count_in(entry.counts)
            before, entry.served, entry.reason = entry.served, served, ""
            self._lend(name, served.model)
            self._changed()
            log.info("serving.loaded", model=name, version=served.version)
            self._end(before)

    async def unload(self, name: str) -> None:
        """Serve a model no more. Its runs finish first. Raises `NotServed` for an unknown one."""
        entry = self.entry(name)
        async with entry.lock:
            entry.wanted = False
            before, entry.served, entry.reason = entry.served, None, "unloaded"
            self._lend(name, None)
            self._changed()
            self._end(before)

    def remove(self, name: str) -> None:
        """Forget a model whose file has gone."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            before, entry.served = entry.served, None
            self._lend(name, None)
            self._changed()
            self._end(before)

    def _end(self, served: Served | None) -> None:
        """Close a version behind, once its runs have finished."""
        if served is not None:
            task = asyncio.get_running_loop().create_task(self._close(served))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _close(self, served: Served) -> None:
        if self._retire is not None:
            await self._retire(served)
        await served.close()

    async def close(self) -> None:
        """Wait until every run has finished, and free all models."""
        for name in list(self._entries):
            self.remove(name)
        if self._ending:
            await asyncio.gather(*self._ending, return_exceptions=True)


def _nothing() -> None:
    pass


def _lend_nothing(_name: str, _model: Model | None) -> None:
    pass
