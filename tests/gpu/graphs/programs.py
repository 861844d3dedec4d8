"""A graph as the program that builds it: inputs with their values, and calls of a `GraphBuilder`.

A graph itself cannot be changed: its dims follow from one another. A program can, and is built anew: so a
failing one is made smaller. It prints as Python.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from cudnn_actor.protocol import (
    DType,
    Graph,
    GraphBuilder,
    InvalidRequest,
    Layout,
    Numerics,
    Operation,
    OperationGraph,
    TensorSpec,
)
from cudnn_actor.protocol.graphs.graph_builder import Tensor

__all__ = ["Built", "Call", "Input", "Of", "Program", "mapped", "operands_of"]


@dataclass(frozen=True)
class Of:
    """A tensor of a program, by its number: in the order in which its statements give them."""

    number: int

    def __repr__(self) -> str:
        return f"t{self.number}"


@dataclass(frozen=True, eq=False)
class Input:
    """An input, its values, and how they lie in memory."""

    name: str
    values: np.ndarray
    layout: Layout = Layout.NCHW
    count: ClassVar[int] = 1

    @property
    def dtype(self) -> DType:
        """The element type."""
        found = DType.of(self.values.dtype)
        assert found is not None
        return found


@dataclass(frozen=True)
class Call:
    """A method of the builder, its arguments, in which tensors are `Of`s, and how many tensors it gives."""

    function: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1


class Built(NamedTuple):
    """A program's graph, the values of its inputs, and its tensors."""

    graph: Graph
    values: dict[str, np.ndarray]
    tensors: list[Tensor]


@dataclass(frozen=True)
class Program:
    """Statements, and what of them the graph gives.

    Parameters
    ----------
    statements
        In order.
    outputs, updates
        The outputs' names and the updated inputs' names, each with its tensor.
    strided
        The specs of ports that are not packed, by name.
    numerics
        Of the graph.
    """

    statements: tuple[Input | Call, ...]
    outputs: tuple[tuple[str, Of], ...]
    updates: tuple[tuple[str, Of], ...] = ()
    strided: tuple[tuple[str, TensorSpec], ...] = ()
    numerics: Numerics = field(default_factory=Numerics)

    def build(self) -> Built:
        """The graph. Raises `InvalidRequest` if the program does not make sense."""
        g = GraphBuilder(self.numerics)
        tensors: list[Tensor] = []
        values = {}
        for statement in self.statements:
            if isinstance(statement, Input):
                made: Any = g.input(
                    statement.name, statement.values.shape, statement.dtype, layout=statement.layout
                )
                values[statement.name] = statement.values
            else:
                given = mapped((statement.arguments, dict(statement.keywords)), tensors.__getitem__)
                made = getattr(g, statement.function)(*given[0], **given[1])
            found = made if isinstance(made, tuple) else (made,)
            if len(found) != statement.count:
                raise InvalidRequest(field="count", value=len(found), problem="is another", fix="see `Call`")
            tensors += found
        outputs = {name: tensors[of.number] for name, of in self.outputs}
        updates = {name: tensors[of.number] for name, of in self.updates}
        graph = _strided(g.build(outputs, updates=updates), dict(self.strided))
        return Built(graph, values, tensors)

    def given(self) -> Iterator[tuple[int, Input | Call]]:
        """Each statement, and the number of its first tensor."""
        number = 0
        for statement in self.statements:
            yield number, statement
            number += statement.count

    def __str__(self) -> str:
        """The program in Python; `graph` and `values` are what it makes."""
        lines = ["import numpy as np", "from numpy import inf, nan", "from cudnn_actor import *", ""]
        lines += ["from cudnn_actor.protocol import *", f"g = GraphBuilder({_python(self.numerics)})"]
        values = []
        for number, statement in self.given():
            names = ", ".join(f"t{number + n}" for n in range(statement.count))
            if isinstance(statement, Input):
                dims, layout = statement.values.shape, str(statement.layout)
                call = f"g.input({statement.name!r}, {dims}, {str(statement.dtype)!r}, layout={layout!r})"
                flat = statement.values.astype(
                    np.float64 if statement.dtype.is_floating else statement.values.dtype
                )
                shaped = "" if flat.size else f".reshape({dims})"
                values.append(f"    {statement.name!r}: np.array({flat.tolist()}){shaped},")
            else:
                given = [_python(one) for one in statement.arguments]
                given += [f"{name}={_python(one)}" for name, one in statement.keywords.items()]
                call = f"g.{statement.function}({', '.join(given)})"
            lines.append(f"{names} = {call}")
        outputs, updates = (
            "{" + ", ".join(f"{name!r}: {of!r}" for name, of in pairs) + "}"
            for pairs in (self.outputs, self.updates)
        )
        lines += [f"graph = g.build({outputs}, updates={updates})", "values = {", *values, "}"]
        lines += [f"# {name} lies in memory as {spec!r}" for name, spec in self.strided]
        return "\n".join(lines)


def mapped(value: Any, of: Any) -> Any:
    """A value with `of(number)` in place of each `Of`, in tuples, dicts and operations too."""
    match value:
        case Of(number=number):
            return of(number)
        case tuple():
            return tuple(mapped(one, of) for one in value)
        case dict():
            return {name: mapped(one, of) for name, one in value.items()}
        case Operation():
            operands = {name: mapped(one, of) for name, one in value.named(value.inputs)}
            return value.with_operands(operands.__getitem__)
    return value


def operands_of(call: Call) -> list[int]:
    """The numbers of the tensors that a call reads."""
    found: list[int] = []
    mapped((call.arguments, dict(call.keywords)), found.append)
    return found


def _strided(graph: Graph, specs: Mapping[str, TensorSpec]) -> Graph:
    """The graph on ports of other strides."""
    if not specs:
        return graph

    def moved(port: Any) -> Any:
        return msgspec.structs.replace(port, spec=specs.get(port.name, port.spec))

    tensors = []
    for tensor in graph.body.tensors:
        spec = specs.get(graph.names_of.get(tensor.uid, ""))
        tensors.append(tensor if spec is None else msgspec.structs.replace(tensor, strides=spec.strides))
    body = OperationGraph(
        tensors=tuple(tensors), operations=graph.body.operations, numerics=graph.body.numerics
    )
    return Graph(body=body, inputs=tuple(map(moved, graph.inputs)), outputs=tuple(map(moved, graph.outputs)))


def _python(value: Any) -> str:
    """A value as Python reads it."""
    match value:
        case enum.Enum():
            return f"{type(value).__name__}.{value.name}"
        case msgspec.Struct():
            fields = msgspec.structs.fields(type(value))
            given = [(field, getattr(value, field.name)) for field in fields]
            words = [f"{field.name}={_python(one)}" for field, one in given if one is not None]
            return f"{type(value).__name__}({', '.join(words)})"
        case tuple():
            return f"({''.join(f'{_python(one)}, ' for one in value)})"
    return repr(value)
