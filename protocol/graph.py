"""Operation graphs: what an engine is asked to run, as data.

A graph is tensors, each known by a number (its uid), and the operations that
read and write them. A tensor is *bound* to a buffer when the graph runs, or a
*scalar* given by value, or *virtual*: it exists only between two operations.

Adding an operation means adding a class here and its name to `Operation`:
`inputs`, `output`, validation, canonical order and digest work from the fields
that the class declares.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from typing import ClassVar

import msgspec

from cudnn_actor.protocol.canonical import blake, canonical_bytes
from cudnn_actor.protocol.conv import ConvSpec, Numerics
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.errors import InvalidRequest

__all__ = [
    "ConvolutionBackwardData",
    "ConvolutionBackwardFilter",
    "ConvolutionForward",
    "GraphTensor",
    "Operation",
    "OperationGraph",
    "Pointwise",
    "PointwiseMode",
    "TensorRole",
]


class TensorRole(enum.StrEnum):
    """Where a graph tensor's values are."""

    BOUND = "bound"
    SCALAR = "scalar"
    VIRTUAL = "virtual"


class GraphTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor of a graph.

    Parameters
    ----------
    uid
        Its number within the graph.
    dims, strides
        As in `TensorSpec`, strides in elements.
    dtype
        The element type; of a virtual tensor, the type that is computed in.
    role
        Bound, scalar or virtual.
    alignment
        Bytes that a bound tensor's address is a multiple of.
    name
        For people; no part of the graph's meaning.
    """

    uid: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    role: TensorRole = TensorRole.BOUND
    alignment: int = 16
    name: str = ""


class _Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    reads: ClassVar[tuple[str, ...]]
    """Names of the fields that hold uids, or tuples of uids, of inputs."""
    writes: ClassVar[str]
    """Name of the field that holds the uid of the output."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """Uids of the tensors read, in the operation's own order."""
        uids: list[int] = []
        for name in self.reads:
            value = getattr(self, name)
            uids.extend(value if isinstance(value, tuple) else (value,))
        return tuple(uids)

    @property
    def output(self) -> int:
        """Uid of the tensor written."""
        return int(getattr(self, self.writes))

    def attributes(self) -> tuple[object, ...]:
        """All that the operation means beside which tensors it touches."""
        fields = [n for n in self.__struct_fields__ if n not in (*self.reads, self.writes)]
        return (type(self).__name__, *((n, getattr(self, n)) for n in sorted(fields)))


class ConvolutionForward(_Node, frozen=True, kw_only=True, tag=True):
    """y = x cross-correlated with w, accumulated in `compute`."""

    reads = ("x", "w")
    writes = "y"
    x: int
    w: int
    y: int
    conv: ConvSpec
    compute: DType


class ConvolutionBackwardData(_Node, frozen=True, kw_only=True, tag=True):
    """dx = gradient by the input, accumulated in `compute`."""

    reads = ("dy", "w")
    writes = "dx"
    dy: int
    w: int
    dx: int
    conv: ConvSpec
    compute: DType


class ConvolutionBackwardFilter(_Node, frozen=True, kw_only=True, tag=True):
    """dw = gradient by the filter, accumulated in `compute`."""

    reads = ("x", "dy")
    writes = "dw"
    x: int
    dy: int
    dw: int
    conv: ConvSpec
    compute: DType


class PointwiseMode(enum.StrEnum):
    """A function of one or two tensors, element by element; smaller operands are broadcast.

    The activations carry the names and formulas of `Activation`.
    """

    ADD = "add"
    MUL = "mul"
    RELU = "relu"
    LEAKY_RELU = "leaky_relu"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWISH = "swish"
    ELU = "elu"
    SOFTPLUS = "softplus"


class Pointwise(_Node, frozen=True, kw_only=True, tag=True):
    """output = mode(operands), with the activation's `parameter` where it has one."""

    reads = ("operands",)
    writes = "result"
    mode: PointwiseMode
    operands: tuple[int, ...]
    result: int
    compute: DType
    parameter: float | None = None


Operation = ConvolutionForward | ConvolutionBackwardData | ConvolutionBackwardFilter | Pointwise
"""Every operation that a graph can hold."""


class OperationGraph(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True, cache_hash=True
):
    """Tensors and the operations between them.

    Parameters
    ----------
    tensors
        Every tensor that an operation touches, each uid once.
    operations
        In any order; each tensor is written by at most one of them, and none depends on itself.
    numerics
        TF32 and determinism, for the whole graph.

    Raises
    ------
    InvalidRequest
        The graph is malformed: an unknown or repeated uid, two writers, a cycle, a virtual tensor that
        nothing writes.
    """

    tensors: tuple[GraphTensor, ...]
    operations: tuple[Operation, ...]
    numerics: Numerics = Numerics()

    def __post_init__(self) -> None:
        by_uid = {t.uid: t for t in self.tensors}
        if len(by_uid) != len(self.tensors):
            raise _malformed("tensors", sorted(t.uid for t in self.tensors), "repeats a uid")
        written: set[int] = set()
        for operation in self.operations:
            for uid in (*operation.inputs, operation.output):
                if uid not in by_uid:
                    raise _malformed("operations", uid, "names a tensor that the graph does not hold")
            if operation.output in written:
                raise _malformed("operations", operation.output, "is written twice")
            written.add(operation.output)
        for tensor in self.tensors:
            if tensor.role is TensorRole.VIRTUAL and tensor.uid not in written:
                raise _malformed("tensors", tensor.uid, "is virtual and nothing writes it")
        if not self.operations:
            raise _malformed("operations", (), "is empty")
        self.in_order()

    def tensor(self, uid: int) -> GraphTensor:
        """The tensor of that uid. Raises KeyError when there is none."""
        return self._by_uid[uid]

    @functools.cached_property
    def _by_uid(self) -> Mapping[int, GraphTensor]:
        return {t.uid: t for t in self.tensors}

    def in_order(self) -> tuple[Operation, ...]:
        """Operations so that each comes after those whose output it reads.

        Among those that are ready, the one whose place in the graph hashes lowest comes first, so the
        order does not depend on how the graph was written down.
        """
        return self._order

    @functools.cached_property
    def _order(self) -> tuple[Operation, ...]:
        colours = _Colours(self).distinct()
        waiting = sorted(self.operations, key=lambda op: colours[op.output])
        unwritten = {op.output for op in waiting}
        order: list[Operation] = []
        while waiting:
            ready = next((op for op in waiting if unwritten.isdisjoint(op.inputs)), None)
            if ready is None:
                raise _malformed("operations", sorted(unwritten), "depend on themselves")
            waiting.remove(ready)
            unwritten.discard(ready.output)
            order.append(ready)
        return tuple(order)

    def canonical_uids(self) -> dict[int, int]:
        """Each tensor's uid → its number by first appearance in `in_order()`."""
        order: dict[int, int] = {}
        for operation in self.in_order():
            for uid in (*operation.inputs, operation.output):
                order.setdefault(uid, len(order))
        return order

    @functools.cached_property
    def bound(self) -> tuple[int, ...]:
        """Uids of the tensors that are bound to buffers, in canonical order: a plan's buffers."""
        return self._with_role(TensorRole.BOUND)

    @functools.cached_property
    def scalars(self) -> tuple[int, ...]:
        """Uids of the tensors that are given by value, in canonical order: a plan's scalars."""
        return self._with_role(TensorRole.SCALAR)

    def _with_role(self, role: TensorRole) -> tuple[int, ...]:
        return tuple(uid for uid in self.canonical_uids() if self.tensor(uid).role is role)

    def digest(self) -> str:
        """64 hexadecimal digits that stand for the graph's meaning, the same in every process.

        Neither names nor the choice of uids nor the order of tensors and operations counts; every dim,
        stride, type, alignment, role, attribute and float's bit pattern does.
        """
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        uids = self.canonical_uids()
        operations = tuple(
            (op.attributes(), tuple(uids[u] for u in op.inputs), uids[op.output]) for op in self.in_order()
        )
        tensors = tuple(_meaning(self.tensor(uid)) for uid in uids)
        return blake(canonical_bytes(("graph/1", tensors, operations, self.numerics)))


class _Colours:
    """A colour for each tensor that depends on its place in the graph and on nothing else.

    Colour refinement: a tensor's colour takes in its meaning, the operation that writes it and those that
    read it, over and over until no more tensors are told apart. Tensors that still share a colour are
    (but for graphs built to defy this) mirror images, so one of them is singled out, and so on until every
    tensor has its own. https://en.wikipedia.org/wiki/Colour_refinement_algorithm
    """

    def __init__(self, graph: OperationGraph) -> None:
        self._operations = [(op, _hash(op.attributes())) for op in graph.operations]
        self._start = {t.uid: _hash(_meaning(t)) for t in graph.tensors}

    def distinct(self) -> dict[int, str]:
        """Each uid's colour, no two the same."""
        colours = self._refine(self._start)
        while tied := self._tied(colours):
            candidates = [self._refine(colours | {uid: _hash(("chosen", colours[uid]))}) for uid in tied]
            colours = min(candidates, key=lambda found: sorted(found.values()))
        return colours

    def _refine(self, colours: dict[int, str]) -> dict[int, str]:
        count = 0
        while count < len(set(colours.values())):
            count = len(set(colours.values()))
            colours = self._step(colours)
        return colours

    def _step(self, colours: dict[int, str]) -> dict[int, str]:
        around: dict[int, list[tuple[str, int, str]]] = {uid: [] for uid in colours}
        for operation, attributes in self._operations:
            uids = (operation.output, *operation.inputs)
            seen = _hash((attributes, tuple(colours[uid] for uid in uids)))
            for place, uid in enumerate(uids):
                around[uid].append((attributes, place, seen))
        return {uid: _hash((colours[uid], tuple(sorted(around[uid])))) for uid in colours}

    @staticmethod
    def _tied(colours: dict[int, str]) -> list[int]:
        """The uids that share the lowest shared colour; none when all differ."""
        sharing: dict[str, list[int]] = {}
        for uid, colour in colours.items():
            sharing.setdefault(colour, []).append(uid)
        return min(((c, uids) for c, uids in sharing.items() if len(uids) > 1), default=("", []))[1]


def _hash(value: object) -> str:
    return blake(canonical_bytes(value))


def _meaning(t: GraphTensor) -> tuple[object, ...]:
    return (t.dims, t.strides, t.dtype, t.role, t.alignment)


def _malformed(field: str, value: object, problem: str) -> InvalidRequest:
    return InvalidRequest(field=field, value=value, problem=problem, fix="mend the graph")
