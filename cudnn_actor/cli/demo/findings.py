"""The demo's results as data: `story` fills them in, the table here and the picture show them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from rich.table import Table

from cudnn_actor.cli.demo.filters import Filter
from cudnn_actor.cli.demo.recorder import Sample

__all__ = ["Findings", "Kill", "ServedKill", "request_table", "verdict"]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The kill of the worker, and its effects.

    Parameters
    ----------
    pid
        The process that was killed.
    killed_s
        The time of the kill, on the recorder's clock.
    kills
        How often a worker was killed until a kill hit requests that had begun. All other fields describe the
        last kill.
    step
        The step of the fit that was running at that time.
    in_flight
        Unanswered requests at the time of the kill, not counting the fit's.
    run_again
        Requests that were interrupted and run again.
    generation
        The incarnation that serves afterwards.
    downtime_s
        The downtime that the service reports.
    answered_s
        Seconds from the kill to the first answer of the new incarnation.
    buffers, nbytes
        Buffers in use afterwards, and their bytes: none was uploaded again.
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


@dataclass(frozen=True, kw_only=True)
class ServedKill:
    """The kill of the worker amid batched requests of a model, and its effects.

    Parameters
    ----------
    killed_s
        As in `Kill`.
    callers
        How many callers sent requests, one after the other.
    in_flight
        The callers' unanswered requests at the time of the kill.
    answered_s
        Seconds from the kill to the first answer of the next worker.
    samples
        All requests of the callers.
    wrong
        Answers that differ from the model's earlier answer for that picture alone.
    """

    killed_s: float
    callers: int
    in_flight: int
    answered_s: float
    samples: list[Sample]
    wrong: int


@dataclass(kw_only=True)
class Findings:
    """Everything that the demo shows at the end. Images are (height, width) or (3, height, width)."""

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
    """Responses of the filter bank that were not bit-for-bit equal when they were computed again."""
    compared: int = 0
    """Responses that were computed again."""
    samples: list[Sample] = field(default_factory=list)
    """All requests except those of `served`."""
    served: ServedKill | None = None
    restarts: int = 0
    replayed: int = 0
    errors: int = 0
    device: str = ""

    @property
    def all_samples(self) -> list[Sample]:
        """All requests."""
        return [*self.samples, *(() if self.served is None else self.served.samples)]

    @property
    def filter_error(self) -> float:
        """The largest difference between a recovered tap and the true one."""
        return float(np.abs(self.found_taps - self.true_taps).max())

    def quality_db(self, image: np.ndarray) -> float:
        """Peak signal-to-noise ratio of an image relative to the sharp one, in decibels."""
        error = float(np.mean(np.square(image - self.sharp, dtype=np.float64)))
        return -10 * float(np.log10(max(error, 1e-12)))


def request_table(samples: list[Sample]) -> Table:
    """Count and latencies of every kind of request, stage by stage."""
    table = Table(title="Requests, as the caller saw them", title_justify="left", pad_edge=False)
    for name in ("stage", "request"):
        table.add_column(name, no_wrap=True)
    for name in ("count", "p50 ms", "p99 ms", "max ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in dict.fromkeys(sample.stage for sample in samples):
        _add_stage(table, stage, [sample for sample in samples if sample.stage == stage])
    return table


def _add_stage(table: Table, stage: str, samples: list[Sample]) -> None:
    for kind in sorted({sample.kind for sample in samples}):
        latencies = np.array([sample.latency_s for sample in samples if sample.kind == kind]) * 1e3
        p50, p99 = np.percentile(latencies, [50, 99])
        table.add_row(stage, kind, str(len(latencies)), f"{p50:.2f}", f"{p99:.2f}", f"{latencies.max():.2f}")
        stage = ""
    table.add_section()


def verdict(findings: Findings) -> str:
    """The line of text under the table: restarts, requests run again, errors."""
    return (
        f"restarts: {findings.restarts}   requests run again: {findings.replayed}   "
        f"errors seen by callers: {findings.errors}"
    )
