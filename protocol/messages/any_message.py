"""The base of messages that are no operations."""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar

from cudnn_actor.protocol.types.records import Record

__all__ = ["Answer", "AnyMessage"]

Answer = TypeVar("Answer", covariant=True)  # noqa: PLC0105 - the name that a reader expects


class AnyMessage(Record, Generic[Answer], tag=True):
    """The base of all messages except operations: frozen, keyword-only, each class its own type.

    `Answer` is what answers it, for type-checkers.

    Attributes
    ----------
    control
        Whether the message is accepted even when the mailbox is full.
    """

    control: ClassVar[bool] = False
