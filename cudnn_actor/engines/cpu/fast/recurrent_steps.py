"""The steps of recurrent layers with cells of any kind: a product a step, and functions that overwrite it.

A task walks through one direction, for some sequences, in turns: see `recurrent_walks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.fast.cell_functions import apply_function
from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step, carrier_dtype, deal
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.fast.matrices import blas_operand
from cudnn_actor.engines.cpu.fast.recurrent_walks import (
    Sizes,
    Task,
    Turn,
    begin_states,
    in_order,
    store_states,
    turns,
)
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.operations import CellActivation, Node, RecurrentCell, RecurrentSteps
from cudnn_actor.protocol.operations.base import Specs

__all__ = ["recurrent_steps"]

_OF_WAY = ("bias", "peepholes")


def recurrent_steps(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `RecurrentSteps`."""
    assert isinstance(node, RecurrentSteps)
    x, (directions, rows, hidden) = specs["x"], specs["w"].dims
    sizes = Sizes(directions, x.dims[1], rows, hidden, hidden)
    return _Steps(node, sizes, carrier_dtype(x.dtype).itemsize)


@dataclass(frozen=True)
class _Steps:
    node: RecurrentSteps[Any]
    sizes: Sizes
    itemsize: int

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch of a lane: what the largest task computes in a step."""
        del lanes
        most, (_, _, rows, _, hidden) = self.sizes.most_rows, self.sizes
        dims = [*[(most, rows)] * 3, *[(most, hidden)] * 5]
        return footprint(*dims, itemsize=self.itemsize) + footprint(*[(most, rows)] * 2, itemsize=1)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        steps: list[Step] = []
        node, sizes, x = self.node, self.sizes, operands["x"]
        directions, _, rows, _, hidden = sizes
        given = {"w": blas_operand(operands["w"], steps, lanes)}
        given |= {name: operands[name] for name in _OF_WAY if name in operands}
        names = "hc" if node.cell is RecurrentCell.LSTM else "h"
        firsts = {name: operands.get(f"{name}0") for name in names}
        states, begin = begin_states(sizes, firsts, x.dtype, lanes[0])
        steps += begin
        functions, count = node.functions(directions), node.cell.functions
        most = sizes.steps_of_turn(self.itemsize)
        ways = (turns(len(x), most, int(node.is_backwards(way))) for way in range(directions))
        for own_turns in zip(*ways, strict=True):

            def call(task: Task, lane: int, own_turns: Sequence[Turn] = own_turns) -> Call:
                way, some = task
                turn = own_turns[way]
                own = {name: array[way] for name, array in given.items()}
                own |= {name: array[way, some] for name, array in states.items()}
                own["x"] = in_order(x[:, some, way * rows : (way + 1) * rows], turn)
                own["y"] = in_order(results["y"][:, some, way * hidden : (way + 1) * hidden], turn)
                own |= {"lengths": operands["lengths"][some]} if "lengths" in operands else {}
                return _Walk(node, functions[way * count : (way + 1) * count], own, turn, lanes[lane].fork())

            steps.append(deal(sizes.tasks, len(lanes), call))
        return steps + store_states({f"{name}_n": own for name, own in states.items()}, results)


class _Walk:
    """A call that walks through some steps of a direction, and changes the state that it finds.

    Parameters
    ----------
    functions
        The functions of the direction.
    own
        The arrays of the direction: weights, bias and peepholes; and the arrays of the task's sequences:
        state, lengths, and those that are read and written step by step, in the order of the walk.
    turn
        The steps.
    """

    def __init__(
        self,
        node: RecurrentSteps[Any],
        functions: Sequence[CellActivation],
        own: Mapping[str, Any],
        turn: Turn,
        scratch: Scratch,
    ) -> None:
        self._own, self._h, self._w, self._node = own, own["h"], own["w"], node
        self._functions = functions
        (batch, hidden), rows, dtype = self._h.shape, len(self._w), self._h.dtype
        self._gates, spare = (scratch.take((batch, rows), dtype) for _ in range(2))
        self._turned = scratch.take((rows, batch), dtype)
        self._each, self._spare = (one.reshape(batch, -1, hidden) for one in (self._gates, spare))
        self._mask = scratch.take((batch, rows), np.bool_).reshape(batch, -1, hidden)
        self._inside, self._outside = (scratch.take((batch, 1), np.bool_) for _ in range(2))
        self._new, self._cells, self._more, self._seen = (
            scratch.take((batch, hidden), dtype) for _ in range(4)
        )
        times = range(turn.times.start, turn.times.stop)
        self._times = times[::-1] if turn.backwards else times

    def __call__(self) -> None:
        """Walk."""
        own, new = self._own, self._new
        step = {
            RecurrentCell.PLAIN: self._plain,
            RecurrentCell.LSTM: self._lstm,
            RecurrentCell.GRU: self._gru,
            RecurrentCell.GRU_RESET_FIRST: self._gru_reset_first,
        }[self._node.cell]
        lengths = own.get("lengths")
        for time, x, y in zip(self._times, own["x"], own["y"], strict=True):
            step(x)
            np.copyto(y, new)
            if lengths is None:
                np.copyto(self._h, new)
                if "c" in own:
                    np.copyto(own["c"], self._cells)
            else:
                self._hold(time, lengths, y)

    def _hold(self, time: int, lengths: Any, y: Floats) -> None:
        """Keep the states of sequences that do not have a step."""
        inside, outside = self._inside, self._outside
        np.greater(lengths[:, None], time, inside)
        np.logical_not(inside, outside)
        np.copyto(self._h, self._new, where=inside)
        if "c" in self._own:
            np.copyto(self._own["c"], self._cells, where=inside)
        np.copyto(y, 0, where=outside)

    def _multiply(self, state: Floats, first: int, stop: int) -> None:
        """Compute the state's part of some gates, from the first one up to another."""
        hidden = self._h.shape[1]
        rows = slice(first * hidden, stop * hidden)
        gates, turned, w = self._gates[:, rows], self._turned[rows], self._w[rows]
        if len(state) == 1:
            np.matmul(state, w.T, gates)
        else:
            np.matmul(w, state.T, turned)
            np.copyto(gates, turned.T)
        if "bias" in self._own:
            np.add(gates, self._own["bias"][rows], gates)

    def _apply(self, number: int, first: int, stop: int) -> None:
        """Clip the inputs of the gates `first:stop`, and apply the function with this number to them."""
        values, clip = self._each[:, first:stop], self._node.clip
        if clip is not None:
            np.maximum(values, -clip, out=values)
            np.minimum(values, clip, out=values)
        spare, mask = self._spare[:, first:stop], self._mask[:, first:stop]
        apply_function(self._functions[number], values, spare, mask)

    # The steps.

    def _plain(self, x: Floats) -> None:
        self._multiply(self._h, 0, 1)
        np.add(self._gates, x, self._gates)
        self._apply(0, 0, 1)
        np.copyto(self._new, self._each[:, 0])

    def _lstm(self, x: Floats) -> None:
        own, each, cells, more = self._own, self._each, self._cells, self._more
        self._multiply(self._h, 0, 4)
        np.add(self._gates, x, self._gates)
        self._look(0, 0, own["c"])
        self._look(1, 1, own["c"])
        self._apply(0, 0, 2)
        if self._node.coupled:
            np.subtract(1, each[:, 0], each[:, 1])
        self._apply(1, 2, 3)
        np.multiply(each[:, 1], own["c"], cells)
        np.multiply(each[:, 0], each[:, 2], more)
        np.add(cells, more, cells)
        self._look(3, 2, cells)
        self._apply(0, 3, 4)
        np.copyto(self._seen, cells)
        apply_function(self._functions[2], self._seen, more, self._mask[:, 0])
        np.multiply(each[:, 3], self._seen, self._new)

    def _look(self, gate: int, number: int, cells: Floats) -> None:
        """Add what a gate sees of the cells by the peephole of this number."""
        if "peepholes" in self._own:
            np.multiply(cells, self._own["peepholes"][number], self._more)
            np.add(self._each[:, gate], self._more, self._each[:, gate])

    def _gru(self, x: Floats) -> None:
        each, hidden = self._each, self._h.shape[1]
        both, n = self._gates[:, : 2 * hidden], each[:, 2]
        self._multiply(self._h, 0, 3)
        np.add(both, x[:, : 2 * hidden], both)
        self._apply(0, 0, 2)
        np.multiply(each[:, 0], n, n)
        self._mix(x)

    def _gru_reset_first(self, x: Floats) -> None:
        each, hidden = self._each, self._h.shape[1]
        both = self._gates[:, : 2 * hidden]
        self._multiply(self._h, 0, 2)
        np.add(both, x[:, : 2 * hidden], both)
        self._apply(0, 0, 2)
        np.multiply(each[:, 0], self._h, self._seen)
        self._multiply(self._seen, 2, 3)
        self._mix(x)

    def _mix(self, x: Floats) -> None:
        """The new state, from the state's part of n."""
        z, n, more, new = self._each[:, 1], self._each[:, 2], self._more, self._new
        np.add(n, x[:, 2 * new.shape[1] :], n)
        self._apply(1, 2, 3)
        np.subtract(1, z, more)
        np.multiply(more, n, new)
        np.multiply(z, self._h, more)
        np.add(new, more, new)
