"""A model with loops that are too long to be unrolled: it is cut into graphs and loops, which run in order.

A loop is unrolled if its turns are known and few: one graph is faster than several. Otherwise, the nodes
before the loop become one graph, its body becomes the body of a loop in the service, and the nodes after it
become another graph.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import onnx

from cudnn_actor.models.errors import InvalidModel, UnsupportedModel
from cudnn_actor.models.source import NeedsValues, Specialised, Step, Weight
from cudnn_actor.onnx.budget import Recorded, TooManyOperations
from cudnn_actor.onnx.crossings import PartImport
from cudnn_actor.onnx.importing import MALFORMED, Import
from cudnn_actor.onnx.loop_bodies import BodyImport, LoopMade
from cudnn_actor.onnx.loops import NotALoop, Turns, is_loop, turns_of
from cudnn_actor.onnx.places import UNKNOWN, Misfit, Unknowable, Unknown, reason_of
from cudnn_actor.onnx.reading import ModelFile, label_of, read_by
from cudnn_actor.onnx.schemas import schema_for
from cudnn_actor.onnx.unrolling import TooManyTurns
from cudnn_actor.onnx.values import Contradiction, Declined, Empty, OfLoop, Undecided
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["specialise"]

_MOST_LOOPS = 256
"""Each is two imports more, in which all names that are read behind it are looked at."""


def specialise(
    file: ModelFile,
    specs: Mapping[str, TensorSpec],
    values: Mapping[str, np.ndarray],
    most_operations: int,
    *,
    recorded: Recorded | None = None,
) -> Specialised:
    """See `Source.specialise`; `recorded`: how many operations each graph may add.

    Raises as `Import.specialise`.
    """
    given = (file, specs, values, most_operations)
    if not any(map(is_loop, file.nodes)):
        return Import(*given, recorded=recorded).specialise()
    cutting = _Cutting(*given, recorded=recorded, by_data=True)
    try:
        return cutting.specialise()
    except UnsupportedModel:
        if not cutting.cut_by_data:
            raise
    # When a loop ends can be known, if all inputs are known that decide it.
    return _Cutting(*given, recorded=recorded, by_data=False).specialise()


class _Rows(NamedTuple):
    """An output of a loop of which only the first rows count: its cell, and the cell that says how many
    rows."""

    cell: str
    number: str


class _NotUnrolled(NamedTuple):
    """Why a loop is not unrolled: in words, that it has too many turns; or that values are missing, so that
    the data says after which turn it ends."""

    too_many: str = ""
    by_data: bool = False


class _Cutting:
    """One import of a model that may be cut.

    `by_data`: whether a loop that computed values end becomes a loop in the service. If not, it is unrolled,
    for given values of the inputs that decide its end.
    """

    def __init__(
        self,
        file: ModelFile,
        specs: Mapping[str, TensorSpec],
        values: Mapping[str, np.ndarray],
        most_operations: int,
        *,
        recorded: Recorded | None,
        by_data: bool,
    ) -> None:
        self._file, self._by_data = file, by_data
        self._new = functools.partial(Import, file, specs, values, most_operations, recorded=recorded)
        self._most = most_operations
        few = most_operations if file.limits.unrolled is None else file.limits.unrolled
        self._few = min(few, most_operations, sys.maxsize if recorded is None else recorded.operations // 2)
        """How many operations a graph may have by unrolling a loop that could become a loop in the
        service."""
        self._first = self._new()
        names = [each.name for each in (*file.inputs, *file.defaults) if each.name in specs]
        self._cells = {name: self._first.ports.name(name) for name in names}
        self._parts = [PartImport(self._first, self._cells)]
        self._order: list[PartImport | LoopMade] = [self._parts[0]]
        self._read_last = {name: number for number, node in enumerate(file.nodes) for name in read_by(node)}
        """Names → the number of the last node that reads them."""
        self._rows: dict[str, _Rows] = {}
        """Outputs of the model that have as many rows as a loop had turns."""
        self.cut_by_data = False
        """Whether a loop has become a loop in the service because the data decides when it ends."""

    def specialise(self) -> Specialised:
        """The model for these inputs."""
        try:
            for number in range(len(self._file.nodes)):
                self._add(number)
        except Misfit as misfit:
            raise misfit.error from misfit
        except TooManyOperations:
            if not any(part.imports.problems for part in self._parts):
                raise
        problems = [each for part in self._parts for each in part.imports.problems]
        if problems:
            raise UnsupportedModel(nodes=list(dict.fromkeys(problems)))
        undecided = {name for part in self._parts for name in part.imports.undecided}
        if undecided:
            raise NeedsValues(undecided)
        if len(self._parts) == 1:
            return self._first.outputs.finish(self._parts[0].place.names)
        return self._finish()

    # Nodes.

    @property
    def _part(self) -> PartImport:
        """The part to which nodes are added now."""
        return self._parts[-1]

    def _add(self, number: int) -> None:
        """Add a node, by its number: to the graph, or as a loop behind it."""
        node = self._file.nodes[number]
        imports, place = self._part.imports, self._part.place
        if not is_loop(node):
            imports.walk([node], place)
            return
        few = self._try_unrolled(node, self._few)
        if few is None:
            return
        why = self._try_loop(number, few) if few.too_many or (few.by_data and self._by_data) else ""
        if why is None:
            return
        many = self._try_unrolled(node, self._most) if few.too_many and self._few < self._most else few
        if many is None:
            return
        if many.too_many:
            label = label_of(node)
            imports.problems[f"{label}: {many.too_many}; nor can it run as a loop: {why}"] = None
            place.names.update(dict.fromkeys(filter(None, node.output), UNKNOWN))
        else:
            imports.walk([node], place)  # this raises an error that says what is missing

    def _try_unrolled(self, node: onnx.NodeProto, most: int) -> _NotUnrolled | None:
        """Unroll a node, if that adds at most `most` operations. Returns why it was not unrolled; None if it
        was."""
        imports, place = self._part.imports, self._part.place
        before = dict(imports.problems), set(imports.undecided)
        try:
            imports.walk([node], replace(place, unrolled=most))
        except TooManyTurns as error:
            found = _NotUnrolled(too_many=str(error))
        except (OfLoop, Undecided, Unknowable) as error:
            known = isinstance(error, Unknowable) and imports.undecided == before[1]
            found = _NotUnrolled(by_data=not known)
        else:
            return None
        imports.problems, imports.undecided = before
        return found

    def _try_loop(self, number: int, unrolled: _NotUnrolled) -> str | None:
        """Add a node as a loop in the service. Returns why that is impossible; None if it was added, or will
        be for known values."""
        imports, names, node = self._part.imports, self._part.place.names, self._file.nodes[number]
        try:
            self._end_at_loop(number)
        except InvalidModel:  # which is a ValueError
            raise
        except Contradiction as error:
            raise InvalidModel(where=label_of(node), problem=str(error)) from error
        except Undecided as needs:
            imports.undecided |= needs.names
            names.update(dict.fromkeys(filter(None, node.output), UNKNOWN))
        except (Declined, Empty, InvalidRequest, *MALFORMED) as error:
            return reason_of(error)
        else:
            self.cut_by_data |= unrolled.by_data
        return None

    def _end_at_loop(self, number: int) -> None:
        """End the graph at a node, which becomes a loop, and begin the next one."""
        if self._file.swappable:
            raise NotALoop("weights cannot be overwritten between its turns; load it without swappable=True")
        if len(self._order) > 2 * _MOST_LOOPS:
            raise NotALoop(f"there are {_MOST_LOOPS} before it, the most that a model may have")
        part, node = self._part, self._file.nodes[number]
        inputs = part.imports.inputs_of(node, part.place, label_of(node))
        assert not isinstance(inputs, Unknown), "else its results are unknown, and it is not tried as a loop"
        schema = schema_for(node, part.place.opsets)
        assert schema is not None, "its operator is ONNX's"
        turns = turns_of(part.imports.view(node, schema, inputs, part.place), part.inline)
        made = self._loop(node, turns)
        names = list(node.output)
        if made.count and any(name in self._read_last for name in filter(None, names[len(turns.states) :])):
            raise NotALoop("has as many rows as turns, which its data decides, and other nodes read them")
        behind = PartImport(self._new(beside=self._first), self._cells)
        # The names that exist now are checked, not the names that all later nodes read: these may be many
        # more.
        wanted = [name for name in part.place.names.maps[0] if self._read_last.get(name, -1) > number]
        behind.take([*wanted, *(each.name for each in self._file.outputs)], part)
        rows: dict[str, _Rows] = {}
        for place, (name, (cell, spec)) in enumerate(zip(names, made.results, strict=True)):
            row = place - len(turns.states)
            if row >= 0 and made.count:
                rows[name] = _Rows(cell, made.count)
                continue
            value = behind.result(name, spec.dims, spec.dtype, cell)
            if name:
                behind.place.names[name] = turns.finish[row](behind.inline, value) if row >= 0 else value
        # All that can fail is done: had it failed, the graph before the node would go on.
        self._rows.update(rows)
        self._parts.append(behind)
        self._order += [made, behind]

    def _loop(self, node: onnx.NodeProto, turns: Turns) -> LoopMade:
        outer, kept = self._part, frozenset[int]()
        while True:
            part = PartImport(self._new(beside=self._first), self._cells, label_of(node))
            part.take(read_by(node), outer)
            made = BodyImport(turns=turns, outer=outer, part=part, kept=kept).make_loop()
            if isinstance(made, LoopMade):
                return made
            kept = made

    # The end.

    def _finish(self) -> Specialised:
        outputs, constants = self._outputs()
        wanted = {*outputs.values(), *(each.number for each in self._rows.values())}
        steps: list[Step] = []
        weights: dict[str, tuple[str, Weight]] = {}
        for each in reversed(self._order):
            step, own = self._step(each, wanted)
            if step is not None:
                wanted.update((*step.reads.values(), step.ends))
                steps.insert(0, step)
                weights.update(own)
        return Specialised(
            graph=None,
            inputs={name: cell for name, cell in self._cells.items() if cell in wanted},
            outputs=outputs,
            weights=weights,
            constants=constants,
            steps=steps,
            rows={name: self._rows[name].number for name in outputs if name in self._rows},
        )

    def _step(
        self, of: PartImport | LoopMade, wanted: set[str]
    ) -> tuple[Step | None, Mapping[str, tuple[str, Weight]]]:
        """The step that fills the wanted cells of a part, with its weights; None if it would fill none."""
        if isinstance(of, LoopMade):
            return (of.step, of.weights) if not wanted.isdisjoint(of.step.outputs) else (None, {})
        made = of.part(wanted)
        if made is None:
            return None, {}
        graph, reads = made
        if graph.random is not None:
            raise UnsupportedModel(
                nodes=["the graph: draws random numbers beside a loop that is not unrolled"]
            )
        return Step(run=graph.graph, reads=reads), graph.weights

    def _outputs(self) -> tuple[dict[str, str], dict[str, np.ndarray]]:
        """The cells of the model's outputs, and the outputs that are known. Each output has a cell of its
        own, and none is an input's."""
        part = self._part
        outputs: dict[str, str] = {}
        constants: dict[str, np.ndarray] = {}
        for feature in self._file.outputs:
            if feature.name in self._rows:
                outputs[feature.name] = self._rows[feature.name].cell
                continue
            found = part.imports.outputs.output(feature, part.place.names)
            if isinstance(found, np.ndarray):
                constants[feature.name] = found
                continue
            value, tensor = found
            cell = part.cell(value, feature.name) if tensor is value.tensor else ""
            if not cell or part.is_input(cell) or cell in outputs.values():
                cell = part.fill(tensor, feature.name)
            outputs[feature.name] = cell
        return outputs, constants
