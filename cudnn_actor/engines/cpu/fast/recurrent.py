"""Layers of recurrent networks: one product for the input of many steps, and then one product a step.

The input is multiplied for several steps at a time: for few enough that the result stays small. Then the
tasks walk through these steps, each with a state of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step, carrier_dtype, deal
from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.engines.cpu.fast.matrices import blas_operand, product_steps
from cudnn_actor.engines.cpu.fast.recurrent_walks import (
    Mask,
    Sizes,
    Task,
    Turn,
    begin_states,
    in_order,
    store_states,
    transpose_for_blas,
    turns,
    within,
)
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.operations import Node, Recurrent, RecurrentMode
from cudnn_actor.protocol.operations.base import Specs

__all__ = ["recurrent"]


def recurrent(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `Recurrent`; None without sequences."""
    assert isinstance(node, Recurrent)
    x = specs["x"]
    if not x.size:
        return None
    return _Layer(node, Sizes.of(node, specs["w_hh"].dims, x.dims[1]), carrier_dtype(x.dtype).itemsize)


@dataclass(frozen=True)
class _Layer:
    node: Recurrent[Any]
    sizes: Sizes
    itemsize: int

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch of a lane: what the largest task computes in a step."""
        del lanes
        return _Walk.footprint(self.sizes, self.itemsize)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        steps: list[Step] = []
        node, sizes, x, keep = self.node, self.sizes, operands["x"], lanes[0].keep
        directions, batch, rows, *_ = sizes
        given = {
            name: transpose_for_blas(operands[name], steps, lanes)
            for name in ("w_ih", "w_hr")
            if name in operands
        }
        given["w_hh"] = blas_operand(operands["w_hh"], steps, lanes)
        given |= {"bias": operands["bias"]} if "bias" in operands else {}
        names = "hc" if node.mode is RecurrentMode.LSTM else "h"
        firsts = {name: operands.get(f"{name}0") for name in names}
        states, begin = begin_states(sizes, firsts, x.dtype, lanes[0])
        steps += begin
        most = min(len(x), sizes.steps_of_turn(self.itemsize))
        walked = {"input": keep((directions, most, batch, rows), x.dtype), **results}
        mask = within(node, len(x), batch)
        for own_turns in zip(*(turns(len(x), most, way) for way in range(directions)), strict=True):
            for way, turn in enumerate(own_turns):
                part = x[turn.times]
                into = walked["input"][way, : len(part)]
                steps += product_steps(part, given["w_ih"][way][None], into, lanes)

            def call(task: Task, lane: int, own_turns: Sequence[Turn] = own_turns) -> Call:
                way, some = task
                turn = own_turns[way]
                own = {name: array[way] for name, array in given.items()}
                own |= {name: array[way, some] for name, array in states.items()}
                outside = None if mask is None else in_order(~mask[:, some], turn)
                return _Walk(node.mode, own, self._of_turn(walked, task, turn), outside, lanes[lane].fork())

            steps.append(deal(sizes.tasks, len(lanes), call))
        return steps + store_states({f"{name}_n": own for name, own in states.items()}, results)

    def _of_turn(self, walked: Operands, task: Task, turn: Turn) -> dict[str, Floats]:
        """The arrays that a task reads and writes step by step, in the order in which it walks through a
        turn."""
        way, some = task
        count, state = turn.times.stop - turn.times.start, self.sizes.state
        found = {
            "input": in_order(walked["input"][way, :, some], turn._replace(times=slice(0, count))),
            "y": in_order(walked["y"][:, some, way * state : (way + 1) * state], turn),
        }
        if "reserve" in walked:
            found["reserve"] = in_order(walked["reserve"][way, :, some], turn)
        return found


class _Walk:
    """A call that walks through some steps, and changes the state that it finds.

    Sigmoids are computed as (1 + tanh(x / 2)) / 2. So they take one call together with a gate that is a tanh.
    The state of several sequences is multiplied as a transposed matrix, from the right. With few of them,
    that takes half of the time with OpenBLAS's kernels for AVX-512, and as long with those for AVX2.

    Parameters
    ----------
    given
        The weights of the direction, those of the input and of a projection transposed, its bias, and the
        state of the sequences.
    walked
        The arrays that are read and written step by step, in the order of the walk.
    outside
        A mask of the sequences that do not have a step; None if all sequences have all steps.
    """

    def __init__(
        self,
        mode: RecurrentMode,
        given: Mapping[str, Floats],
        walked: Mapping[str, Floats],
        outside: Mask | None,
        scratch: Scratch,
    ) -> None:
        self._given, self._walked, self._outside = given, walked, outside
        self._mode, self._inside = mode, None if outside is None else ~outside
        h = given["h"]
        (batch, state), rows = h.shape, len(given["w_hh"])
        hidden, dtype = rows // mode.gates, h.dtype
        self._turned = scratch.take((rows, batch), dtype)
        self._gates = scratch.take((batch, rows), dtype)
        self._each = self._gates.reshape(batch, mode.gates, hidden)
        self._spare, self._more, full, cells = (scratch.take((batch, hidden), dtype) for _ in range(4))
        self._bias, self._half, self._shift = (scratch.take((rows,), dtype) for _ in range(3))
        new = scratch.take((batch, state), dtype)
        self._h, self._new = h, h if outside is None else new
        self._full = full if "w_hr" in given else self._new
        self._cells = given["c"] if outside is None and "c" in given else cells

    @staticmethod
    def footprint(sizes: Sizes, itemsize: int) -> int:
        """Bytes of scratch for the largest task."""
        most, (_, _, rows, state, hidden) = sizes.most_rows, sizes
        dims = [*[(most, rows)] * 2, *[(most, hidden)] * 4, *[(rows,)] * 3, (most, state)]
        return footprint(*dims, itemsize=itemsize)

    def __call__(self) -> None:
        """Walk."""
        self._prepare()
        walked, new = self._walked, self._new
        step = {RecurrentMode.LSTM: self._lstm, RecurrentMode.GRU: self._gru}.get(self._mode, self._plain)
        reserve = walked.get("reserve")
        for number, (of_input, y) in enumerate(zip(walked["input"], walked["y"], strict=True)):
            kept = None if reserve is None else reserve[number]
            self._multiply()
            step(of_input, kept)
            np.copyto(y, new)
            if self._outside is not None:
                self._hold(number, y, kept)

    def _multiply(self) -> None:
        """Compute the state's part of the gates."""
        h, weights = self._h, self._given["w_hh"]
        if len(h) == 1:
            np.matmul(h, weights.T, self._gates)
        else:
            np.matmul(weights, h.T, self._turned)
            np.copyto(self._gates, self._turned.T)

    def _prepare(self) -> None:
        """Add the bias to the input's part; of a GRU, not the state's part of n's, which r is for."""
        mode, hidden = self._mode, self._each.shape[2]
        self._half.fill(0.5)
        self._shift.fill(0.5)
        self._half[2 * hidden : 3 * hidden], self._shift[2 * hidden : 3 * hidden] = 1, 0
        if "bias" in self._given:
            of_input, of_state = self._given["bias"]
            np.copyto(self._bias, of_input)
            both = slice(0, 2 * hidden) if mode is RecurrentMode.GRU else slice(None)
            self._bias[both] += of_state[both]
            parts = self._walked["input"]
            np.add(parts, self._bias, parts)

    def _hold(self, number: int, y: Floats, kept: Floats | None) -> None:
        """Keep the states of sequences that do not have a step."""
        assert self._outside is not None
        assert self._inside is not None
        outside, inside = self._outside[number], self._inside[number]
        np.copyto(self._h, self._new, where=inside)
        if "c" in self._given:
            np.copyto(self._given["c"], self._cells, where=inside)
        np.copyto(y, 0, where=outside)
        if kept is not None:
            np.copyto(kept, 0, where=outside[:, None])

    # The steps. The state's part of the gates is there.

    def _plain(self, of_input: Floats, kept: Floats | None) -> None:
        new = self._new
        np.add(self._gates, of_input, new)
        if self._mode is RecurrentMode.RELU:
            np.maximum(new, 0, out=new)
        else:
            np.tanh(new, new)
        if kept is not None:
            np.copyto(kept[:, 0], new)

    def _lstm(self, of_input: Floats, kept: Floats | None) -> None:
        gates, each, cells, spare = self._gates, self._each, self._cells, self._spare
        np.add(gates, of_input, gates)
        np.multiply(gates, self._half, gates)
        np.tanh(gates, gates)
        np.multiply(gates, self._half, gates)
        np.add(gates, self._shift, gates)
        np.multiply(each[:, 1], self._given["c"], spare)
        np.multiply(each[:, 0], each[:, 2], self._more)
        np.add(spare, self._more, cells)
        np.tanh(cells, spare)
        np.multiply(each[:, 3], spare, self._full)
        if "w_hr" in self._given:
            np.matmul(self._full, self._given["w_hr"], self._new)
        if kept is not None:
            np.copyto(kept[:, :4], each)
            np.copyto(kept[:, 4], cells)
            if "w_hr" in self._given:
                np.copyto(kept[:, 5], self._full)

    def _gru(self, of_input: Floats, kept: Floats | None) -> None:
        each, n, spare, hidden = self._each, self._spare, self._more, self._each.shape[2]
        both, q = self._gates[:, : 2 * hidden], each[:, 2]
        np.add(both, of_input[:, : 2 * hidden], both)
        np.multiply(both, 0.5, both)
        np.tanh(both, both)
        np.multiply(both, 0.5, both)
        np.add(both, 0.5, both)
        if "bias" in self._given:
            np.add(q, self._given["bias"][1, 2 * hidden :], q)
        np.multiply(each[:, 0], q, n)
        np.add(n, of_input[:, 2 * hidden :], n)
        np.tanh(n, n)
        np.subtract(self._h, n, spare)
        np.multiply(each[:, 1], spare, spare)
        np.add(n, spare, self._new)
        if kept is not None:
            np.copyto(kept[:, :2], each[:, :2])
            np.copyto(kept[:, 2], n)
            np.copyto(kept[:, 3], q)
