"""The models that the server has by name: which version of each serves, or why none does.

A name's version is replaced in one step, once the next version is warm. Runs of the old version finish on it.
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
from cudnn_actor.serving.failures import NotServed, require_known, require_version
from cudnn_actor.serving.served import Served
from cudnn_actor.serving.statistics import ModelCounts
from cudnn_actor.serving.under_way import UnderWay

__all__ = ["Catalog", "Entry", "Lend", "Origin", "Retire", "Stamp"]

log = Log("cudnn_actor")

Stamp = tuple[tuple[str, int, int, int], ...]
"""Of each file of a version: its path, inode, bytes, and the time of its last change in nanoseconds."""


@dataclass(frozen=True)
class Origin:
    """The file of a model's version, and a stamp that changes when the version's files do."""

    path: Path
    version: str
    stamp: Stamp = ()


Load = Callable[[str, Origin], Coroutine[Any, Any, Served]]
Lend = Callable[[str, Model | None], None]
Retire = Callable[[Served], Coroutine[Any, Any, None]]


@dataclass
class Entry:
    """A model that the server knows by name.

    Parameters
    ----------
    name
        The name.
    origin
        The file from which the model was last loaded, or could not be loaded.
    served
        The version that answers; None for none.
    reason
        Why no version answers, or why the last one could not be loaded; "" without a reason.
    loading
        Whether a version is being loaded.
    wanted
        Whether the model is to be served: False after it was unloaded.
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
        """The protocol's word for the model's state."""
        if self.served is not None:
            return "READY"
        return "LOADING" if self.loading else "UNAVAILABLE"


class Catalog:
    """The models by name.

    Parameters
    ----------
    load
        A function that loads and warms a file's model, which is served under a name. It raises
        `CudnnActorError`.
    changed
        This is called when the version that serves under a name, or the name's state, has changed; None for
        no call.
    retire
        This is awaited with a version that no longer serves, before the version is closed; None for no call.
    lend
        This is called with a name and the model that serves under it from now on, or with None if no model
        does; None for no call.
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
        self._loading: set[asyncio.Task[Served]] = set()
        self._loads = UnderWay()

    @property
    def entries(self) -> Iterable[Entry]:
        """All models, by name."""
        return [self._entries[name] for name in sorted(self._entries)]

    def entry(self, name: str) -> Entry:
        """The model of that name. Raises `NotServed` if there is none."""
        return require_known(name, self._entries.get(name))

    def find(self, name: str, version: str = "") -> tuple[Entry, Served]:
        """A model and the version that answers for it. Raises `NotServed`."""
        entry = self.entry(name)
        return entry, require_version(name, entry.served, version, loading=entry.loading)

    def add(self, name: str, origin: Origin) -> Entry:
        """Add a model of that name, which is not loaded yet. Returns the entry that exists, if there is
        one."""
        return self._entries.setdefault(name, Entry(name, origin))

    async def load(self, name: str, origin: Origin | None = None) -> None:
        """Load a model, again if it is loaded already, and switch to the new version once it is warm.

        `origin`: the file; None for the entry's own. Raises `NotServed`, also if the model is removed
        meanwhile, and as `CudnnRef.load`: then the old version goes on serving.
        """
        entry = self.entry(name)
        with self._loads.one():  # `close` waits for it
            await self._load_entry(entry, origin)

    async def _load_entry(self, entry: Entry, origin: Origin | None) -> None:
        name = entry.name
        async with entry.lock:
            self._require_there(entry)
            entry.wanted, entry.loading = True, True
            entry.origin = origin or entry.origin
            self._changed()
            try:
                served = await self._load_version(entry)
            except NotServed:  # the catalog was closed
                raise
            except CudnnActorError as error:
                entry.reason = str(error)
                log.warning("serving.load_failed", model=name, path=str(entry.origin.path), error=str(error))
                raise
            finally:
                entry.loading = False
                self._changed()
            try:
                self._require_there(entry)
            except NotServed:
                self._end(served)
                raise
            served.count_in(entry.counts)
            before, entry.served, entry.reason = entry.served, served, ""
            self._lend(name, served.model)
            self._changed()
            log.info("serving.loaded", model=name, version=served.version)
            self._end(before)

    async def _load_version(self, entry: Entry) -> Served:
        """Load the version of an entry's file. Raises `NotServed` if the catalog is closed meanwhile."""
        caller = asyncio.current_task()
        assert caller is not None, "models are loaded by tasks"
        cancelling, task = caller.cancelling(), asyncio.create_task(self._load(entry.name, entry.origin))
        self._loading.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if task.done() and not task.cancelled() and task.exception() is None:
                self._end(task.result())  # it was loaded before the caller could go on, and nobody gets it
            if caller.cancelling() > cancelling:
                raise
            raise _was_removed(entry) from None
        finally:
            self._loading.discard(task)

    async def unload(self, name: str) -> None:
        """Stop serving a model. Its runs finish first. Raises `NotServed` for an unknown name."""
        entry = self.entry(name)
        async with entry.lock:
            self._require_there(entry)
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

    def _require_there(self, entry: Entry) -> None:
        """Raise `NotServed` if a model was removed while something was awaited. Another model may have its
        name by now."""
        if self._entries.get(entry.name) is not entry:
            raise _was_removed(entry)

    def _end(self, served: Served | None) -> None:
        """Close a version in a task, once its runs have finished."""
        if served is not None:
            task = asyncio.get_running_loop().create_task(self._close(served))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _close(self, served: Served) -> None:
        if self._retire is not None:
            await self._retire(served)
        await served.close()

    async def close(self) -> None:
        """Wait until every run has finished, and free all models. Loads under way are cancelled: they raise
        `NotServed`."""
        for name in list(self._entries):
            self.remove(name)
        while self._loading:
            self._loading.pop().cancel()
        await self._loads.none()
        if self._ending:
            await asyncio.gather(*self._ending, return_exceptions=True)


def _was_removed(entry: Entry) -> NotServed:
    return NotServed(model=entry.name, version="", problem="was removed")


def _nothing() -> None:
    pass


def _lend_nothing(_name: str, _model: Model | None) -> None:
    pass
