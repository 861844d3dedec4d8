"""Graphs with names: what `GraphBuilder` builds and `RunGraph` runs.

A `Graph` is an `OperationGraph` and the names of its inputs and outputs. The
engines see the operations alone.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs import pictures
from cudnn_actor.protocol.graphs.canonical import blake, canonical_bytes
from cudnn_actor.protocol.graphs.explanation import Explanation
from cudnn_actor.protocol.graphs.limits import GraphLimits
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.types.checks import require_name, require_type
from cudnn_actor.protocol.types.short_repr import listing, one_line, short_repr
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["FORMAT", "Graph", "Port"]

_FROM_JSON = "pass what `Graph.to_json` gave"
_SHOWN = 40
"""Characters of JSON that an error's text may show."""
_ROOM, _LONGEST_NAME = (46, 24), 16
"""Characters of a graph's repr for its inputs and for its outputs, and for the name of one."""
_COPIES = 2
"""About how many times each name is in memory: in the graph and in its encoded form."""
_NAMED = frozenset({"inf", "-inf", "nan"})
_MOST_DRAWN = 200
"""Operations, inputs and outputs that a notebook's picture of a graph shows."""
FORMAT = 1
"""Version of the JSON form. Increase it when an older reader would misunderstand a newer file."""


class Port(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An input or an output of a graph.

    Parameters
    ----------
    name
        Its name, unique within the graph.
    spec
        What a buffer for it must have: these dims, strides and dtype, and at least this alignment.
    uid
        Its tensor's number in the graph; None for an input that nothing reads.
    """

    name: str
    spec: TensorSpec
    uid: int | None

    __repr__ = short_repr


class Graph(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A graph of operations with named inputs and outputs. Immutable; made by `GraphBuilder.build`.

    Parameters
    ----------
    body
        The operations. Each of its bound tensors belongs to a port, or overwrites one that does.
    inputs, outputs
        The ports, in the order in which they were declared. No output may have the buffer of an input.

    Raises
    ------
    InvalidRequest
        The names or tensors of the ports do not fit the body.
    """

    body: OperationGraph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def __post_init__(self) -> None:
        names = [port.name for port in self.ports]
        for name in names:
            require_name("name", name)
        if len(set(names)) < len(names):
            raise _malformed_graph("names", Words(", ".join(names)), "repeats a name")
        known = {tensor.uid: tensor for tensor in self.body.tensors}
        bound = frozenset(self.body.bound)
        for port in self.ports:
            if port.uid is None:
                continue
            tensor = known.get(port.uid)
            if tensor is None or tensor.spec != port.spec or port.uid not in bound:
                raise _malformed_graph(
                    port.name, port.uid, "is not the number of a bound tensor of this spec"
                )
        for number, (ports, wanted) in enumerate([(self.inputs, False), (self.outputs, True)]):
            for port in ports:
                written = port.uid in self.body.written
                if written is not wanted and (number or port.uid is not None):
                    raise _malformed_graph(port.name, port.uid, f"is {'' if written else 'not '}written")
        missing = bound.difference(self.names_of)
        if missing:
            raise _malformed_graph("body", sorted(missing), "has bound tensors without a name")

    def __repr__(self) -> str:
        inputs, outputs = (
            _list_ports(*each) for each in zip((self.inputs, self.outputs), _ROOM, strict=True)
        )
        return f"<Graph of {len(self.body.operations)} operations: {inputs} -> {outputs}>"

    @property
    def ports(self) -> tuple[Port, ...]:
        """The inputs, then the outputs."""
        return self.inputs + self.outputs

    @functools.cached_property
    def places(self) -> Mapping[str, int]:
        """Each port's name → its place among the ports."""
        return {port.name: place for place, port in enumerate(self.ports)}

    @functools.cached_property
    def names_of(self) -> Mapping[int, str]:
        """Each bound tensor's uid → the name of the port whose buffer it is in."""
        names = {port.uid: port.name for port in self.ports if port.uid is not None}
        for tensor in self.body.tensors:
            if tensor.overwrites is not None and tensor.uid not in names and tensor.overwrites in names:
                names[tensor.uid] = names[tensor.overwrites]
        return names

    def digest(self) -> str:
        """64 hexadecimal digits that identify the graph, names included, the same in every process."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        uids = self.body.canonical_uids
        ports = tuple(
            tuple((port.name, port.spec, None if port.uid is None else uids[port.uid]) for port in ports)
            for ports in (self.inputs, self.outputs)
        )
        return blake(canonical_bytes(("named/1", self.body.digest(), ports)))

    @functools.cached_property
    def identity(self) -> str:
        """64 hexadecimal digits that identify the graph and its labels, which name the user's lines."""
        return blake(self.encoded)

    @functools.cached_property
    def footprint(self) -> int:
        """The bytes of host memory, approximately, that the graph takes, including `encoded`."""
        return self.body.footprint + _COPIES * len(self.encoded)

    @classmethod
    def from_encoded(cls, body: bytes, identity: str) -> Graph:
        """The graph that another process has encoded. Raises `ValueError`, `msgspec.DecodeError`.

        The graph is not encoded again to find its identity, so it takes less memory here.
        """
        graph = msgspec.msgpack.decode(body, type=cls)
        graph.__dict__["identity"] = identity
        graph.__dict__["footprint"] = graph.body.footprint + _COPIES * len(body)
        return graph

    async def explain(self, gpu: Any, *, measure: bool = False, timeout: float | None = None) -> Explanation:
        """How a service runs the graph: the same as `await gpu.explain(graph)`."""
        if not hasattr(gpu, "explain"):
            raise InvalidRequest(
                field="gpu",
                value=gpu,
                problem="is no service",
                fix="pass one, as in `async with spawn() as gpu`",
            )
        explanation: Explanation = await gpu.explain(self, measure=measure, timeout=timeout)
        return explanation

    @functools.cached_property
    def encoded(self) -> bytes:
        """The graph as MessagePack. Raises `TypeError` for fields that are not protocol data."""
        return msgspec.msgpack.encode(self)

    def to_json(self) -> bytes:
        """The graph as JSON, with the version of its form. See `from_json`.

        JSON has no infinity and no NaN: such constants are written as "inf", "-inf" and "nan".
        """
        file = msgspec.to_builtins(_File(format=FORMAT, graph=self))
        for tensor in file["graph"]["body"]["tensors"]:
            if isinstance(tensor["value"], float) and not math.isfinite(tensor["value"]):
                tensor["value"] = str(tensor["value"])
        return msgspec.json.encode(file)

    def check(self, limits: GraphLimits) -> None:
        """Raise `InvalidRequest` if the graph is over a limit."""
        limits.check_operations(len(self.body.operations))
        limits.check_nbytes(len(self.encoded))

    @classmethod
    def from_json(cls, text: bytes | str, *, limits: GraphLimits | None = None) -> Graph:
        """The graph that `to_json` wrote.

        Raises `InvalidRequest` for a malformed or a newer file, and for one over the limits.
        """
        limits = GraphLimits() if limits is None else limits
        require_type("limits", limits, GraphLimits)
        if not isinstance(text, bytes | bytearray | memoryview | str):
            raise InvalidRequest(field="text", value=text, problem="is neither bytes nor str", fix=_FROM_JSON)
        limits.check_nbytes(len(text))
        try:
            version = msgspec.json.decode(text, type=_Version).format
            if not 1 <= version <= FORMAT:
                newer = version > FORMAT
                raise InvalidRequest(
                    field="format",
                    value=version,
                    problem=f"is newer than {FORMAT}, which this version of cudnn-actor reads"
                    if newer
                    else "is no version of this form",
                    fix="install a newer version" if newer else _FROM_JSON,
                )
            graph = msgspec.convert(_with_numbers(msgspec.json.decode(text)), _File).graph
            limits.check_operations(len(graph.body.operations))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(
                field="text",
                value=text if len(text) <= _SHOWN else Words("JSON"),
                problem=f"is not a graph: {error}",
                fix=_FROM_JSON,
            ) from error
        return graph

    def to_dot(self, explanation: Explanation | None = None) -> str:
        """The graph in Graphviz's language: a box for each operation, an ellipse for each port.

        A dashed line leads to an input that the graph overwrites. With an explanation, operations that run
        together are a cluster.
        """
        return pictures.dot(self, self._own(explanation))

    def to_svg(self, explanation: Explanation | None = None) -> str:
        """The graph as a picture: SVG, which browsers show, without Graphviz.

        Boxes are operations, with the user's lines; lines are tensors, with dtype and dims. A dashed line
        leads to an input that the graph overwrites. With an explanation, operations that run together are in
        one box, in order, with what runs them; a dashed box is a view.
        """
        return pictures.svg(self, self._own(explanation))

    def _repr_svg_(self) -> str:
        """The SVG that notebooks show: the graph's picture; for a large graph, that of its first
        operations."""
        return pictures.svg(self, most=_MOST_DRAWN)

    def _own(self, explanation: Explanation | None) -> Explanation | None:
        """The explanation, if it is of this graph, or None. Raises `InvalidRequest` for any other."""
        fix = "pass what `await gpu.explain(graph)` gave, or nothing"
        if explanation is not None:
            require_type("explanation", explanation, Explanation, fix)
            if explanation.digest != self.body.digest():
                raise InvalidRequest(
                    field="explanation",
                    value=Words(explanation.plan),
                    problem="is about another graph",
                    fix=fix,
                )
        return explanation


class _Version(msgspec.Struct):
    format: int


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    graph: Graph


def _with_numbers(file: Any) -> Any:
    """Decoded JSON, in which the constants that `to_json` wrote as text are numbers again."""
    with contextlib.suppress(AttributeError, LookupError, TypeError):  # malformed: the caller refuses it
        for tensor in file["graph"]["body"]["tensors"]:
            if tensor.get("value") in _NAMED:
                tensor["value"] = float(tensor["value"])
    return file


def _list_ports(ports: tuple[Port, ...], room: int) -> str:
    """The first few ports, as text."""
    texts = (f"{one_line(port.name, _LONGEST_NAME)} {port.spec.dtype} {port.spec.dims}" for port in ports)
    return listing(texts, len(ports), room)


def _malformed_graph(field: str, value: object, problem: str) -> InvalidRequest:
    return InvalidRequest(field=field, value=value, problem=problem, fix="build it with GraphBuilder")
