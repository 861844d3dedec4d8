"""One graph of a model that is cut, and the values that it reads of the other graphs.

A value that one graph computes and another reads is in a cell: see `Step`. A value that is known when the
model is imported is known in all graphs, and needs no cell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from cudnn_actor.onnx.importing import Import, Inline
from cudnn_actor.onnx.lists import Listed
from cudnn_actor.onnx.places import Part, Place, Unknown
from cudnn_actor.onnx.values import Declined, OfLoop, Pending, Value
from cudnn_actor.protocol.graphs.graph_builder import Tensor
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout

__all__ = ["PartImport"]


class PartImport:
    """The import of one graph: between two loops, or of one turn of a loop.

    Parameters
    ----------
    imports
        The import, to which nothing was added yet.
    cells
        The cells of the model's inputs, by their names.
    label
        The name of the node whose body the graph is, for people; empty for a graph between loops.
    """

    def __init__(self, imports: Import, cells: Mapping[str, str], label: str = "") -> None:
        self.imports = imports
        self.place: Place = imports.beginning(label)
        self._inputs = cells
        self._reads: dict[str, str] = {}
        """The graph's ports for values that other graphs have computed → the cells."""
        self._cells: dict[int, tuple[Value, Callable[[], str]]] = {}
        """Values that lie in a cell, or may be put into one, by id, with a function that returns the cell."""
        self._given: dict[str, Tensor] = {}
        """The cells that this graph may fill → the tensors in them."""
        for name in cells:
            value = self.place.names.get(name)
            if isinstance(value, Value) and imports.ports.is_packed_input(value):
                self._lies_in(value, functools.partial(cells.__getitem__, name))

    @property
    def inline(self) -> Inline:
        """The object that adds operators to the graph."""
        return Inline(self.imports, self.place)

    def new_name(self, name: str) -> str:
        """A name for a port that no other port of any graph of the model has."""
        return self.imports.ports.name(name or "value")

    def _lies_in(self, value: Value, cell: Callable[[], str]) -> None:
        self._cells[id(value)] = value, cell  # with the value, so that no other object gets its id

    # Values of earlier graphs, which this one reads.

    def take(self, names: Iterable[str], of: PartImport) -> None:
        """Let these names stand for the values that they have in an earlier graph."""
        own = self.place.names
        for name in names:
            if name in of.place.names and name not in own:
                own[name] = self.bring(of.place.names[name], of, name)

    def bring(self, value: Value | Unknown | None, of: PartImport, name: str) -> Value | Unknown | None:
        """A value of an earlier graph, in this one."""
        if isinstance(value, Listed):
            found = [self.bring(each, of, name) for each in value.values]
            return Listed([each for each in found if isinstance(each, Value)])
        if not isinstance(value, Value):
            return value
        if value.fixed or value.is_constant:
            return self.imports.ports.constant(value.elements, fixed=value.fixed, key=value.key, name=name)
        known = Pending([value], lambda: value.array)
        made = self._moved_value(name, value.dims, value.dtype, lambda: of.cell(value, name), known)
        made.standing = value.standing
        return made

    def result(self, name: str, dims: tuple[int, ...], dtype: DType, cell: str) -> Value:
        """The value that a loop has left in a cell."""
        return self._moved_value(name, dims, dtype.numpy, lambda: cell, lambda: _unknown(name))

    def _moved_value(
        self,
        name: str,
        dims: tuple[int, ...],
        dtype: np.dtype[Any],
        cell: Callable[[], str],
        elements: Pending | Callable[[], np.ndarray],
    ) -> Value:
        def tensor() -> Tensor:
            known = DType.of(dtype)
            if known is None:
                raise Declined(f"reads a tensor of {dtype} across a loop")
            port = self.new_name(name)
            self._reads[port] = cell()
            return self.imports.g.input(port, dims, known)

        made = Value(dims, dtype, tensor, elements)
        self._lies_in(made, cell)
        return made

    def feed(self, name: str, dims: tuple[int, ...], dtype: DType) -> tuple[str, Value]:
        """A port for an input of each turn of a loop, and its value."""
        port = self.new_name(name)
        made = Value(
            dims, dtype.numpy, lambda: self.imports.g.input(port, dims, dtype), lambda: _unknown(name)
        )
        return port, made

    # Values of this graph, which later graphs read.

    def cell(self, value: Value, name: str) -> str:
        """The cell in which later graphs find a value of this one that is no constant."""
        if id(value) not in self._cells:
            cell = self.fill(value.tensor, name)
            self._lies_in(value, lambda: cell)
        return self._cells[id(value)][1]()

    def fill(self, tensor: Tensor, name: str) -> str:
        """A cell that the graph fills with a tensor, as far as it is read."""
        cell = self.new_name(name)
        self._given[cell] = tensor
        return cell

    def is_input(self, cell: str) -> bool:
        """Whether a cell holds an input of the model."""
        return cell in self._inputs.values()

    def part(self, wanted: Iterable[str]) -> tuple[Part, dict[str, str]] | None:
        """The graph that fills those cells of `wanted` that are its own, and its reads, as in `Step`.

        None if no cell of `wanted` is its own.
        """
        chosen = set(wanted)
        outputs = {cell: tensor for cell, tensor in self._given.items() if cell in chosen}
        if not outputs:
            return None
        g = self.imports.g
        made = self.imports.outputs.part(
            {cell: g.to_layout(each, Layout.NCHW) for cell, each in outputs.items()}
        )
        return made, self.reads(made)

    def reads(self, made: Part) -> dict[str, str]:
        """The reads of a graph of this import: ports → cells."""
        read = {port.name for port in made.graph.inputs}
        inputs = {port: self._inputs[name] for name, port in self.imports.ports.inputs(read).items()}
        return {**inputs, **{port: cell for port, cell in self._reads.items() if port in read}}


def _unknown(name: str) -> NoReturn:
    raise OfLoop(f"needs the values of {name!r}, which a loop computes when the model runs")
