"""The answers of requests that have failed, and their names in log lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from cudnn_actor.attached.wire import Answer, Answers, Dropped, NeedsRoom, Refused, Withdrawn
from cudnn_actor.memory.exhaustion import exhaustion
from cudnn_actor.processes.frames import encode
from cudnn_actor.protocol.errors import CudnnActorError

__all__ = ["each_encoded", "failure_answer", "kind_of"]


class _Tagged(msgspec.Struct):
    """A message, of which only the name of its class is read."""

    type: str


def kind_of(body: bytes) -> str:
    """The kind of a message that could not be taken, for a log line."""
    try:
        kind = msgspec.msgpack.decode(body, type=_Tagged).type
    except (msgspec.DecodeError, ValueError, RecursionError):
        return "unknown"
    return kind[:80]


def failure_answer(number: int, error: BaseException | None) -> Answer:
    """The answer of a request that has failed, or, without an error, of one that was withdrawn.

    If the system has refused something, the answer names it: there was no room for a descriptor, for example.
    """
    if error is None:
        return Dropped(number)
    known: BaseException | None = error
    if isinstance(error, OSError | MemoryError):
        known = exhaustion(error, requested=0, in_use=0)
    if not isinstance(known, CudnnActorError):
        known = CudnnActorError(str(error))
    return Refused(number, known.to_record())


def each_encoded(answers: Sequence[Answer]) -> Iterator[bytes]:
    """A frame for each answer. The answer to a request is an error if its own cannot be encoded.

    Raises what encoding raises for an answer that does not end its request.
    """
    for answer in answers:
        try:
            yield encode(Answers([answer]))
        except Exception as error:
            if isinstance(answer, NeedsRoom | Withdrawn):
                raise
            yield encode(Answers([failure_answer(answer.number, error)]))
