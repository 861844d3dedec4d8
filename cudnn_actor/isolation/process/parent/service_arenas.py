"""The arenas of a service: a worker makes them, this process keeps them, and every worker maps them.

This process holds a file descriptor of each arena, also of one in device memory. The descriptor keeps the
memory when the worker that made it ends. Where arenas are host memory, this process maps them, too. Arenas
are made one at a time; the allocations that need one wait in the broker until it is there or is refused.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from cudnn_actor.broker import Broker
from cudnn_actor.engines.cpu.arenas import Arenas, is_whole
from cudnn_actor.isolation.process.parent.in_flight import Violation, WorkerRequest
from cudnn_actor.isolation.process.parent.workers import Workers
from cudnn_actor.isolation.process.wire import (
    ArenaImported,
    ArenaMade,
    ArenaRefused,
    CreateArena,
    ImportArena,
    MapArena,
    UnmapArena,
)
from cudnn_actor.memory.exhaustion import exhaustion
from cudnn_actor.protocol.errors import CudnnActorError, MalformedMessage, ServiceStopped

__all__ = ["ServiceArenas"]


@dataclass(frozen=True, eq=False, repr=False)
class ServiceArenas:
    """Has arenas made, mapped and unmapped. Used with the host held.

    Parameters
    ----------
    broker, workers
        The host's own.
    mapped
        The arenas that are mapped in this process; None where they are device memory.
    """

    broker: Broker[WorkerRequest]
    workers: Workers
    mapped: Arenas | None

    def create(self, number: int, nbytes: int) -> None:
        """Ask the worker to make an arena. It answers with `ArenaMade` or `ArenaRefused`."""
        assert self.workers.serving is not None
        self.workers.arena_asked_s = time.monotonic()
        self.workers.serving.send(CreateArena(number, nbytes))

    def import_from(self, number: int, nbytes: int, descriptor: int) -> None:
        """Let the worker map another service's arena. It answers with `ArenaImported` or `ArenaRefused`.

        No other worker maps it, and this process does not: only the worker reads it. Raises `OSError` if no
        descriptor is left to send it.
        """
        assert self.workers.serving is not None
        self.workers.arena_asked_s = time.monotonic()
        self.workers.serving.send(ImportArena(number, nbytes), (descriptor,))

    def drop_import(self, number: int) -> None:
        """Let the worker unmap an imported arena. After that worker's end, the memory table knows no import
        any more."""
        if self.workers.serving is not None:
            self.workers.serving.send(UnmapArena(number))

    def drop(self, number: int) -> None:
        """Unmap an empty arena everywhere."""
        self.workers.tell_all(UnmapArena(number))
        if self.mapped is not None:
            self.mapped.unmap(number)

    def take(self, frame: ArenaMade | ArenaImported | ArenaRefused) -> None:
        """Handle the worker's answer to `CreateArena` or `ImportArena`. Raises `Violation`.

        After this call, the caller starts the allocations that wait for the arena. If this process has no
        room for it, the first of them fails.
        """
        wanted = self.broker.arenas.wanted
        if wanted is None or frame.number != wanted[0]:
            raise Violation(f"it named arena {frame.number}, which it was not asked to make")
        self.workers.arena_asked_s = None
        if isinstance(frame, ArenaRefused):
            self.broker.arenas.note_refused(_refusal(frame))
        elif isinstance(frame, ArenaImported) is not self.broker.arenas.importing:
            raise Violation(f"its answer about arena {frame.number} is {type(frame).__name__}")
        elif self.broker.arenas.importing:
            self.broker.arenas.note_imported()
        else:
            self._own(*wanted)

    def close(self) -> None:
        """Unmap all arenas in this process."""
        if self.mapped is not None:
            self.mapped.clear()

    def _own(self, number: int, nbytes: int) -> None:
        """Take over an arena that the worker has made, and let all other processes map it.

        If the service's memory has been closed meanwhile, the first waiting allocation fails.
        """
        assert self.workers.serving is not None
        try:
            descriptor = self.workers.serving.take_descriptor()
        except OSError as error:
            self._refuse(number, nbytes, error)
            return
        try:
            self._map(number, nbytes, descriptor)
            self.broker.arenas.note_made(descriptor)
        except OSError as error:
            os.close(descriptor)
            self._refuse(number, nbytes, error)
        except ServiceStopped as error:
            os.close(descriptor)
            self.drop(number)
            self.broker.arenas.note_refused(error)
        except BaseException:
            os.close(descriptor)
            raise

    def _map(self, number: int, nbytes: int, descriptor: int) -> None:
        """Map a worker's arena in this process, if it is host memory, and in the other workers.

        Raises `OSError`, `Violation`. Then it is mapped in none of these.
        """
        if self.mapped is not None:
            if not is_whole(descriptor, nbytes):
                raise Violation(f"its arena {number} is not sealed memory of {nbytes:,} bytes")
            try:
                self.mapped.map(number, descriptor, nbytes)
            except ValueError as error:
                raise Violation(f"its arena {number} cannot be mapped: {error}") from error
        frame, undo, maker = MapArena(number, nbytes), UnmapArena(number), self.workers.serving
        try:
            self.workers.have_mapped(frame, descriptor, undo, maker=maker)
        except OSError:
            if self.mapped is not None:
                self.mapped.unmap(number)
            raise

    def _refuse(self, number: int, nbytes: int, error: OSError) -> None:
        """Give up an arena that the worker has made, because this process has no room for it.

        Raises `Violation` if the error is not a lack of room, because then the worker is to blame.
        """
        refusal = exhaustion(error, requested=nbytes, in_use=self.broker.memory.live_bytes)
        if refusal is None:
            raise Violation(f"its arena {number} cannot be mapped: {error}") from error
        assert self.workers.serving is not None
        self.workers.serving.send(UnmapArena(number))
        self.broker.arenas.note_refused(refusal)


def _refusal(frame: ArenaRefused) -> CudnnActorError:
    try:
        return frame.error.to_error()
    except MalformedMessage as malformed:
        raise Violation(
            f"its answer about arena {frame.number} is not an error of this package: {malformed}"
        ) from malformed
