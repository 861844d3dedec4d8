"""Control flow that is decided when a model is imported: branches are chosen, and loops are unrolled.

Operators of lists are beside it: `lists`.

https://onnx.ai/onnx/operators/onnx__Scan.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import onnx

from cudnn_actor.onnx.axes import from_front
from cudnn_actor.onnx.lists import LISTS, Computing
from cudnn_actor.onnx.loops import Scanned, scan_inputs, scan_of
from cudnn_actor.onnx.nodes import Node
from cudnn_actor.onnx.schemas import domain_of
from cudnn_actor.onnx.values import Declined, Value

__all__ = ["CONTROL", "Inliner", "is_control"]


class Inliner(Computing, Protocol):
    """The part of an import that control flow needs, at the place of a node."""

    def inline_graph(self, graph: onnx.GraphProto, given: Sequence[Value | None]) -> list[Value]:
        """Import a subgraph on these inputs. Returns its outputs."""


def _if(node: Node, inline: Inliner) -> list[Value]:
    if node.value(0).size != 1:
        raise Declined("has a condition of several elements")
    chosen = bool(node.constant(0).reshape(()))
    return inline.inline_graph(node.attribute("then_branch" if chosen else "else_branch"), [])


def _scan(node: Node, inline: Inliner) -> list[Value]:
    if node.version < 9:
        return _batches(node, inline)
    scan = scan_of(node)
    states, found = _scan_steps(node, inline, scan.states, scan.inputs)
    if not scan.inputs[0].value.dims[scan.inputs[0].axis]:
        steps = [_one_step(inline, each.value, each.axis) for each in scan.inputs]
        return states + _of_no_turn(node, inline, [*states, *steps], [each.axis for each in scan.outputs])
    return states + [
        _stack(inline, parts[::-1] if of.backwards else parts, of.axis)
        for of, parts in zip(scan.outputs, found, strict=True)
    ]


def _batches(node: Node, inline: Inliner) -> list[Value]:
    """The outputs of a scan of version 8, in which each sample of a batch has a sequence of its own."""
    if node.has(0):
        raise Declined("a Scan of version 8 with lengths of sequences")
    scanned = scan_inputs(node)
    values = [node.value(number) for number in range(1, len(node.inputs))]
    backwards = node.attribute("directions") or (0,) * scanned
    batch = values[-1].dims[0]
    if not batch:
        raise Declined("a Scan of version 8 of no samples")
    samples: list[list[Value]] = []
    for sample in range(batch):
        own = [_part(inline, value, 0, sample) for value in values]
        along = [Scanned(value, 0, back) for value, back in zip(own[-scanned:], backwards, strict=True)]
        states, found = _scan_steps(node, inline, own[:-scanned], along)
        samples.append(states + [_stack(inline, each, 0) for each in found])
    return [_stack(inline, each, 0) for each in zip(*samples, strict=True)]


def _scan_steps(
    node: Node, inline: Inliner, states: list[Value], inputs: Sequence[Scanned]
) -> tuple[list[Value], list[list[Value]]]:
    """The last states of a scan, and each output of each step."""
    length = inputs[0].value.dims[inputs[0].axis]
    unrolling = node.unrolling(length, len(node.proto.output) - len(states))
    found: list[list[Value]] = [[] for _ in range(len(node.proto.output) - len(states))]
    for step in range(length):
        parts = [
            _part(inline, each.value, each.axis, length - 1 - step if each.backwards else step)
            for each in inputs
        ]
        made = inline.inline_graph(node.attribute("body"), [*states, *parts])
        unrolling.note_turn()
        states = _note_turn(made, len(states), found)
    return states, found


def _note_turn(made: list[Value], states: int, found: Sequence[list[Value]]) -> list[Value]:
    """The states that a turn gives, which come first. Its other results are appended to `found`."""
    for each, value in zip(found, made[states:], strict=True):
        each.append(value)
    return made[:states]


def _loop(node: Node, inline: Inliner) -> list[Value]:
    if node.has(1) and node.value(1).size != 1:
        raise Declined("has a condition of several elements")
    most = int(node.constant(0).reshape(())) if node.has(0) else None
    going = not node.has(1) or bool(node.constant(1).reshape(()))
    states = [node.value(number) for number in range(2, len(node.inputs))]
    outputs = len(node.proto.output) - len(states)
    found: list[list[Value]] = [[] for _ in range(outputs)]
    step = 0
    unrolling = node.unrolling(most if _always_goes_on(node.attribute("body")) else None, outputs)
    while going and (most is None or step < most):
        begin = [inline.constant(np.array(step, np.int64)), inline.constant(np.array(True))]
        condition, *made = inline.inline_graph(node.attribute("body"), [*begin, *states])
        unrolling.note_turn()
        states = _note_turn(made, len(states), found)
        node.looked |= not condition.fixed
        going = bool(condition.array.reshape(()))
        step += 1
    if not step:
        begin = [inline.constant(np.array(0, np.int64)), inline.constant(np.array(True))]
        return states + _of_no_turn(node, inline, [*begin, *states], [0] * outputs)
    return states + [_stack(inline, each, 0) for each in found]


def _of_no_turn(node: Node, inline: Inliner, given: Sequence[Value], axes: Sequence[int]) -> list[Value]:
    """The stacked outputs of a loop without turns: empty along these axes, with the dims and dtypes of a
    turn."""
    if not axes:
        return []
    made = inline.inline_graph(node.attribute("body"), given)[-len(axes) :]
    return [
        inline.constant(np.empty(_with(each.dims, from_front(axis, each.rank + 1), 0), each.dtype))
        for each, axis in zip(made, axes, strict=True)
    ]


def _with(dims: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    """Dims with one more."""
    return (*dims[:axis], size, *dims[axis:])


def _one_step(inline: Inliner, value: Value, axis: int) -> Value:
    """A stand-in for an element along an axis that has none."""
    return inline.constant(np.zeros((*value.dims[:axis], *value.dims[axis + 1 :]), value.dtype))


def _always_goes_on(body: onnx.GraphProto) -> bool:
    """Whether the condition that a turn is given is the one that it gives."""
    given, name = body.input[1].name, body.output[0].name
    same = {each.output[0]: each.input[0] for each in body.node if each.op_type == "Identity"}
    return bool(same.get(name, name) == given)


def _part(inline: Inliner, value: Value, axis: int, step: int) -> Value:
    """One element of a value along an axis."""
    bounds = [inline.constant(np.array([each], np.int64)) for each in (step, step + 1, axis)]
    return inline.compute("Squeeze", inline.compute("Slice", value, *bounds), bounds[2])


def _stack(inline: Inliner, values: Sequence[Value], axis: int) -> Value:
    """Values along a new axis."""
    if not values:
        raise Declined("has no samples")
    place = inline.constant(np.array([from_front(axis, values[0].rank + 1)], np.int64))
    wide = [inline.compute("Unsqueeze", value, place) for value in values]
    return inline.compute("Concat", *wide, axis=int(place.array[0]))


CONTROL: dict[tuple[str, str], Callable[[Node, Inliner], list[Value]]] = {
    ("", "If"): _if,
    ("", "Loop"): _loop,
    ("", "Scan"): _scan,
    **LISTS,
}
"""Operators with subgraphs, and operators of lists. Which nodes and elements they have is known when a model
is imported."""


def is_control(node: onnx.NodeProto) -> bool:
    """Whether a node's operator is in `CONTROL`."""
    return (domain_of(node), node.op_type) in CONTROL
