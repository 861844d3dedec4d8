"""The base of messages that are no operations."""

from __future__ import annotations

from typing import ClassVar

from cudnn_actor.protocol.types.records import Record

__all__ = ["AnyMessage"]


class AnyMessage(Record, tag=True):
    """What all messages but operations have in common: frozen, keyword-only, each class its own type.

    Attributes
    ----------
    control
        Whether the message is accepted even when the mailbox is full.
    """

    control: ClassVar[bool] = False
