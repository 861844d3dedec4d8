"""Dropout of attention: the factors of some weights, drawn in each run by the definition of random numbers.

The definition is recorded once for the largest block, and its calls are made for each block in the memory of
the block's lane.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.fast.recorder import Recorder
from cudnn_actor.engines.cpu.fast.recording import Recorded, Recording
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations.random import STATE, keeping, words_of_runs

__all__ = ["Drawing", "drawing_bytes", "weight_numbers"]

Array = npt.NDArray[Any]


def weight_numbers(q: Dims, keys: int, scratch: Scratch) -> Array:
    """The number of the first weight of each row, dims (B, H, rows, 1): memory that is kept."""
    found = scratch.keep((*q[:3], 1), np.uint64)
    found[...] = (np.arange(found.size, dtype=np.uint64) * np.uint64(keys)).reshape(found.shape)
    return found


class _Draws(NamedTuple):
    """A recording of dropout: its inputs are a state and the number of each row's first weight, its result is
    the factors."""

    recording: Recording
    state: Recorded
    starts: Recorded
    factors: Recorded


@functools.lru_cache(maxsize=32)
def _record_draws(rows: int, keys: int, dropout: float, dtype: np.dtype[Any]) -> _Draws:
    recording = Recording()
    state, starts = recording.new(STATE.dims, np.int64), recording.new((rows, 1), np.uint64)
    drawn: Any = words_of_runs(Recorder(recording), state, starts, keys)
    factors = (drawn < keeping(1 - dropout)).astype(dtype) * dtype.type(1 / (1 - dropout))
    recording.finish([state, starts], [factors])
    return _Draws(recording, state, starts, factors)


def drawing_bytes(extents: tuple[int, int, int], dropout: float, dtype: np.dtype[Any]) -> int:
    """Bytes of scratch for the draws of a block; 0 without dropout. `extents`: its heads, rows and keys."""
    heads, rows, keys = extents
    if not dropout:
        return 0
    return footprint((_record_draws(heads * rows, keys, dropout, dtype).recording.nbytes,), itemsize=1)


class Drawing:
    """Draws in a lane's memory, for the heads, rows and keys of the largest block.

    `state`: the operand, which is read for each block.
    """

    def __init__(
        self,
        extents: tuple[int, int, int],
        dropout: float,
        dtype: np.dtype[Any],
        state: Array,
        scratch: Scratch,
    ) -> None:
        heads, rows, keys = extents
        draws = _record_draws(heads * rows, keys, dropout, dtype)
        memory = scratch.take((draws.recording.nbytes,), np.uint8)
        self._calls, array = draws.recording.on(memory, {})
        self._given, self._state, self._starts = state, array(draws.state), array(draws.starts)
        self._factors = array(draws.factors)

    def factors(self, numbers: Array, keys: range) -> Floats:
        """The factors of the weights of some keys, dims (rows, keys): 0 for weights that are dropped.

        `numbers`: the numbers of the rows' first weights, dims (heads..., rows, 1). The result is overwritten
        by the next one.
        """
        rows = numbers.size
        np.copyto(self._state, self._given)
        np.add(numbers, np.uint64(keys.start), self._starts[:rows].reshape(numbers.shape))
        for call in self._calls:
            call()
        return self._factors[:rows, : len(keys)]
