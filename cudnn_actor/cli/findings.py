"""What the demo found out, as data: the story fills it in, the table and the picture show it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cudnn_actor.cli.filters import Filter
from cudnn_actor.cli.recorder import Sample

__all__ = ["Findings", "Outage"]


@dataclass(frozen=True, kw_only=True)
class Outage:
    """One restart of the service.

    Parameters
    ----------
    seen_s
        When the caller was told that the service was down, on the recorder's clock.
    downtime_s
        How long nothing was served.
    generation
        The incarnation that serves since.
    step
        The step of the fit that was waiting for it.
    """

    seen_s: float
    downtime_s: float
    generation: int
    step: int


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
    outages: list[Outage] = field(default_factory=list)
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
