"""How much staging memory of a service is in use."""

from __future__ import annotations

from cudnn_actor.isolation.staging import Staging

__all__ = ["segments_in_use"]


def segments_in_use(staging: Staging) -> int:
    """Segments of which any block is in use. The pieces that are kept for copies do not count: those that
    are unused are freed, and no others are made."""
    staging.stocked_pieces = frozenset()
    while staging.pieces:
        staging.give_back(staging.pieces.pop())
    return sum(not segment.idle for segment in staging.pool.all())
