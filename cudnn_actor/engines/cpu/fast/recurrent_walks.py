"""How the steps of a recurrent layer are dealt: a task walks through one direction, for some sequences.

It walks in turns. Progress is noted behind each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Operands, Step
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.fast.matrices import blas_operand
from cudnn_actor.engines.cpu.scratch import Scratch

__all__ = [
    "Mask",
    "Sizes",
    "Task",
    "Turn",
    "begin_states",
    "in_order",
    "store_states",
    "transpose_for_blas",
    "turns",
    "within",
]

Mask = npt.NDArray[np.bool_]
_LEAST_WORK = 1 << 20
"""Products of a step that a task has at least where a direction has several."""
_LEAST_ROWS = 8
"""If a direction has n tasks, each has at least n times this many sequences.

BLAS copies the weights for each product. So on one lane, few tasks of many sequences take less time than
many tasks of few sequences.
"""
_MOST_TASKS = 8
"""The most tasks of a direction."""
_MOST_BYTES, _MOST_STEPS = 4 << 20, 4096
"""Bytes of what a turn's steps compute the gates from, and steps: a turn takes some tenths of a second."""


class Task(NamedTuple):
    """A direction, and some of the sequences."""

    way: int
    rows: slice


class Turn(NamedTuple):
    """Steps that follow each other in a direction.

    `times`: the numbers of the steps. `backwards`: whether they are walked from the last to the first.
    """

    times: slice
    backwards: bool


class Sizes(NamedTuple):
    """The sizes of a layer: directions, sequences, rows of the weights, elements of a state, and units."""

    directions: int
    batch: int
    rows: int
    state: int
    hidden: int

    @classmethod
    def of(cls, node: Any, w_hh: tuple[int, ...], batch: int) -> Sizes:
        """The sizes of a layer with recurrent weights of dims `w_hh`."""
        directions, rows, state = w_hh
        return cls(directions, batch, rows, state, rows // node.mode.gates)

    @property
    def tasks(self) -> list[Task]:
        """The layer's tasks. They do not depend on the number of lanes, so the results do not either."""
        work = self.batch * self.rows * self.state
        most = min(math.isqrt(self.batch // _LEAST_ROWS), work // _LEAST_WORK, _MOST_TASKS)
        count = 1 << max(1, most).bit_length() - 1
        bounds = [self.batch * number // count for number in range(count + 1)]
        parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
        return [Task(way, part) for way in range(self.directions) for part in parts]

    def steps_of_turn(self, itemsize: int) -> int:
        """How many steps a turn has at most."""
        return min(_MOST_STEPS, max(1, _MOST_BYTES // (self.batch * self.rows * itemsize)))

    @property
    def most_rows(self) -> int:
        """Sequences of the largest task."""
        return max(int(task.rows.stop - task.rows.start) for task in self.tasks)


def begin_states(
    sizes: Sizes, firsts: Mapping[str, Floats | None], dtype: npt.DTypeLike, lane: Scratch
) -> tuple[dict[str, Floats], list[Step]]:
    """The states h and c of all directions, as far as `firsts` has them, and the steps that set them to these
    values, or to 0 for None."""
    units = {"h": sizes.state, "c": sizes.hidden}
    states = {name: lane.keep((sizes.directions, sizes.batch, units[name]), dtype) for name in firsts}
    steps: list[Step] = [
        (partial(own.fill, 0) if (first := firsts[name]) is None else partial(np.copyto, own, first),)
        for name, own in states.items()
    ]
    return states, steps


def store_states(states: Mapping[str, Floats], results: Operands) -> list[Step]:
    """The steps that copy states to the results of the same names, as far as there are such results."""
    return [(partial(np.copyto, results[name], own),) for name, own in states.items() if name in results]


def turns(steps: int, most: int, way: int) -> list[Turn]:
    """The steps of a direction, cut into turns of at most `most` steps, in the order in which they are
    walked."""
    starts = range(0, steps, most)
    if way == 0:
        return [Turn(slice(start, min(start + most, steps)), False) for start in starts]
    return [Turn(slice(max(steps - start - most, 0), steps - start), True) for start in starts]


def in_order(array: npt.NDArray[Any], turn: Turn) -> npt.NDArray[Any]:
    """The part of an array for the steps of a turn, in the order in which they are walked."""
    found = array[turn.times]
    return found[::-1] if turn.backwards else found


def within(node: Any, steps: int, batch: int) -> Mask | None:
    """Whether sequences have steps, dims (T, B, 1); None if all have all of them."""
    if node.lengths is None or min(node.lengths) == steps:
        return None
    found: Mask = node.within(np, steps, batch)
    return found


def transpose_for_blas(weights: Floats, steps: list[Step], lanes: Sequence[Scratch]) -> Floats:
    """Matrices with their last two dims swapped, as BLAS takes them. `steps`: as in `blas_operand`."""
    return blas_operand(weights.swapaxes(-2, -1), steps, lanes)
