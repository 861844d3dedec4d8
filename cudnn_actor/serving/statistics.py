"""The server's counts for each model, in the protocol's terms."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cudnn_actor.models.batch_records import BatchTimes

__all__ = ["BatchCounts", "Duration", "ModelCounts", "count_samples"]


def count_samples(inputs: Mapping[str, np.ndarray], *, batched: bool) -> int:
    """How many samples a request has: the size of the leading dim if requests are put into batches; else
    1."""
    first = next(iter(inputs.values()), None)
    return len(first) if batched and first is not None and first.ndim else 1


@dataclass
class Duration:
    """How often something happened, and the nanoseconds that it took in total."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """Count one more event, of `ns` nanoseconds."""
        self.count += 1
        self.ns += ns

    def join(self, other: Duration) -> None:
        """Add the counts of another `Duration`."""
        self.count += other.count
        self.ns += other.ns


@dataclass
class BatchCounts:
    """The runs with one number of samples: how long their inputs, the runs and their outputs took."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def add(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Count one more run. Times are in nanoseconds."""
        self.compute_input.add(input_ns)
        self.compute_infer.add(infer_ns)
        self.compute_output.add(output_ns)


@dataclass
class ModelCounts:
    """The requests for a model, over all of its versions.

    Parameters
    ----------
    success, fail
        The requests that succeeded and those that failed; the time is from the beginning of decoding to the
        answer or the error.
    compute_input, ran, compute_output
        The parts of requests that succeeded: decoding, the run with its waiting, and encoding.
    queued_ns
        How many nanoseconds requests have waited for their batches: a part of `ran`.
    batches
        The runs, by the number of samples.
    inferences
        How many samples were answered.
    last_ms
        When the last answer was made, in milliseconds since 1970.
    """

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    ran: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    queued_ns: int = 0
    batches: dict[int, BatchCounts] = field(default_factory=dict)
    inferences: int = 0
    last_ms: int = 0

    def note_answer(self, samples: int, moments: tuple[int, int, int, int]) -> None:
        """Note an answer. `moments`: when its request was begun, decoded, run and encoded, in nanoseconds of
        a steady clock."""
        begun, decoded, run, encoded = moments
        self.success.add(encoded - begun)
        self.compute_input.add(decoded - begun)
        self.ran.add(run - decoded)
        self.compute_output.add(encoded - run)
        self.inferences += samples
        self.last_ms = time.time_ns() // 1_000_000

    def ran_batch(self, times: BatchTimes) -> None:
        """Note a batch whose requests were answered."""
        self.queued_ns += times.waited_ns
        self._of(times.samples).add(times.assembled_ns, times.ran_ns, times.divided_ns)

    def ran_alone(self, samples: int, ns: int) -> None:
        """Note the run of one request by itself."""
        self._of(samples).add(0, ns, 0)

    def join(self, other: ModelCounts) -> None:
        """Add the requests that a serving process has counted. Serving processes count no batches and no
        runs."""
        for part in ("success", "fail", "compute_input", "ran", "compute_output"):
            getattr(self, part).join(getattr(other, part))
        self.inferences += other.inferences
        self.last_ms = max(self.last_ms, other.last_ms)

    def _of(self, samples: int) -> BatchCounts:
        return self.batches.setdefault(samples, BatchCounts())

    def report(self) -> dict[str, Any]:
        """The counts as the fields of the protocol's statistics."""
        # A request that failed after its run has waited, too, but no other sum has it.
        queued = min(self.queued_ns, self.ran.ns)
        parts = {
            "success": self.success,
            "fail": self.fail,
            "queue": Duration(self.ran.count, queued),
            "compute_input": self.compute_input,
            "compute_infer": Duration(self.ran.count, self.ran.ns - queued),
            "compute_output": self.compute_output,
            "cache_hit": Duration(),
            "cache_miss": Duration(),
        }
        return {
            "last_inference": self.last_ms,
            "inference_count": self.inferences,
            "execution_count": sum(each.compute_infer.count for each in self.batches.values()),
            "inference_stats": {part: asdict(each) for part, each in parts.items()},
            "batch_stats": [
                {"batch_size": samples, **asdict(each)} for samples, each in sorted(self.batches.items())
            ],
        }
