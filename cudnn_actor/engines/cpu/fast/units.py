"""The units of a fast plan: kernels, exact evaluations, and changes between dtypes, on arrays by number.

The arrays of a run have numbers: a tensor's uid for the values that kernels read and write, and
`stored_number(uid)` for the buffer of a bound tensor of a small floating type, whose values a kernel
does not take.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.base import blame
from cudnn_actor.engines.cpu.exact.evaluation import XP, exact
from cudnn_actor.engines.cpu.fast.blocks import BLOCK_ELEMENTS, merged_axes, pieces
from cudnn_actor.engines.cpu.fast.kernels import Call, Step, deal
from cudnn_actor.engines.cpu.fast.rounding import store
from cudnn_actor.engines.cpu.scratch import Scratch
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["Arrays", "Unit", "copy_unit", "definition_unit", "kernel_unit", "redirect_unit", "stored_number"]

Arrays = Mapping[int, npt.NDArray[Any]]
"""The arrays of a run by their numbers."""


def stored_number(uid: int) -> int:
    """The number of the buffer of a bound tensor whose values are carried in another dtype."""
    return ~uid


class Unit(NamedTuple):
    """A part of a plan.

    Parameters
    ----------
    reads, writes
        The numbers of the arrays that it reads and writes.
    bind
        Gives the steps of a run on these arrays.
    footprint
        Bytes of scratch that each lane needs.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    bind: Callable[[Arrays, Sequence[Scratch]], list[Step]]
    footprint: int = 0


def kernel_unit(kernel: Any, operands: Mapping[Any, int], results: Mapping[Any, int], lanes: int) -> Unit:
    """The unit in which a kernel computes: a `Kernel`, or a `Chain`.

    `operands`, `results`: the numbers of arrays by the keys that the kernel knows them by.
    """

    def bind(arrays: Arrays, scratch: Sequence[Scratch]) -> list[Step]:
        given = {name: arrays[number] for name, number in operands.items()}
        into = {name: arrays[number] for name, number in results.items()}
        steps: list[Step] = kernel.bind(given, into, scratch)
        return steps

    return Unit(tuple(operands.values()), tuple(results.values()), bind, kernel.footprint(lanes))


def definition_unit(graph: OperationGraph, number: int) -> Unit:
    """The unit that computes an operation by its definition: in float64, in memory that NumPy allocates."""
    operation, constants = graph.operations[number], graph.constants

    def bind(arrays: Arrays, _scratch: Sequence[Scratch]) -> list[Step]:
        known = {
            uid: graph.equal_elements(XP, uid, constants[uid]) for uid in operation.reads if uid in constants
        }
        given = {uid: arrays[uid] for uid in operation.reads if uid not in known}
        into = {uid: (graph.tensor(uid).dtype, arrays[uid]) for uid in operation.writes}

        def run() -> None:
            try:
                values = known | {uid: exact(array) for uid, array in given.items()}
                for uid, result in graph.evaluate(XP, operation, values).items():
                    dtype, array = into[uid]
                    store(result, dtype, array)
            except Exception as error:
                blame(error, (number,))
                raise

        return [(run,)]

    return Unit(operation.reads, operation.writes, bind)


def redirect_unit(unit: Unit, number: int, to: int) -> Unit:
    """The unit with array `to` in place of array `number`."""

    def bind(arrays: Arrays, scratch: Sequence[Scratch]) -> list[Step]:
        return unit.bind(ChainMap({number: arrays[to]}, arrays), scratch)  # type: ignore[arg-type]

    reads, writes = (
        tuple(to if each == number else each for each in numbers) for numbers in (unit.reads, unit.writes)
    )
    return Unit(reads, writes, bind, unit.footprint)


def copy_unit(source: int, target: int) -> Unit:
    """The unit that copies an array to one of the same dims, of any dtype. Floats round to nearest even."""

    def bind(arrays: Arrays, scratch: Sequence[Scratch]) -> list[Step]:
        if not arrays[target].size:
            return []
        dims, (into, of) = merged_axes(arrays[target].shape, [arrays[target], arrays[source]])
        return [deal(pieces(dims, BLOCK_ELEMENTS), len(scratch), lambda part, _: _copy(of[part], into[part]))]

    return Unit((source,), (target,), bind)


def _copy(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> Call:
    return lambda: np.copyto(target, source, casting="unsafe")
