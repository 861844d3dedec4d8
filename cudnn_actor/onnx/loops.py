"""The turns of a `Loop` or a `Scan`: how often its body runs, on which values, and the values that each turn
hands to the next one.

https://onnx.ai/onnx/operators/onnx__Loop.html, https://onnx.ai/onnx/operators/onnx__Scan.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx

from cudnn_actor.onnx.axes import from_front
from cudnn_actor.onnx.lists import Computing
from cudnn_actor.onnx.nodes import Node
from cudnn_actor.onnx.schemas import domain_of
from cudnn_actor.onnx.values import Refused, Value
from cudnn_actor.protocol.messages.run_loop import MOST_TURNS

__all__ = ["NotALoop", "Scanned", "Turns", "is_loop", "scan_inputs", "scan_of", "turns_of"]


class NotALoop(Refused):
    """Raised for a node whose body cannot run as a loop. Its text says why, for people."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Turns:
    """The turns of one node.

    Parameters
    ----------
    body
        The graph of one turn.
    count
        How many turns there are, or the most that there may be.
    bounded
        Whether there are at most `count` turns.
    numbered
        Whether a turn's inputs begin with its number and the condition, and its outputs with the condition.
    condition
        Whether there is a first turn; None for yes.
    states
        The states, which each turn hands to the next one: their values for the first turn.
    rows
        The values of which each turn gets a row: turn t gets row t.
    finish
        For each output that has a row for each turn: from all rows in the order of the turns to the result.
    """

    body: onnx.GraphProto
    count: int
    bounded: bool
    numbered: bool
    condition: Value | None
    states: Sequence[Value]
    rows: Sequence[Value]
    finish: Sequence[Callable[[Computing, Value], Value]]


def is_loop(node: onnx.NodeProto) -> bool:
    """Whether a node is a `Loop` or a `Scan`."""
    return not domain_of(node) and node.op_type in ("Loop", "Scan")


def turns_of(node: Node, computing: Computing) -> Turns:
    """The turns of a node. Scanned inputs are moved so that they lie in rows. Raises `NotALoop`, and
    `Undecided`."""
    found = _of_loop(node) if node.op == "Loop" else _of_scan(node, computing)
    if not found.count:
        raise NotALoop("has no turn")
    if any(not each.size for each in (*found.states, *found.rows)):
        raise NotALoop("has a state, or an input, without elements")
    return found


def _of_loop(node: Node) -> Turns:
    most = int(node.constant(0).reshape(())) if node.has(0) else None
    states = [node.value(number) for number in range(2, len(node.inputs))]
    stacked = len(node.proto.output) - len(states)
    bounded = most is not None and most <= MOST_TURNS
    return Turns(
        body=node.attribute("body"),
        count=max(0, most) if most is not None and bounded else MOST_TURNS,
        bounded=bounded,
        numbered=True,
        condition=node.value(1) if node.has(1) else None,
        states=states,
        rows=[],
        finish=[lambda _, rows: rows] * stacked,
    )


def _of_scan(node: Node, computing: Computing) -> Turns:
    if node.version < 9:
        raise NotALoop("is of version 8, in which each sample has a sequence of its own")
    scan = scan_of(node)
    rows = [
        _rows_in_order(computing, _with_axis_at(computing, each.value, each.axis, 0), each.backwards)
        for each in scan.inputs
    ]
    counts = {value.dims[0] for value in rows}
    if len(counts) > 1:
        raise NotALoop(f"scans inputs of {', '.join(map(str, sorted(counts)))} steps")
    (count,) = counts
    if count > MOST_TURNS:
        raise NotALoop(f"has {count:,} turns, of which a loop has {MOST_TURNS:,} at most")
    return Turns(
        body=node.attribute("body"),
        count=count,
        bounded=True,
        numbered=False,
        condition=None,
        states=scan.states,
        rows=rows,
        finish=[_finish(each.axis, each.backwards) for each in scan.outputs],
    )


class Scanned(NamedTuple):
    """An input of a `Scan` that is scanned: its value, the axis, counted from the front, and whether the last
    part comes first."""

    value: Value
    axis: int
    backwards: int


class Stacked(NamedTuple):
    """An output of a `Scan` that has a part for each turn: the axis, and whether the last turn's part comes
    first."""

    axis: int
    backwards: int


class Scan(NamedTuple):
    """The states of a `Scan` for the first turn, its scanned inputs, and its stacked outputs."""

    states: list[Value]
    inputs: list[Scanned]
    outputs: list[Stacked]


def scan_of(node: Node) -> Scan:
    """The parts of a `Scan` of version 9 or later. Raises `Refused`, and `Contradiction` for an axis."""
    count = scan_inputs(node)
    states = [node.value(number) for number in range(len(node.inputs) - count)]
    values = [node.value(number) for number in range(len(states), len(node.inputs))]
    stacked = len(node.proto.output) - len(states)
    axes = node.attribute("scan_input_axes") or (0,) * count
    backwards = node.attribute("scan_input_directions") or (0,) * count
    output_axes = node.attribute("scan_output_axes") or (0,) * stacked
    outputs_backwards = node.attribute("scan_output_directions") or (0,) * stacked
    return Scan(
        states,
        [
            Scanned(value, from_front(axis, value.rank), back)
            for value, axis, back in zip(values, axes, backwards, strict=True)
        ],
        [Stacked(*each) for each in zip(output_axes, outputs_backwards, strict=True)],
    )


def scan_inputs(node: Node) -> int:
    """How many inputs are scanned. These are the last ones."""
    count: int = node.attribute("num_scan_inputs")
    if not 1 <= count <= len(node.inputs):
        raise Refused(f"scans {count:,} of {len(node.inputs)} inputs")
    return count


def _finish(axis: int, back: int) -> Callable[[Computing, Value], Value]:
    def finish(computing: Computing, rows: Value) -> Value:
        return _with_axis_at(computing, _rows_in_order(computing, rows, back), 0, from_front(axis, rows.rank))

    return finish


def _with_axis_at(computing: Computing, value: Value, axis: int, to: int) -> Value:
    """A value with one axis at another place."""
    if axis == to:
        return value
    order = [number for number in range(value.rank) if number != axis]
    order.insert(to, axis)
    return computing.compute("Transpose", value, perm=order)


def _rows_in_order(computing: Computing, value: Value, back: int) -> Value:
    """A value whose rows are in the opposite order, if they are wanted so."""
    if not back:
        return value
    bounds = [np.array([each], np.int64) for each in (-1, np.iinfo(np.int64).min, 0, -1)]
    return computing.compute("Slice", value, *map(computing.constant, bounds))
