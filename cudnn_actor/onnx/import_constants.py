"""The constants of one import: results of nodes whose inputs are constants, and tensors that are read from
the file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import defs

from cudnn_actor.actors.long_work import check_wanted
from cudnn_actor.onnx import operators
from cudnn_actor.onnx.budget import Budget
from cudnn_actor.onnx.expanding import has_body
from cudnn_actor.onnx.folding import fold
from cudnn_actor.onnx.nodes import Node
from cudnn_actor.onnx.origins import keys_of, origins_of
from cudnn_actor.onnx.places import Unknown
from cudnn_actor.onnx.ports import LITTLE, Ports
from cudnn_actor.onnx.schemas import domain_of
from cudnn_actor.onnx.tensors import array_of
from cudnn_actor.onnx.values import Declined, Value

__all__ = ["Constants"]

_LARGE = 1024
"""The result of reading a part of the file is kept if the part has at least this many bytes."""
_T = TypeVar("_T")
_Part = onnx.TensorProto | onnx.NodeProto | onnx.GraphProto | onnx.FunctionProto


class Constants:
    """Makes the constants of one import, within the import's budget.

    Parameters
    ----------
    ports
        The ports, by which constants become inputs of the graph.
    budget
        The budget of the import. `TooMuch` is raised if more would be computed or kept.
    """

    def __init__(self, ports: Ports, budget: Budget) -> None:
        self._ports, self._budget = ports, budget
        self._of_half: dict[tuple[int, np.dtype[Any]], tuple[Value, Value]] = {}
        """Float32 constants that were converted to half types, with their originals, so that no other object
        gets the id of an original."""
        self._once: dict[int, tuple[Any, Any]] = {}
        """Large parts of the file that each turn of a loop or call of a function would read again, by id,
        with the results."""

    def fold(self, view: Node, opsets: Mapping[str, int]) -> Sequence[Value | None] | None:
        """The results of a node whose inputs are all constants. Raises `Declined`.

        None if an input is no constant, or if the node draws random numbers, or has a handler or a body and
        cannot be computed now.
        """
        if view.schema.node_determinism == defs.OpSchema.NodeDeterminism.NonDeterministic:
            return None
        if not all(value is None or value.fixed for value in view.inputs):
            return None
        try:
            if view.op == "Constant":
                return self.read_once(view.proto, functools.partial(self.compute, view, opsets, fixed=True))
            return self.compute(view, opsets, fixed=True)
        except Declined:
            handler = operators.handler_of(domain_of(view.proto), view.op, view.version)
            if handler is None and not has_body(view.schema):
                raise
            return None

    def compute(self, view: Node, opsets: Mapping[str, int], *, fixed: bool) -> Sequence[Value | None]:
        """A node's results, computed now from the elements of its inputs. `fixed`: see `Ports.constant`."""
        given = [None if value is None else value.elements for value in view.inputs]
        arrays = fold(view.proto, given, opsets, self._budget)
        origins = origins_of(view.proto, view.inputs, opsets)
        large = any(each is not None and each.nbytes > LITTLE for each in arrays)
        keys = keys_of(view.proto, view.inputs, opsets) if large else [""] * len(arrays)
        found = [
            None
            if each is None
            else self._ports.constant(
                each, fixed=fixed, key=key if each.nbytes > LITTLE else "", origin=origin
            )
            for each, key, origin in zip(arrays, keys, origins, strict=True)
        ]
        if view.op == "Transpose" and found[0] is not None and found[0].rank == 2:
            of, turns = view.value(0), view.attribute("perm", (1, 0)) == (1, 0)
            # At most one step back, so that no reader has to follow a chain.
            found[0].turned_from = of if turns and of.turned_from is None else None
        return found

    def in_half(self, value: Value, dtype: np.dtype[Any], name: str) -> Value:
        """A float32 constant in a half type: one for all nodes that read it."""
        key = id(value), dtype
        if key not in self._of_half:
            self._budget.keep(value.size * dtype.itemsize)
            half = self._ports.convert(value, dtype, name)
            self._of_half[key] = value, half
        return self._of_half[key][1]

    def of_graph(self, graph: onnx.GraphProto) -> dict[str, Value | Unknown | None]:
        """The initialisers of a subgraph."""
        found: dict[str, Value | Unknown | None] = {}
        for tensor in graph.initializer:
            check_wanted()
            found[tensor.name] = self.read_once(tensor, functools.partial(self._initialiser, tensor))
        return found

    def _initialiser(self, tensor: onnx.TensorProto) -> Value:
        """An initialiser of a subgraph."""
        array = array_of(tensor, f"initialiser {tensor.name!r}")
        self._budget.keep(array.nbytes)
        return self._ports.constant(array, fixed=True)

    def read_once(self, part: _Part, read: Callable[[], _T]) -> _T:
        """The result of reading a part of the file. For a large part, `read` is called only once."""
        if (known := self._once.get(id(part))) is not None:  # first: to measure it takes as long as it is
            return known[1]  # type: ignore[no-any-return]
        found = read()
        if part.ByteSize() >= _LARGE:
            self._once[id(part)] = part, found
        return found
