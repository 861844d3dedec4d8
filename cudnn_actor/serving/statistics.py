"""What the server counts of each model, in the protocol's terms."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

__all__ = ["Duration", "ModelCounts"]


@dataclass
class Duration:
    """How often something happened, and the nanoseconds that it took in sum."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """One more time."""
        self.count += 1
        self.ns += ns


@dataclass
class ModelCounts:
    """The requests for a model, over all of its versions.

    Parameters
    ----------
    success, fail
        Requests from the first byte that was decoded to the answer, or to the error.
    compute_input, compute_infer, compute_output
        Parts of those that succeeded: decoding, the run with its waiting, and encoding.
    inferences
        Samples that were answered.
    last_ms
        When the last answer was made, in milliseconds since 1970.
    """

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    inferences: int = 0
    last_ms: int = 0

    def succeeded(self, samples: int, moments: tuple[int, int, int, int]) -> None:
        """Note an answer: when it was begun, decoded, run and encoded, in nanoseconds of a steady clock."""
        begun, decoded, run, encoded = moments
        self.success.add(encoded - begun)
        self.compute_input.add(decoded - begun)
        self.compute_infer.add(run - decoded)
        self.compute_output.add(encoded - run)
        self.inferences += samples
        self.last_ms = time.time_ns() // 1_000_000
