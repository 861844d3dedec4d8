"""What a `BatchedModel` says of itself and of its batches."""

from __future__ import annotations

from cudnn_actor.protocol.types.records import Record

__all__ = ["BatchStatistics", "BatchTimes"]


class BatchStatistics(Record):
    """What a `BatchedModel` has done so far.

    Parameters
    ----------
    batches, samples, padded
        Batches that were run, the samples in them, and the rows that were added to fill their sizes.
    waiting, running
        Requests that wait for a batch now, and batches that have started and are not answered.
    divided
        Batches that failed, or that a crash interrupted, so that their requests ran one by one.
    """

    batches: int = 0
    samples: int = 0
    padded: int = 0
    waiting: int = 0
    running: int = 0
    divided: int = 0

    @property
    def mean_batch(self) -> float:
        """Samples in a batch, on average; 0 before the first."""
        return self.samples / self.batches if self.batches else 0.0


class BatchTimes(Record):
    """What a batch took whose requests have been answered. Times are in nanoseconds.

    Parameters
    ----------
    samples
        How many it had, without the rows that were added to fill its size.
    waited_ns
        How long its requests have waited for it, in sum, without those whose answers nobody waits for.
    assembled_ns, ran_ns, divided_ns
        How long it took to put the inputs together, to run them, which begins with a wait for the worker, and
        to make the outputs of each request.
    """

    samples: int
    waited_ns: int
    assembled_ns: int
    ran_ns: int
    divided_ns: int
