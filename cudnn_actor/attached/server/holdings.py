"""The buffers and models that one client has in the service. It can name no others, and leaves none
behind.

However a client ends, also by SIGKILL, the kernel closes its socket. As soon as the server's loop sees that,
`Session.end` frees what is here. The bytes of a buffer are reused once no unfinished request uses them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from cudnn_actor.attached.server.shared_weights import SharedWeights
from cudnn_actor.broker.service_state import ServiceState
from cudnn_actor.protocol.errors import (
    InvalidRequest,
    NotDeployed,
    OutOfMemory,
    StaleBufferError,
    StaleReason,
    Words,
)
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.messages import (
    Copy,
    DeployModel,
    Download,
    Free,
    GraphRun,
    RunLoop,
    RunModel,
    UnloadModel,
    WarmModel,
)
from cudnn_actor.protocol.messages.model_messages import ModelGraph, ModelRef
from cudnn_actor.protocol.messages.run_loop import SCRATCH
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["MOST_IMPORTS", "Holdings", "references"]

MOST_IMPORTS = 16
"""How many buffers of other services a client may have at a time. Each keeps memory of that service in
use."""

Key = tuple[int, int]
_NO_REFERENCES = (str, int, float, bytes, np.ndarray, Graph, OperationGraph, TensorSpec, type(None))


def references(message: Any) -> tuple[BufferRef | ModelRef, ...]:
    """Every buffer and every model that a message names, in any of its fields."""
    if (
        type(message) is RunModel and not message.buffers and not message.into
    ):  # arrays alone: nothing to find
        return (message.model,)
    return tuple(_named_in(message))


def _named_in(value: Any) -> Iterator[BufferRef | ModelRef]:
    if isinstance(value, BufferRef | ModelRef):
        yield value
    elif isinstance(value, _NO_REFERENCES):
        return
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _named_in(getattr(value, name))
    elif isinstance(value, dict):
        for each in value.values():
            yield from _named_in(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _named_in(each)


class Holdings:
    """The buffers and models of one client. Used on the server's loop only.

    Parameters
    ----------
    state
        The service's state.
    shared
        The weights that clients share.
    limit
        Bytes of buffers that the client may hold; None for no bound.
    """

    def __init__(self, state: ServiceState, shared: SharedWeights, limit: int | None) -> None:
        self._state, self._shared, self._limit = state, shared, limit
        self.nbytes = 0
        """The bytes of the client's buffers, and of buffers that it has asked for."""
        self.epoch = 0
        """A number that changes whenever the client loses a buffer or a model: `check` may then refuse a
        message that it has passed before."""
        self._buffers: dict[Key, BufferRef] = {}
        self._read: dict[Key, int] = {}
        """The shared buffers, which the client may only read, and how often it was given each."""
        self._models: set[ModelRef] = set()
        self._imports: set[Key] = set()
        """The client's buffers that are another service's memory."""
        self.imports = 0
        """How many such buffers the client has or has asked for."""

    def __len__(self) -> int:
        return len(self._buffers) + len(self._read) + len(self._models)

    def has(self, model: ModelRef) -> bool:
        """Whether the client has deployed a model, and not unloaded it."""
        return model in self._models

    def holds(self, what: object) -> bool:
        """Whether the client has a buffer of its own or a model."""
        if isinstance(what, BufferRef):
            return (what.slot, what.generation) in self._buffers
        return what in self._models

    def check(self, message: Any, named: Iterable[BufferRef | ModelRef]) -> None:
        """Raise `StaleBufferError` or `NotDeployed` if a message names a buffer or a model that the client
        does not have.

        Raises `InvalidRequest` if the message would write to a shared buffer.
        """
        reads_shared = False
        for ref in named:
            if isinstance(ref, ModelRef):
                if not self.has(ref) and not isinstance(message, UnloadModel):
                    raise NotDeployed(model=ref.number, inputs="", unloaded=True)
            elif (key := (ref.slot, ref.generation)) in self._read:
                reads_shared = True
            elif key in self._imports:
                _check_reads_import(message, ref)
            elif key not in self._buffers:
                raise StaleBufferError(slot=ref.slot, generation=ref.generation, reason=StaleReason.FOREIGN)
        if reads_shared:
            self._check_reads(message)

    def _check_reads(self, message: Any) -> None:
        if isinstance(message, Download | Free):
            return
        if isinstance(message, GraphRun) and message.graph.body.pure:
            written = {port.name for port in message.graph.outputs}
            scratch = [(SCRATCH, message.scratch)] if isinstance(message, RunLoop) else []
            self._check_written(message.graph, message.buffers, written, scratch)
        elif isinstance(message, DeployModel | WarmModel):
            for graph in message.graphs:
                self._check_written(graph.graph, graph.buffers, _written_ports(graph))
        else:
            raise _only_read(type(message).__name__)

    def _check_written(
        self,
        graph: Graph,
        buffers: Iterable[BufferRef],
        written: Collection[str],
        others: Iterable[tuple[str, BufferRef]] = (),
    ) -> None:
        """Raise `InvalidRequest` if a port in `written`, or one of `others`, has a shared buffer."""
        ports = ((port.name, ref) for port, ref in zip(graph.ports, buffers, strict=False))
        for name, ref in (*((name, ref) for name, ref in ports if name in written), *others):
            if (ref.slot, ref.generation) in self._read:
                raise _only_read(name)

    def begin_import(self) -> None:
        """Count a buffer of another service that the client is about to get. Raises `OutOfMemory`."""
        if self.imports >= MOST_IMPORTS:
            raise OutOfMemory(
                requested=0,
                in_use=self.imports,
                limit=MOST_IMPORTS,
                where="buffers of other services that this client may have at a time",
            )
        self.imports += 1

    def end_import(self) -> None:
        """Stop counting such a buffer, which the client has not got."""
        self.imports -= 1

    def add_import(self, ref: BufferRef) -> None:
        """Note a buffer of another service that the client gets. It takes none of the client's bytes."""
        self._imports.add((ref.slot, ref.generation))
        self._buffers[ref.slot, ref.generation] = ref

    def reserve(self, nbytes: int) -> None:
        """Count bytes of a buffer that the client is about to get. Raises `OutOfMemory` if they are over its
        limit."""
        if self._limit is not None and self.nbytes + nbytes > self._limit:
            raise OutOfMemory(
                requested=nbytes,
                in_use=self.nbytes,
                limit=self._limit,
                largest=max(0, self._limit - self.nbytes),
                where="this client of the service",
            )
        self.nbytes += nbytes

    def give_up(self, nbytes: int) -> None:
        """Stop counting bytes that `reserve` has counted."""
        self.nbytes -= nbytes

    def add(self, what: BufferRef | ModelRef) -> None:
        """Note a buffer or a model that the client gets. A buffer's bytes have been reserved."""
        if isinstance(what, ModelRef):
            self._models.add(what)
        else:
            self._buffers[what.slot, what.generation] = what

    def add_shared(self, ref: BufferRef) -> None:
        """Note a shared buffer each time that the client gets it."""
        key = (ref.slot, ref.generation)
        self._read[key] = self._read.get(key, 0) + 1

    def drop_shared(self, ref: BufferRef) -> bool:
        """Give a shared buffer back once. Returns False if the buffer is not shared."""
        key = (ref.slot, ref.generation)
        if key not in self._read:
            return False
        self._read[key] -= 1
        if not self._read[key]:
            del self._read[key]
            self.epoch += 1
        self._shared.release(ref)
        return True

    def drop(self, what: BufferRef | ModelRef) -> None:
        """Note that a buffer was freed, or a model unloaded."""
        self.epoch += 1
        if isinstance(what, ModelRef):
            self._models.discard(what)
        elif self._buffers.pop(key := (what.slot, what.generation), None) is not None:
            if key in self._imports:
                self._imports.discard(key)
                self.imports -= 1
            else:
                self.nbytes -= what.nbytes

    def end(self) -> None:
        """Ask to free all buffers and to unload all models once earlier requests are done, without waiting
        for that."""
        self.epoch += 1
        for model in self._models:
            self._state.unload(model, None)
        for ref in self._buffers.values():
            self._state.discard(ref)
        for key, times in self._read.items():
            for _ in range(times):
                self._shared.release_key(key)
        self._models.clear()
        self._buffers.clear()
        self._imports.clear()
        self._read.clear()
        self.nbytes = 0


def _check_reads_import(message: Any, ref: BufferRef) -> None:
    """Raise `InvalidRequest` unless a message copies from another service's buffer, or frees it."""
    if isinstance(message, Free) or (isinstance(message, Copy) and message.dst != ref):
        return
    raise InvalidRequest(
        field="message",
        value=Words(type(message).__name__),
        problem="names a buffer of another service, which can only be copied",
        fix="copy it to a buffer of this one",
    )


def _written_ports(graph: ModelGraph) -> set[str]:
    """The ports of a model's graph to which a run writes."""
    draws = () if graph.draws is None else (graph.draws.port,)
    return {
        *graph.inputs.values(),
        *graph.outputs.values(),
        *draws,
        *(port.name for port in graph.graph.outputs),
    }


def _only_read(what: str) -> InvalidRequest:
    return InvalidRequest(
        field="message",
        value=what,
        problem="would use a buffer that other processes share, and that models only read",
        fix="upload the values to a buffer of your own",
    )
