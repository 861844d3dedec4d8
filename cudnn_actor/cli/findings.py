"""What the demo found out, as data: the story fills it in, the table and the picture show it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cudnn_actor.cli.filters import Filter
from cudnn_actor.cli.recorder import Sample

__all__ = ["Findings", "Kill"]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The worker was killed, and what came of it.

    Parameters
    ----------
    pid
        The process that was killed.
    killed_s
        When, on the recorder's clock.
    kills
        How often a worker was killed, until the kill found requests that had begun; all else is of the last.
    step
        The step of the fit that was at work meanwhile.
    in_flight
        Requests that the kill found unanswered, beside the fit's own.
    run_again
        Requests that it interrupted, and that were run again.
    generation
        The incarnation that serves since.
    downtime_s
        How long nothing was served, as the service says.
    answered_s
        Seconds from the kill to the first answer of the new incarnation.
    buffers, nbytes
        Buffers in use behind it, and bytes in them: none was uploaded again.
    """

    pid: int
    killed_s: float
    kills: int
    step: int
    in_flight: int
    run_again: int
    generation: int
    downtime_s: float
    answered_s: float
    buffers: int
    nbytes: int


@dataclass(kw_only=True)
class Findings:
    """Everything that the demo shows in the end. Images are (height, width) or (3, height, width)."""

    photo: np.ndarray
    true_taps: np.ndarray
    responses: list[tuple[Filter, np.ndarray]] = field(default_factory=list)
    found_taps: np.ndarray = field(default_factory=lambda: np.zeros((5, 5)))
    filter_losses: list[float] = field(default_factory=list)
    photo_losses: list[float] = field(default_factory=list)
    sharp: np.ndarray = field(default_factory=lambda: np.zeros((3, 1, 1)))
    shaken: np.ndarray = field(default_factory=lambda: np.zeros((3, 1, 1)))
    restored: np.ndarray = field(default_factory=lambda: np.zeros((3, 1, 1)))
    kill: Kill | None = None
    changed: int = 0
    """Responses of the filter bank that were not the same, bit for bit, when they were computed again."""
    compared: int = 0
    """How many were."""
    samples: list[Sample] = field(default_factory=list)
    restarts: int = 0
    replayed: int = 0
    errors: int = 0
    device: str = ""

    @property
    def filter_error(self) -> float:
        """The largest difference between a tap that was found and the true one."""
        return float(np.abs(self.found_taps - self.true_taps).max())

    def quality_db(self, image: np.ndarray) -> float:
        """Peak signal-to-noise ratio of an image against the sharp one, in decibels."""
        error = float(np.mean(np.square(image - self.sharp, dtype=np.float64)))
        return -10 * float(np.log10(max(error, 1e-12)))
