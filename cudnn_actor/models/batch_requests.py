"""A request of a `BatchedModel`, and a batch of such requests, while they are under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

__all__ = ["Batch", "Fitting", "Request", "comparison"]

Fitting = tuple[dict[str, np.ndarray], tuple[Hashable, int]]
"""The inputs of a request that fit; their group, and how many samples they have."""


def comparison(
    dtypes: Mapping[str, np.dtype[Any]], accepted: Mapping[tuple[int, ...], Any]
) -> Callable[[Mapping[str, Any]], Fitting | None]:
    """A function that returns the inputs of a request if they are arrays of the same names, dims and dtypes
    as an earlier request's; else None. They are then checked in full, which takes longer.

    Parameters
    ----------
    dtypes
        The dtype of each input.
    accepted
        See `BatchedModel._accepted`.
    """
    if len(dtypes) == 1:
        return _comparison_of_one(*next(iter(dtypes.items())), accepted)

    def compare(inputs: Mapping[str, Any]) -> Fitting | None:
        if type(inputs) is not dict or len(inputs) != len(dtypes):
            return None
        views: dict[str, np.ndarray] = {}
        known: Any = accepted
        try:
            for name, dtype in dtypes.items():
                each = inputs[name]
                if type(each) is not np.ndarray or (each.dtype is not dtype and each.dtype != dtype):
                    return None
                # A view keeps its shape, even if the caller gives the array another one before its batch
                # starts.
                views[name] = view = each[...]
                known = known[view.shape]
        except KeyError:
            return None
        return views, known

    return compare


def _comparison_of_one(
    name: str, dtype: np.dtype[Any], accepted: Mapping[tuple[int, ...], tuple[Hashable, int]]
) -> Callable[[Mapping[str, Any]], Fitting | None]:
    """The same for a model of one input, in two thirds of the steps."""

    def compare(inputs: Mapping[str, Any]) -> Fitting | None:
        if type(inputs) is not dict or len(inputs) != 1:
            return None
        array = inputs.get(name)
        if type(array) is not np.ndarray or (array.dtype is not dtype and array.dtype != dtype):
            return None
        view = array[...]
        fits = accepted.get(view.shape)
        return None if fits is None else ({name: view}, fits)

    return compare


class Request(msgspec.Struct, eq=False, weakref=False):
    """A request that was accepted. Its answer reaches the caller by its future alone."""

    future: asyncio.Future[dict[str, np.ndarray]]
    inputs: dict[str, np.ndarray]
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
