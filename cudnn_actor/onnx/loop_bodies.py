"""The body of a `Loop` or a `Scan` as the body of a loop in the service: see `cudnn_actor.Loop`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cudnn_actor.models.source import Step, Weight
from cudnn_actor.onnx.crossings import PartImport
from cudnn_actor.onnx.loops import NotALoop, Turns
from cudnn_actor.onnx.places import Part, Unknowable
from cudnn_actor.onnx.ports import key_of
from cudnn_actor.onnx.values import OfLoop, Undecided, Value
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.messages.run_loop import MOST_TURNS, Loop
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec

__all__ = ["BodyImport", "LoopMade"]

_NUMBER, _GOES_ON = "turn", "goes on"


class _Fed(NamedTuple):
    """An input of the body with a new value in each turn: its port, its value, and the value for the first
    turn."""

    port: str
    value: Value
    first: Value | np.ndarray | None


@dataclass(frozen=True, eq=False, kw_only=True)
class LoopMade:
    """A loop that was made of a node.

    Parameters
    ----------
    step
        The step that runs the loop.
    weights
        The step's inputs that are constants, as in `Specialised`.
    results
        The cells of the states after the last turn, and of the rows, with their values.
    count
        The cell that says how many turns ran, if the data decides that and there are rows; else empty.
    """

    step: Step
    weights: dict[str, tuple[str, Weight]]
    results: Sequence[tuple[str, TensorSpec]]
    count: str


@dataclass(eq=False, kw_only=True)
class BodyImport:
    """One attempt to import a body.

    Parameters
    ----------
    turns
        The turns of the loop.
    outer
        The graph in which the node stands.
    part
        The part to which the body is added. It has the names around the body that the body reads.
    kept
        The numbers of the states that the body does not read by itself. A choice hands them on, so that they
        are inputs all the same: after a loop without a turn, a state has its first value.
    """

    turns: Turns
    outer: PartImport
    part: PartImport
    kept: frozenset[int]
    _outputs: dict[str, Value] = field(default_factory=dict)
    """Ports → the results of a turn."""
    _carried: dict[str, str] = field(default_factory=dict)

    def make_loop(self) -> LoopMade | frozenset[int]:
        """Make the loop. Returns it, or the states that have to be in `kept`. Raises `NotALoop`, and
        `Undecided`."""
        turns, part = self.turns, self.part
        number = _Fed(*part.feed(_NUMBER, (), DType.INT64), np.array(0))
        goes_on = _Fed(*part.feed(_GOES_ON, (), DType.BOOL), self._condition())
        names = [each.name for each in turns.body.input[2 * turns.numbered :]]
        count = len(turns.states)
        states = [self._feed(*each) for each in zip(names, turns.states, strict=False)]
        rows = [self._feed(*each, row=True) for each in zip(names[count:], turns.rows, strict=False)]
        begin = [number.value, goes_on.value] if turns.numbered else []
        results = self._turn([*begin, *(each.value for each in (*states, *rows))])
        decides = turns.numbered and self._decides(results[0], goes_on)
        if turns.numbered:
            after = results.pop(0)
            if decides:
                self._carry(goes_on, part.inline.compute("And", self._scalar(after), goes_on.value))
        counts = decides and len(results) > count
        for each in results:
            if not each.is_constant:
                _ = each.tensor  # a result that is the turn's number has it in the graph
        if number.value.is_in_graph or counts:
            one = part.inline.constant(np.array(1))
            self._carry(number, part.inline.compute("Add", number.value, one))
        self._hand_on(results, states, goes_on.value)
        ports = list(self._outputs)[-len(results) :] if results else []
        return self._loop_of(number, goes_on, states, rows, ports, decides=decides, counts=counts)

    # The inputs of a turn.

    def _condition(self) -> Value | np.ndarray:
        """The condition for the first turn: an array, if it is known."""
        given = self.turns.condition
        if given is None:
            return np.array(True)
        try:
            known = bool(given.array.reshape(()))
        except (OfLoop, Undecided):
            return self.outer.inline.compute("Squeeze", given) if given.rank else given
        if not known:
            raise NotALoop("has no turn")
        return np.array(True)

    def _feed(self, name: str, of: Value, *, row: bool = False) -> _Fed:
        precision = self.outer.imports.precision
        first = of if precision is None or of.is_constant else precision.wide(of)
        dtype = first.known_dtype if precision is None else precision.dtype_in_loops(first)
        if dtype is None:
            raise NotALoop(f"has {name!r} of {of.dtype}, which no tensor has")
        return _Fed(*self.part.feed(name, first.dims[row:], dtype), first)

    def _turn(self, given: list[Value | None]) -> list[Value]:
        """The results of the body."""
        imports = self.part.imports
        try:
            found = imports.inline_graph(self.turns.body, given, self.part.place)
        except Unknowable:
            found = []
        if imports.problems:
            raise NotALoop("; ".join(imports.problems))
        if imports.undecided:
            raise Undecided(frozenset(imports.undecided))
        if not found:
            raise NotALoop("has a body that gives nothing")
        return found

    def _scalar(self, condition: Value) -> Value:
        return self.part.inline.compute("Squeeze", condition) if condition.rank else condition

    def _decides(self, after: Value, goes_on: _Fed) -> bool:
        """Whether computed values decide after which turn the loop ends."""
        same = after is goes_on.value or (after.is_constant and bool(after.elements.reshape(())))
        decides = not (same and isinstance(goes_on.first, np.ndarray))
        if not decides and not self.turns.bounded:
            raise NotALoop(f"does not end within {MOST_TURNS:,} turns, the most that a loop has")
        stacked = len(self.turns.finish)
        if decides and stacked and not self.turns.bounded:
            raise NotALoop(
                "has an output with a row for each turn, and nothing that bounds their number: give it the "
                "trip count M"
            )
        return decides

    # The outputs of a turn.

    def _hand_on(self, results: Sequence[Value], states: Sequence[_Fed], goes_on: Value) -> None:
        """Make outputs of a turn's results."""
        precision = self.part.imports.precision
        for number, value in enumerate(results):
            state = states[number] if number < len(states) else None
            if state is not None and (value.dims, value.dtype) != (state.value.dims, state.value.dtype):
                self._check_alike(state.value, value)
            made = value
            if value.is_constant or number in self.kept:
                other = value if state is None else state.value
                made = self.part.inline.compute("Where", goes_on, value, other)
            made = made if precision is None else precision.wide(made)
            if state is None:
                self._output(made)
            else:
                self._carry(state, made)

    def _check_alike(self, before: Value, after: Value) -> None:
        if before.dims != after.dims:
            raise NotALoop(f"has a state of dims {before.dims}, which are {after.dims} after a turn")
        if self.part.imports.precision is None:
            raise NotALoop(f"has a state of {before.dtype}, which is {after.dtype} after a turn")

    def _output(self, value: Value) -> str:
        if not value.size:
            raise NotALoop("has an output without elements")
        port = self.part.new_name("after a turn")
        self._outputs[port] = value
        return port

    def _carry(self, fed: _Fed, value: Value) -> None:
        self._carried[fed.port] = self._output(value)

    # The end.

    def _loop_of(
        self,
        number: _Fed,
        goes_on: _Fed,
        states: Sequence[_Fed],
        rows: Sequence[_Fed],
        results: Sequence[str],
        *,
        decides: bool,
        counts: bool,
    ) -> LoopMade | frozenset[int]:
        made = self._part_of_turn()
        read = {port.name for port in made.graph.inputs}
        missing = {place for place, state in enumerate(states) if state.port not in read}
        if missing - self.kept:
            return frozenset(missing | self.kept)
        fed = [each for each in (number, goes_on, *states, *rows) if each.port in read]
        reads, weights = self.part.reads(made), dict(made.weights)
        for each in fed:
            self._begin(each, reads, weights)
        try:
            loop = Loop(
                body=made.graph,
                carried={port: after for port, after in self._carried.items() if port in read},
                scanned=tuple(each.port for each in rows if each.port in read),
                condition=goes_on.port if decides else None,
            )
            specs = loop.specs(self.turns.count)
        except InvalidRequest as error:
            raise NotALoop(f"{error.field}: {error.value} {error.problem}") from error
        step = Step(
            run=loop,
            reads=reads,
            turns=self.turns.count,
            ends="" if self.turns.bounded else self._carried[goes_on.port],
            label=self.part.place.label,
        )
        return LoopMade(
            step=step,
            weights=weights,
            results=[(port, specs[port]) for port in results],
            count=self._carried[number.port] if counts else "",
        )

    def _part_of_turn(self) -> Part:
        g = self.part.imports.g
        outputs = {port: g.to_layout(value.tensor, Layout.NCHW) for port, value in self._outputs.items()}
        made = self.part.imports.outputs.part(outputs)
        if made.random is not None:
            raise NotALoop("draws random numbers")
        return made

    def _begin(self, fed: _Fed, reads: dict[str, str], weights: dict[str, tuple[str, Weight]]) -> None:
        """Set the value for the first turn, or the rows for all turns: a constant, or the value in a cell."""
        first = fed.first
        assert first is not None
        if isinstance(first, Value) and not first.is_constant:
            reads[fed.port] = self.outer.cell(first, fed.port)
            return
        array = first.elements if isinstance(first, Value) else first
        dtype = fed.value.known_dtype
        assert dtype is not None
        weights[fed.port] = key_of(array, dtype), array  # a loop only reads the values for its first turn
