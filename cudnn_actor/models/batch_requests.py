"""A request of a `BatchedModel`, and a batch of such requests, while they are under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
import numpy as np

__all__ = ["Batch", "Fitting", "Kinds", "Request", "comparison", "kinds_of"]

Fitting = tuple[tuple[np.ndarray, ...], tuple[Hashable, int]]
"""The inputs of a request that fit, in the order of the model's; their group, and how many samples they
have."""

Kinds = Hashable
"""The class, dtype and dims of an input; a tuple of these where the model has several inputs."""

_KIND_OF = attrgetter("__class__", "dtype", "shape")
_VIEW_OF = itemgetter(...)
_UNKNOWN = (AttributeError, TypeError, LookupError, ValueError, RuntimeError, ReferenceError)
"""What is raised for inputs of other names or another number, and by objects that are no arrays. (Not
`Exception`: a signal handler may raise a `TimeoutError` here, which must reach the caller.)"""


def kinds_of(inputs: Sequence[np.ndarray]) -> Kinds:
    """The kinds of inputs that fit. The arrays may be of a subclass, or have another byte order: see
    `comparison`."""
    kinds = tuple((np.ndarray, each.dtype, each.shape) for each in inputs)
    return kinds if len(kinds) > 1 else kinds[0]


def comparison(
    names: Sequence[str], accepted: Mapping[Kinds, tuple[Hashable, int]]
) -> Callable[[Mapping[str, Any]], Fitting | None]:
    """A function that returns the inputs of a request if they are arrays of the same names, dims and dtypes
    as an earlier request's; else None. They are then checked in full, which takes longer.

    It returns views. A view keeps its shape, even if the caller gives the array another one before its batch
    starts.

    Parameters
    ----------
    names
        The names of all inputs.
    accepted
        The group and the samples of inputs that fit, by their kinds.
    """
    if len(names) == 1:
        return _comparison_of_one(names[0], accepted)
    arrays_of = itemgetter(*names)

    def compare(inputs: Mapping[str, Any]) -> Fitting | None:
        if type(inputs) is not dict or len(inputs) != len(names):
            return None
        try:
            arrays = arrays_of(inputs)
            fits = accepted.get(tuple(map(_KIND_OF, arrays)))
        except _UNKNOWN:
            return None
        return None if fits is None else (tuple(map(_VIEW_OF, arrays)), fits)

    return compare


def _comparison_of_one(
    name: str, accepted: Mapping[Kinds, tuple[Hashable, int]]
) -> Callable[[Mapping[str, Any]], Fitting | None]:
    """The same for a model of one input, in fewer steps."""
    known = accepted.get

    def compare(inputs: Mapping[str, Any]) -> Fitting | None:
        try:
            ((key, array),) = inputs.items()
            fits = known(_KIND_OF(array))
        except _UNKNOWN:
            return None
        return None if fits is None or key != name else ((array[...],), fits)

    return compare


class Request(msgspec.Struct, eq=False, weakref=False):
    """A request that was accepted. Its answer reaches the caller by its future alone."""

    future: asyncio.Future[dict[str, np.ndarray]]
    inputs: tuple[np.ndarray, ...]
    """In the order of the model's."""
    group: Hashable
    samples: int
    since_ns: int
    timeout_s: float | None = None
    timer: asyncio.TimerHandle | None = None
    batch: Batch | None = None
    """The batch that the request was taken for; None before that, and once it was withdrawn or has failed."""


class Batch:
    """A batch that runs: its task, and how many of its requests somebody still waits for.

    Parameters
    ----------
    requests
        The requests that the batch runs; none once it has ended.
    taken
        How many requests were taken for the batch, including those that were withdrawn, or whose `timeout`
        passed, before it began.
    """

    def __init__(self, requests: Sequence[Request], taken: int) -> None:
        self.requests = requests
        self.taken = taken
        self.awaited = len(requests)
        self.task: asyncio.Task[None] | None = None
        self._begun = self._cancelled = False

    def begin(self) -> None:
        """Begin the batch's task. Raises `CancelledError` if the batch was cancelled before."""
        self._begun = True
        if self._cancelled:
            raise asyncio.CancelledError

    def cancel(self) -> None:
        """Cancel the batch's task. If the task has not begun yet, `begin` ends it: a task that is cancelled
        before it begins runs no line, so nobody would note its end."""
        if not self._begun:
            self._cancelled = True
        elif self.task is not None:
            self.task.cancel()
