"""Notes what a client gets with an answer, or does not get: in its holdings and the shared weights."""

from __future__ import annotations

from typing import Any

from cudnn_actor.attached.server.asked import Asked
from cudnn_actor.attached.server.holdings import Holdings
from cudnn_actor.attached.server.server import Server
from cudnn_actor.attached.server.shared_weights import Digest
from cudnn_actor.broker.service_state import Import
from cudnn_actor.protocol.errors import StaleBufferError
from cudnn_actor.protocol.messages.messages import Allocate, DeployModel, Free, UnloadModel

__all__ = ["note_answer", "note_failure"]


def note_answer(server: Server, holdings: Holdings, asked: Asked, value: Any) -> Any:
    """Note the buffers and models that a client gets or gives back with an answer. Returns the answer."""
    message = asked.known.message
    if isinstance(message, Allocate) and value is not None:
        if asked.digest is not None:
            return _share(server, holdings, asked, value)
        holdings.add(value)
    elif isinstance(message, Import):
        holdings.add_import(value)
    elif isinstance(message, DeployModel):
        holdings.add(value)
    elif isinstance(message, Free) and asked.digest is None:
        holdings.drop(message.buffer)
    elif isinstance(message, UnloadModel) and message.graphs is None:
        holdings.drop(message.model)
    return value


def note_failure(holdings: Holdings, asked: Asked, error: BaseException | None) -> None:
    """Note that a client has not got what it asked for. Without an error, the request was withdrawn."""
    message = asked.known.message
    holdings.give_up(asked.reserved)
    if asked.imports:
        holdings.end_import()
    if isinstance(error, StaleBufferError) and isinstance(message, Free):
        holdings.drop(message.buffer)  # a crash has ended the buffer


def _share(server: Server, holdings: Holdings, asked: Asked, ref: Any) -> Any:
    """Give a client a shared buffer: an earlier one, or the new one, which others share from now on."""
    shared, digest = server.shared, Digest(*asked.digest)  # type: ignore[misc]
    if asked.sent_ns:  # it was just made
        holdings.give_up(asked.reserved)
        asked.reserved = 0
        if (other := shared.find(digest)) is not None:  # another client has made one meanwhile
            server.state.discard(ref)
            ref = other
        else:
            shared.add(digest, ref)
    holdings.add_shared(ref)
    return ref
