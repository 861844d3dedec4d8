"""Records of a `BatchedModel` and of its batches: counts and times."""

from __future__ import annotations

from cudnn_actor.protocol.types.records import Record

__all__ = ["BatchStatistics", "BatchTimes"]


class BatchStatistics(Record):
    """The counts of a `BatchedModel` since it was made.

    Parameters
    ----------
    batches, samples, padded
        Batches that have run, the samples in them, and the rows that were added to reach one of the sizes.
    waiting, running
        Requests that wait for a batch now, and batches that have started and have no answer yet.
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
        """The mean number of samples in a batch; 0 before the first batch."""
        return self.samples / self.batches if self.batches else 0.0


class BatchTimes(Record):
    """The times that a batch took, once its requests have been answered, in nanoseconds.

    Parameters
    ----------
    samples
        How many samples the batch had, without the rows that were added to reach its size.
    waited_ns
        The sum of the times that its requests waited for it, without requests whose answers nobody awaits.
    assembled_ns, ran_ns, divided_ns
        How long it took to put the inputs together, to run the batch (with the wait for the worker), and to
        make the outputs of each request.
    """

    samples: int
    waited_ns: int
    assembled_ns: int
    ran_ns: int
    divided_ns: int
