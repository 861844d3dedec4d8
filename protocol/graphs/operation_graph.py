"""Operation graphs: the computations that an engine runs, as data.

A graph consists of tensors, each identified by a number (its uid), and the
operations that read and write them. A tensor is *bound* to a buffer when the
graph runs, or a *scalar* passed by value, or *virtual*: it exists only between
operations; or it is a *constant* of the graph, one number in all its elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.canonical import Encoded, blake, canonical_bytes
from cudnn_actor.protocol.operations import GraphTensor, Node, Pointwise, TensorRole
from cudnn_actor.protocol.operations.base import Array
from cudnn_actor.protocol.types.checks import are_ints
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.numerics import Numerics
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["OfNumbers", "OperationGraph"]

_MOST_LABELS = 4
_GRAPH_BYTES = 330
"""About how many bytes of memory a tensor or an operation of a graph takes."""


class OfNumbers(NamedTuple):
    """Samples of which each element follows from the number drawn in its place: one for each such number."""

    values: np.ndarray


class OperationGraph(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True, cache_hash=True
):
    """Tensors and the operations between them.

    Parameters
    ----------
    tensors
        Every tensor that an operation touches, each uid once.
    operations
        In the order in which they run: each comes after those whose results it reads. At most one of them
        writes each tensor.
    numerics
        TF32 and determinism, for the whole graph.

    Raises
    ------
    InvalidRequest
        The graph is malformed: an unknown or repeated uid, a result that is read before it is written, two
        writers, a virtual tensor that nothing writes, an input that is read after it is overwritten, or that
        is overwritten by anything but a function of each element or a norm's new running statistics.
    """

    tensors: tuple[GraphTensor, ...]
    operations: tuple[Node, ...]
    numerics: Numerics = Numerics()

    def __repr__(self) -> str:
        return f"<OperationGraph of {len(self.operations)} operations, {len(self.tensors)} tensors>"

    def __post_init__(self) -> None:
        if len(self._by_uid) != len(self.tensors):
            raise _malformed_graph("tensors", sorted(t.uid for t in self.tensors), "repeats a uid")
        if not self.operations:
            raise _malformed_graph("operations", (), "is empty")
        written: set[int] = set()
        overwritten: set[int | None] = set()
        for operation in self.operations:
            reads, writes = operation.reads, operation.writes
            self._check_operation(operation, reads, writes, written)
            written.update(writes)
            if not overwritten.isdisjoint(reads):
                raise _malformed_graph(
                    "operations", operation.kind, "reads what an operation before it overwrites"
                )
            if any(self.tensor(uid).overwrites is not None for uid in writes):
                overwritten.update(self._overwritten_inputs(operation))
        for tensor in self.tensors:
            if tensor.role is TensorRole.VIRTUAL and tensor.uid not in written:
                raise _malformed_graph("tensors", tensor.uid, "is virtual and nothing writes it")
            if tensor.overwrites is not None:
                self._check_overwriting(tensor)
            constant = tensor.role is TensorRole.CONSTANT
            if constant is (tensor.value is None) or (constant and tensor.uid in written):
                raise _malformed_graph(
                    "tensors", tensor.uid, "is a constant without a value, or a value of no constant"
                )

    def _check_operation(
        self, operation: Node, reads: Sequence[int], writes: Sequence[int], written: set[int]
    ) -> None:
        """Raise `InvalidRequest` if an operation does not fit. `written`: what those before it write."""
        for uid in (*reads, *writes):
            if uid not in self._by_uid:
                raise _malformed_graph("operations", uid, "names a tensor that the graph does not hold")
        for uid in reads:
            if uid in self.written and uid not in written:
                raise _malformed_graph("operations", uid, "is read before it is written")
        for uid in writes:
            if uid in written or writes.count(uid) > 1:
                raise _malformed_graph("operations", uid, "is written twice")
        if operation.numerics is not None:
            raise _malformed_graph(
                "numerics", operation.numerics, "is given to an operation, not to the graph"
            )

    def _check_overwriting(self, tensor: GraphTensor) -> None:
        """Raise `InvalidRequest` unless a bound result overwrites a bound input of the same spec."""
        uid = tensor.overwrites
        is_input = uid in self.canonical_uids and uid not in self.written
        is_result = tensor.uid in self.written and tensor.role is TensorRole.BOUND
        if uid is None or not is_input or not is_result:
            raise _malformed_graph("tensors", tensor.uid, "must be a result and overwrite an input")
        if self.tensor(uid).meaning() != tensor.meaning():
            raise _malformed_graph("tensors", tensor.uid, "overwrites an input of another spec")

    def _overwritten_inputs(self, operation: Node) -> list[int]:
        """The inputs that an operation overwrites.

        Raises `InvalidRequest` if it may still read what it has written over, as most operations may.
        """
        found = []
        operands = dict(operation.named())
        for name, uid in operation.named(operation.outputs):
            before = self.tensor(uid).overwrites
            if before is None:
                continue
            if not isinstance(operation, Pointwise) and operands.get(name.removeprefix("new_")) != before:
                raise InvalidRequest(
                    field="operations",
                    value=operation.kind,
                    problem="overwrites an input, which only functions of each element may do",
                    fix="write to another tensor, and overwrite the input by a Pointwise identity of that",
                )
            found.append(before)
        return found

    def tensor(self, uid: int) -> GraphTensor:
        """The tensor with that uid. Raises `KeyError` if there is none."""
        return self._by_uid[uid]

    @functools.cached_property
    def _by_uid(self) -> Mapping[int, GraphTensor]:
        return {t.uid: t for t in self.tensors}

    @functools.cached_property
    def written(self) -> frozenset[int]:
        """Uids of the tensors that operations write."""
        return frozenset(uid for operation in self.operations for uid in operation.writes)

    @functools.cached_property
    def canonical_uids(self) -> Mapping[int, int]:
        """Each tensor's uid → its number by first appearance in the operations."""
        order: dict[int, int] = {}
        for operation in self.operations:
            for uid in (*operation.reads, *operation.writes):
                order.setdefault(uid, len(order))
        return order

    @functools.cached_property
    def bound(self) -> tuple[int, ...]:
        """Uids of the tensors bound to buffers, in canonical order: a plan's buffers."""
        return self._with_role(TensorRole.BOUND)

    @functools.cached_property
    def results(self) -> tuple[int, ...]:
        """Uids of the bound tensors that are written, in canonical order."""
        return tuple(uid for uid in self.bound if uid in self.written)

    @functools.cached_property
    def scalars(self) -> tuple[int, ...]:
        """Uids of the tensors passed by value, in canonical order: a plan's scalars."""
        return self._with_role(TensorRole.SCALAR)

    @functools.cached_property
    def constants(self) -> Mapping[int, float | int]:
        """The constants' values, by uid."""
        return {t.uid: t.value for t in self.tensors if t.value is not None}

    def given_values(self, xp: Any, scalars: Sequence[float]) -> dict[int, Array]:
        """The values of the scalars, given in canonical order, and of the constants: see `evaluate`."""
        given: dict[int, float | int] = {**dict(zip(self.scalars, scalars, strict=True)), **self.constants}
        return {uid: self.equal_elements(xp, uid, value) for uid, value in given.items()}

    def equal_elements(self, xp: Any, uid: int, value: float | int) -> Array:
        """A tensor's elements, all of one value, as `evaluate` takes them. They take no memory."""
        tensor, dtype = self.tensor(uid), "float64" if isinstance(value, float) else "int64"
        if dtype == "int64" and tensor.dtype is DType.UINT64:
            value, dtype = value % (1 << 64), "uint64"
        return xp.broadcast_to(xp.full((), value, dtype), tensor.dims)

    def _with_role(self, role: TensorRole) -> tuple[int, ...]:
        return tuple(uid for uid in self.canonical_uids if self.tensor(uid).role is role)

    @functools.cached_property
    def pure(self) -> bool:
        """Whether running it twice gives the same results: it overwrites nothing that it reads."""
        return all(tensor.overwrites is None for tensor in self.tensors)

    def compute(self, operation: Node) -> DType:
        """The type that an operation of the graph computes in."""
        return operation.compute(tuple(self.tensor(uid).dtype for uid in operation.reads))

    def evaluate(self, xp: Any, operation: Node, values: Mapping[int, Array]) -> dict[int, Array]:
        """The values that an operation of the graph writes, by uid, from those that it reads.

        `xp`, `values` and what is returned are as in `Operation.evaluate`.
        """
        given, specs = self._inputs_and_specs(operation, values)
        results = self._of_nothing(xp, operation, given) or operation.evaluate(xp, given, specs)
        return {uid: results[name] for name, uid in operation.named(operation.outputs)}

    def without_elements(self, operation: Node) -> Mapping[str, float | str] | None:
        """An operation's outputs, if an operand has no elements: see `Operation.of_nothing`."""
        return operation.of_nothing({name: self.tensor(uid).spec for name, uid in operation.named()})

    def _of_nothing(self, xp: Any, operation: Node, given: Mapping[str, Array]) -> dict[str, Array] | None:
        """The outputs of `without_elements` as arrays."""
        found = self.without_elements(operation)
        if found is None:
            return None
        uids = dict(operation.named(operation.outputs))
        return {
            name: given[value] if isinstance(value, str) else self.equal_elements(xp, uids[name], value)
            for name, value in found.items()
        }

    def magnitudes(self, xp: Any, operation: Node, values: Mapping[int, Array]) -> dict[int, Array]:
        """`Operation.magnitudes` of an operation of the graph, by uid."""
        found = operation.magnitudes(xp, *self._inputs_and_specs(operation, values))
        return self._of_results(operation, found)

    def uncentred_sizes(self, xp: Any, operation: Node, values: Mapping[int, Array]) -> dict[int, Array]:
        """`Operation.uncentred_sizes` of an operation of the graph, by uid."""
        found = operation.uncentred_sizes(xp, *self._inputs_and_specs(operation, values))
        return self._of_results(operation, found)

    def _of_results(self, operation: Node, results: Mapping[str, Array]) -> dict[int, Array]:
        """The results of an operation that the graph has, by uid."""
        return {uid: results[name] for name, uid in operation.named(operation.outputs) if name in results}

    def _inputs_and_specs(
        self, operation: Node, values: Mapping[int, Array]
    ) -> tuple[dict[str, Array], dict[str, TensorSpec]]:
        """An operation's inputs, and the specs of its outputs, by name."""
        outputs = operation.named(operation.outputs)
        return (
            {name: values[uid] for name, uid in operation.named(operation.inputs)},
            {name: self.tensor(uid).spec for name, uid in outputs},
        )

    @functools.cached_property
    def samples_of_each(self) -> bool:
        """Whether each element of `samples` follows from the number drawn in its place alone."""
        return all(operation.samples_of_each for operation in self._readers_of_inputs)

    @property
    def _readers_of_inputs(self) -> Iterator[Node]:
        """The operations that read inputs of the graph."""
        inputs = {uid for uid in self.bound if uid not in self.written}
        return (operation for operation in self.operations if not inputs.isdisjoint(operation.reads))

    def samples(
        self, xp: Any, draw: Callable[[TensorSpec], Array], numbers: Array | None = None
    ) -> dict[int, Any]:
        """Values for the inputs of the graph that need particular ones, by uid: see `Operation.samples`.

        `numbers`: all that may be drawn; then it is `OfNumbers` where that says all.
        """
        found: dict[int, Any] = {}
        for operation in self._readers_of_inputs:
            operands = dict(operation.named())
            specs = {name: self.tensor(uid).spec for name, uid in operands.items()}
            if numbers is not None and operation.samples_of_each:
                each = operation.samples(np, specs, lambda _: numbers)
                found |= {operands[name]: OfNumbers(np.asarray(values)) for name, values in each.items()}
                continue
            samples = operation.samples(xp, specs, draw).items()
            found |= {operands[name]: xp.asarray(values) for name, values in samples}  # of no dims: a scalar
        return {uid: found[uid] for uid in self.bound if uid in found and uid not in self.written}

    def label(self, number: int) -> str:
        """The label of an operation, for people: "relu at model.py:12", or "relu" if no line added it.

        Of a gradient: "mul, gradient of relu at model.py:12".
        """
        operation = self.operations[number]
        name = operation.title
        told = self.tensor(operation.writes[0]).name
        if told.startswith(f"{name} at "):
            return told
        return f"{name}, {told}" if told.startswith("gradient of ") else name

    def where(self, numbers: Sequence[int]) -> str:
        """The labels of operations, as far as these name lines: "relu at model.py:12"."""
        labels = [self.label(number) for number in numbers if number < len(self.operations)]
        told = [label for label in dict.fromkeys(labels) if " at " in label]
        more = f" and {len(told) - _MOST_LABELS} more" if len(told) > _MOST_LABELS else ""
        return ", ".join(told[:_MOST_LABELS]) + more

    @property
    def footprint(self) -> int:
        """The bytes of host memory, approximately, that the graph takes."""
        return _GRAPH_BYTES * (1 + len(self.tensors) + len(self.operations))

    def digest(self) -> str:
        """64 hexadecimal digits that identify the graph's meaning, the same in every process.

        Names, the choice of uids and the order of the tensors do not matter. The order of the operations
        does, and so does every dim, stride, type, alignment, role, attribute and float's bit pattern. Two
        graphs that compute the same in another order have two digests, and so two plans.
        """
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        uids = self.canonical_uids
        operations = tuple(
            (_encode_attributes(op), _encoded_uids(uids, op.reads), _encoded_uids(uids, op.writes))
            for op in self.operations
        )
        tensors = tuple(self._meaning(self.tensor(uid)) for uid in uids)
        return blake(canonical_bytes(("graph/4", tensors, operations, self.numerics)))

    def _meaning(self, tensor: GraphTensor) -> object:
        before = None if tensor.overwrites is None else self.canonical_uids[tensor.overwrites]
        dims, strides = tensor.dims, tensor.strides
        if tensor.value is not None or not are_ints(dims) or not are_ints(strides):
            return (*tensor.meaning(), before)
        try:
            return _encoded_tensor((dims, strides), tensor.dtype, tensor.role, tensor.alignment, before)
        except TypeError:  # another field has a value that cannot be looked up, such as a list
            return (*tensor.meaning(), before)


_MOST_KNOWN = 1 << 12
_known: dict[Hashable, Encoded] = {}
"""The encodings of operations' attributes. Any thread changes it, in one step each."""


def _encode_attributes(operation: Node) -> Encoded:
    """An operation's attributes. Those of a network's operations are a few different ones."""
    attributes = operation.attributes()
    try:
        # Other than the values, their bytes tell 1 from True and 0.0 from -0.0; types tell records apart.
        types = tuple(type(getattr(operation, name)) for name in operation.__struct_fields__)
        key = type(operation), msgspec.msgpack.encode(attributes), types
    except (OverflowError, TypeError):
        return Encoded(canonical_bytes(attributes))
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[key] = Encoded(canonical_bytes(attributes))
    return found


@functools.lru_cache(_MOST_KNOWN, typed=True)
def _encoded_tensor(
    lies: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: object,
    role: object,
    alignment: object,
    before: object,
) -> Encoded:
    """A tensor that is no constant, encoded. `lies`: its dims and strides, which are ints.

    `typed`: True must not get the encoding of 1, nor a str that of a `DType`.
    """
    return Encoded(canonical_bytes((*lies, dtype, role, alignment, before)))


def _encoded_uids(numbers: Mapping[int, int], uids: Sequence[int]) -> Encoded:
    """The canonical numbers of tensors, encoded."""
    return _encoded_whole(tuple([numbers[uid] for uid in uids]))


@functools.lru_cache(_MOST_KNOWN)
def _encoded_whole(numbers: tuple[int, ...]) -> Encoded:
    return Encoded(canonical_bytes(numbers))


def _malformed_graph(field: str, value: object, problem: str) -> InvalidRequest:
    return InvalidRequest(field=field, value=value, problem=problem, fix="correct the graph")
