"""Gradients of recurrent layers: a walk back with one product a step, and then products for all steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step, carrier_dtype, deal
from cudnn_actor.engines.cpu.fast.lines import Floats, joined_axes
from cudnn_actor.engines.cpu.fast.matrices import as_blas_takes_it, blas_operand, copy_step, product_steps
from cudnn_actor.engines.cpu.fast.recurrent import recurrent
from cudnn_actor.engines.cpu.fast.recurrent_walks import (
    Mask,
    Sizes,
    Task,
    Turn,
    begin_states,
    store_states,
    turns,
    within,
)
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.operations import (
    Node,
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    RecurrentMode,
)
from cudnn_actor.protocol.operations.base import Specs

__all__ = ["recurrent_backward_data", "recurrent_backward_weights"]

_KEPT = 6
"""The most numbers that are kept of a unit."""


def recurrent_backward_data(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `RecurrentBackwardData`; None without sequences."""
    assert isinstance(node, RecurrentBackwardData)
    y = specs["y"]
    if not y.size:
        return None
    found = _OfData(node, Sizes.of(node, specs["w_hh"].dims, y.dims[1]), carrier_dtype(y.dtype).itemsize)
    if "reserve" in specs:
        return found
    layer = recurrent(node.layer(), specs)
    assert layer is not None, "x has elements if y has"
    return _WithoutReserve(layer, found)


def recurrent_backward_weights(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `RecurrentBackwardWeights`; None without sequences."""
    assert isinstance(node, RecurrentBackwardWeights)
    return _OfWeights(node) if specs["x"].size else None


@dataclass(frozen=True)
class _OfData:
    node: RecurrentBackwardData[Any]
    sizes: Sizes
    itemsize: int

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch of a lane: what the largest task computes in a step."""
        del lanes
        return _WalkBack.footprint(self.sizes, self.itemsize)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        steps: list[Step] = []
        node, sizes, y, keep = self.node, self.sizes, operands["y"], lanes[0].keep
        directions, batch, rows, state, _ = sizes
        weights = {
            name: blas_operand(operands[name], steps, lanes) for name in ("w_hh", "w_hr") if name in operands
        }
        of_gates = keep((len(y), batch, directions, rows), y.dtype)
        names = "hc" if node.mode is RecurrentMode.LSTM else "h"
        lasts = {name: operands.get(f"d{name}_n") for name in names}
        states, begin = begin_states(sizes, lasts, y.dtype, lanes[0])
        steps += begin
        mask = within(node, len(y), batch)
        most = sizes.steps_of_turn(self.itemsize)

        def call(task: Task, lane: int, own_turns: Sequence[Turn]) -> Call:
            way, some = task
            own = {name: array[way] for name, array in weights.items()}
            own |= {f"d{name}": array[way, some] for name, array in states.items()}
            own |= {name: operands[name][way, some] for name in ("h0", "c0") if name in operands}
            part = slice(way * state, (way + 1) * state)
            walked = {name: operands[name][:, some, part] for name in ("y", "dy") if name in operands}
            walked |= {"reserve": operands["reserve"][way, :, some], "gates": of_gates[:, some, way]}
            walked |= {"slopes": results["slopes"][way, :, some]} if "slopes" in results else {}
            one = None if mask is None else mask[:, some]
            return _WalkBack((node.mode, own_turns[way]), own, walked, one, lanes[lane].fork())

        walks = (reversed(turns(len(y), most, way)) for way in range(directions))
        steps += [
            deal(sizes.tasks, len(lanes), partial(call, own_turns=own_turns))
            for own_turns in zip(*walks, strict=True)
        ]
        together = _rows(operands["w_ih"], steps, lanes)
        of_both = of_gates.reshape(len(y), batch, directions * rows)
        steps += product_steps(of_both, together[None], results["dx"], lanes)
        return steps + store_states({f"d{name}0": own for name, own in states.items()}, results)


@dataclass(frozen=True)
class _WithoutReserve:
    """Computes the forward pass again, into arrays of its own, and then the gradients."""

    layer: Kernel
    gradients: _OfData

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch of a lane: for the larger of the two, which run one after the other."""
        return max(self.layer.footprint(lanes), self.gradients.footprint(lanes))

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        node, (directions, batch, _, state, hidden) = self.gradients.node, self.gradients.sizes
        y, keep = operands["y"], lanes[0].keep
        kept = node.kept_numbers(projected=state < hidden)
        made = {
            "y": keep(y.shape, y.dtype),
            "reserve": keep((directions, len(y), batch, kept, hidden), y.dtype),
        }
        given = {name: operands[name] for name in Recurrent.inputs if name in operands}
        steps = self.layer.bind(given, made, [lane.fork() for lane in lanes])
        return steps + self.gradients.bind({**operands, **made}, results, [lane.fork() for lane in lanes])


class _WalkBack:
    """A call that walks back through some steps, and changes the gradients of the state that it finds.

    Parameters
    ----------
    of
        The mode, and the turn. It walks against the turn's direction.
    given
        The weights of the direction, the gradients of the state behind the last step, and the state before
        the first one.
    walked
        The arrays that are read and written step by step, of all steps in the order of time.
    mask
        Which sequences have a step; None if all have all of them.
    """

    def __init__(
        self,
        of: tuple[RecurrentMode, Turn],
        given: Mapping[str, Floats],
        walked: Mapping[str, Floats],
        mask: Mask | None,
        scratch: Scratch,
    ) -> None:
        (mode, self._turn), self._given, self._walked, self._mask = of, given, walked, mask
        self._mode = mode
        dh = given["dh"]
        (batch, state), (rows, _) = dh.shape, given["w_hh"].shape
        hidden, dtype = rows // mode.gates, dh.dtype
        self._kept = scratch.take((_KEPT, batch, hidden), dtype)
        self._factors, self._slopes = (scratch.take((4, batch, hidden), dtype) for _ in range(2))
        self._cell, self._spare, full = (scratch.take((batch, hidden), dtype) for _ in range(3))
        self._before = scratch.take((batch, hidden), dtype)
        self._of_state = scratch.take((batch, rows), dtype)
        self._new = scratch.take((batch, state), dtype)
        self._full = full if "w_hr" in given else dh

    @staticmethod
    def footprint(sizes: Sizes, itemsize: int) -> int:
        """Bytes of scratch for the largest task."""
        most, (_, _, rows, state, hidden) = sizes.most_rows, sizes
        dims = [(_KEPT, most, hidden), *[(4, most, hidden)] * 2, *[(most, hidden)] * 4, (most, rows)]
        return footprint(*dims, (most, state), itemsize=itemsize)

    def __call__(self) -> None:
        """Walk back."""
        steps = {RecurrentMode.LSTM: self._lstm, RecurrentMode.GRU: self._gru}
        step = steps.get(self._mode, self._plain)
        walked, dh, mask = self._walked, self._given["dh"], self._mask
        dy, gates, slopes = walked.get("dy"), walked["gates"], walked.get("slopes")
        (times, backwards), count = self._turn, len(gates)
        numbers = range(times.start, times.stop)
        for time in numbers if backwards else reversed(numbers):
            earlier = time + 1 if backwards else time - 1
            before = earlier if 0 <= earlier < count else None
            inside: Any = True if mask is None else mask[time]
            if dy is not None:
                np.add(dh, dy[time], dh, where=inside)
            step(time, before, inside)
            if mask is not None:
                np.copyto(gates[time], 0, where=~mask[time])
            if slopes is not None:
                self._note(slopes[time], gates[time], inside)
            np.copyto(dh, self._new, where=inside)

    def _note(self, slopes: Floats, gates: Floats, inside: Any) -> None:
        """Store what `RecurrentBackwardWeights` reads of a step."""
        count, (batch, kept, hidden) = self._mode.gates, slopes.shape
        np.copyto(slopes[:, :count], gates.reshape(batch, count, hidden))
        if kept > count:
            np.copyto(slopes[:, count:], 0)
        if self._mode is RecurrentMode.GRU:
            np.copyto(slopes[:, 3], self._of_state[:, 2 * hidden :], where=inside)
        elif "w_hr" in self._given:
            np.copyto(slopes[:, 4], self._kept[5], where=inside)
            np.copyto(slopes[:, 5, : self._new.shape[1]], self._given["dh"], where=inside)

    def _load_before(self, values: Floats, before: int | None, first: Floats | None) -> Floats:
        """Values of the step before, or `first`, None for 0, where a sequence has none."""
        found, start = self._before, 0 if first is None else first
        if before is None:
            np.copyto(found, start)
        else:
            np.copyto(found, values[before])
            if self._mask is not None:
                np.copyto(found, start, where=~self._mask[before])
        return found

    # The steps: the gradients of the input's part of the gates, and of the state before.

    def _plain(self, time: int, before: int | None, inside: Any) -> None:
        del before, inside
        h, factor, gates = self._kept[0], self._factors[0], self._walked["gates"][time]
        np.copyto(h, self._walked["reserve"][time, :, 0])
        if self._mode is RecurrentMode.RELU:
            np.greater(h, 0, factor)
        else:
            np.multiply(h, h, factor)
            np.subtract(1, factor, factor)
        np.multiply(self._given["dh"], factor, gates)
        np.matmul(gates, self._given["w_hh"], self._new)

    def _lstm(self, time: int, before: int | None, inside: Any) -> None:
        given, reserve, gates = self._given, self._walked["reserve"], self._walked["gates"][time]
        count, factors, slopes, cell, spare = (
            reserve.shape[2],
            self._factors,
            self._slopes,
            self._cell,
            self._spare,
        )
        np.copyto(self._kept[:count], reserve[time].swapaxes(0, 1))
        i, f, g, o, c = self._kept[:5]
        earlier = self._load_before(reserve[:, :, 4], before, given.get("c0"))
        if "w_hr" in given:
            np.matmul(given["dh"], given["w_hr"], self._full)
        np.tanh(c, cell)
        np.multiply(self._full, cell, slopes[3])
        np.multiply(cell, cell, cell)
        np.subtract(1, cell, cell)
        np.multiply(cell, o, cell)
        np.multiply(cell, self._full, cell)
        np.add(given["dc"], cell, cell)
        for one, other in ((g, slopes[0]), (earlier, slopes[1]), (i, slopes[2])):
            np.multiply(cell, one, other)
        np.subtract(1, self._kept[:4], factors)
        np.multiply(factors, self._kept[:4], factors)
        np.multiply(g, g, factors[2])
        np.subtract(1, factors[2], factors[2])
        np.multiply(slopes, factors, slopes)
        batch, hidden = cell.shape
        np.copyto(gates.reshape(batch, 4, hidden), slopes.swapaxes(0, 1))
        np.matmul(gates, given["w_hh"], self._new)
        np.multiply(cell, f, spare)
        np.copyto(given["dc"], spare, where=inside)

    def _gru(self, time: int, before: int | None, inside: Any) -> None:
        del inside
        given, gates, factors, spare = self._given, self._walked["gates"][time], self._factors, self._spare
        dr, dz, dn = self._slopes[:3]
        dh, (batch, hidden) = given["dh"], given["dh"].shape
        np.copyto(self._kept[:4], self._walked["reserve"][time].swapaxes(0, 1))
        r, z, n, q = self._kept[:4]
        earlier = self._load_before(self._walked["y"], before, given.get("h0"))
        np.subtract(1, self._kept[:2], factors[:2])
        np.multiply(dh, factors[1], dn)
        np.multiply(factors[:2], self._kept[:2], factors[:2])
        np.multiply(n, n, factors[2])
        np.subtract(1, factors[2], factors[2])
        np.multiply(dn, factors[2], dn)
        np.multiply(dn, q, dr)
        np.subtract(earlier, n, dz)
        np.multiply(dz, dh, dz)
        np.multiply(self._slopes[:2], factors[:2], self._slopes[:2])
        np.copyto(gates.reshape(batch, 3, hidden), self._slopes[:3].swapaxes(0, 1))
        of_state = self._of_state
        np.copyto(of_state, gates)
        np.multiply(dn, r, of_state[:, 2 * hidden :])
        np.matmul(of_state, given["w_hh"], self._new)
        np.multiply(dh, z, spare)
        np.add(self._new, spare, self._new)


@dataclass(frozen=True)
class _OfWeights:
    node: RecurrentBackwardWeights[Any]

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch of a lane: none."""
        del lanes
        return 0

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        steps: list[Step] = []
        x, y, slopes = operands["x"], operands["y"], operands["slopes"]
        (count, batch, _), directions = x.shape, len(slopes)
        state, gates = y.shape[2] // directions, self.node.mode.gates
        keep = lanes[0].keep
        inputs = _rows(x, steps, lanes)
        ones = keep((1, count * batch), x.dtype)
        steps.append((partial(ones.fill, 1),))
        mask = within(self.node, count, batch)
        for way in range(directions):
            own, first = slopes[way], operands["h0"][way] if "h0" in operands else None
            states = keep((count, batch, state), x.dtype)
            steps.append((_Earlier(y[:, :, way * state : (way + 1) * state], first, states, mask, way),))
            packed = [_gates(own, slice(0, gates), steps, lanes)]
            if self.node.mode is RecurrentMode.GRU:  # the state's part of n has a gradient of its own
                packed.append(_gates(own, [0, 1, 3], steps, lanes))
            of_input, of_state = packed[0], packed[-1]
            steps += product_steps(of_input.T, inputs, results["dw_ih"][way], lanes)
            steps += product_steps(of_state.T, states.reshape(-1, state), results["dw_hh"][way], lanes)
            if "dbias" in results:
                for number, each in enumerate((of_input, of_state)):
                    steps += product_steps(ones, each, results["dbias"][way, number][None], lanes)
            if "dw_hr" in results:
                full = _gates(own, slice(4, 5), steps, lanes)
                of_projection = _gates(own, slice(5, 6), steps, lanes)[:, :state]
                steps += product_steps(of_projection.T, full, results["dw_hr"][way], lanes)
        return steps


def _rows(array: Floats, steps: list[Step], lanes: Sequence[Scratch]) -> Floats:
    """An array of dims (T, B, n) as a matrix of T * B rows; a copy, which a step makes, if it takes one."""
    joined = joined_axes(array, range(2))
    found = None if joined is None else as_blas_takes_it(joined)
    if found is None:
        found = lanes[0].keep((array.shape[0] * array.shape[1], array.shape[2]), array.dtype)
        steps.append(copy_step(array, found.reshape(array.shape), len(lanes)))
    return found


def _gates(slopes: Floats, which: slice | list[int], steps: list[Step], lanes: Sequence[Scratch]) -> Floats:
    """Some of what slopes have for each unit, dims (T, B, K, H), as a matrix of T * B rows."""
    if isinstance(which, slice):
        joined = joined_axes(slopes[:, :, which], range(2, 4))
        if joined is not None:
            return _rows(joined, steps, lanes)
        which = [*range(which.start, which.stop)]
    steps_, batch, _, hidden = slopes.shape
    copied = lanes[0].keep((steps_, batch, len(which), hidden), slopes.dtype)
    for number, place in enumerate(which):
        steps.append(copy_step(slopes[:, :, place], copied[:, :, number], len(lanes)))
    return copied.reshape(steps_ * batch, len(which) * hidden)


class _Earlier:
    """A call that copies the state before each step.

    Parameters
    ----------
    y
        The states of a direction, dims (T, B, P).
    first
        That before the first step; None for 0.
    into
        Where they are copied.
    mask
        Which sequences have a step; None if all have all of them.
    way
        The direction.
    """

    def __init__(self, y: Floats, first: Floats | None, into: Floats, mask: Mask | None, way: int) -> None:
        self._first = np.zeros((), y.dtype) if first is None else first
        behind, before = (slice(1, None), slice(None, -1)) if way == 0 else (slice(None, -1), slice(1, None))
        self._into, self._from = into[behind], y[before]
        self._at_first = into[0 if way == 0 else -1]
        self._outside = None if mask is None else ~mask[before]

    def __call__(self) -> None:
        """Copy."""
        np.copyto(self._at_first, self._first)
        np.copyto(self._into, self._from)
        if self._outside is not None:
            np.copyto(self._into, self._first, where=self._outside)
