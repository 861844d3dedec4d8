"""Steps: the actions of a plan's run, each a single NumPy call where possible.

A step is a closure over arrays that stay the same from run to run. It finds the bound buffers and
scalars, which change, by index in the values of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.engines.cpu.boxes import Box, whole
from cudnn_actor.engines.cpu.rounding import Rounding, rounding_to
from cudnn_actor.engines.cpu.scratch import Array, Dims
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Step", "Values", "load", "round_to", "store"]

Values = Sequence[Any]
"""The values of one run: the plan's intermediate arrays, the bound buffers, the scalars (plain floats)."""

Step = Callable[[Values], object]


def load(index: int, dims: Dims, box: Box, into: Array) -> Step:
    """Copy a box of a value of `dims` into a float64 array."""

    def load_all(values: Values) -> None:
        into[...] = values[index]

    def load_box(values: Values) -> None:
        into[...] = values[index][box]

    return load_all if box == whole(dims) else load_box


def round_to(dtype: DType, result: Array, spare: Array) -> Step:
    """Round a float64 array to the values of another type, in place; `spare` is scratch of its dims."""
    rounding = rounding_to(dtype.numpy)
    values = spare.reshape(-1).view(dtype.numpy)[: result.size].reshape(result.shape)

    def round_all(_: Values) -> None:
        rounding(values, result)
        result[...] = values

    return round_all


def store(rounding: Rounding, result: Array, index: int, dims: Dims, box: Box) -> Step:
    """Round a float64 array, which may be overwritten, into a box of a value of `dims`."""

    def store_all(values: Values) -> None:
        rounding(values[index], result)

    def store_box(values: Values) -> None:
        rounding(values[index][box], result)

    return store_all if box == whole(dims) else store_box
