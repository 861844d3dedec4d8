"""The interface of a broker's host, which runs the work that the broker has found valid."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from cudnn_actor.broker.deployments import Deployed
from cudnn_actor.broker.service_state import Forget
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Host"]


class Host(Protocol):
    """Runs a broker's work."""

    has_views: bool
    """Whether a caller can get a view of a buffer's memory, without a copy."""

    def waits_for(self, number: int) -> bool:
        """Whether any work with a lower number than this one is unfinished."""

    def create_arena(self, number: int, nbytes: int) -> None:
        """Make an arena, now or later, and then call `ArenaRequests.note_made` or `note_refused`."""

    def drop_arena(self, number: int) -> None:
        """Release an empty arena."""

    def import_arena(self, number: int, nbytes: int, descriptor: int) -> None:
        """Let the present engine map another service's arena for reading, now or later, and then call
        `ArenaRequests.note_imported` or `note_refused`. The caller keeps the descriptor."""

    def drop_import(self, number: int) -> None:
        """Let the engine that has mapped another service's arena unmap it."""

    def forget(self, message: Forget) -> None:
        """Drop graphs and plans from the caches of whatever runs the work."""

    def clear_plans(self) -> None:
        """Drop the plans that are kept outside of the serving engine, and everything that would restore them.

        The work for the message follows, and drops the serving engine's plans.
        """

    @property
    def lent_bytes(self) -> int:
        """The bytes of arrays of `lend` that are in use."""

    def lend(self, spec: TensorSpec) -> np.ndarray:
        """An array of these dims in memory that the engine reads without a copy, for a caller.

        Raises `OutOfMemory`, `OutOfDescriptors`.
        """

    def forget_deployed(self, deployed: Deployed) -> None:
        """Drop the host's data on a model's graph that has ended."""
