"""Operation graphs: the computations that an engine runs, as data.

A graph consists of tensors, each identified by a number (its uid), and the
operations that read and write them. A tensor is *bound* to a buffer when the
graph runs, or a *scalar* passed by value, or *virtual*: it exists only between
operations.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import msgspec

from cudnn_actor.protocol.canonical import blake, canonical_bytes
from cudnn_actor.protocol.colours import Colours
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.numerics import Numerics
from cudnn_actor.protocol.operations import GraphTensor, Operation, TensorRole

__all__ = ["OperationGraph"]


class OperationGraph(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True, cache_hash=True
):
    """Tensors and the operations between them.

    Parameters
    ----------
    tensors
        Every tensor that an operation touches, each uid once.
    operations
        In any order; at most one of them writes each tensor, and none depends on its own output.
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
        """The tensor with that uid. Raises `KeyError` if there is none."""
        return self._by_uid[uid]

    @functools.cached_property
    def _by_uid(self) -> Mapping[int, GraphTensor]:
        return {t.uid: t for t in self.tensors}

    def in_order(self) -> tuple[Operation, ...]:
        """Operations in topological order: each comes after those whose output it reads.

        Of the operations that are ready, the one whose output has the lowest colour (see `colours`) comes
        first, so the order does not depend on how the graph was written down.
        """
        return self._order

    @functools.cached_property
    def _order(self) -> tuple[Operation, ...]:
        colours = Colours(self.tensors, self.operations).distinct()
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
        """Uids of the tensors bound to buffers, in canonical order: a plan's buffers."""
        return self._with_role(TensorRole.BOUND)

    @functools.cached_property
    def scalars(self) -> tuple[int, ...]:
        """Uids of the tensors passed by value, in canonical order: a plan's scalars."""
        return self._with_role(TensorRole.SCALAR)

    def _with_role(self, role: TensorRole) -> tuple[int, ...]:
        return tuple(uid for uid in self.canonical_uids() if self.tensor(uid).role is role)

    def digest(self) -> str:
        """64 hexadecimal digits that identify the graph's meaning, the same in every process.

        Names, the choice of uids and the order of tensors and operations do not matter. Every dim, stride,
        type, alignment, role, attribute and float's bit pattern does.
        """
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        uids = self.canonical_uids()
        operations = tuple(
            (op.attributes(), tuple(uids[u] for u in op.inputs), uids[op.output]) for op in self.in_order()
        )
        tensors = tuple(self.tensor(uid).meaning() for uid in uids)
        return blake(canonical_bytes(("graph/1", tensors, operations, self.numerics)))


def _malformed(field: str, value: object, problem: str) -> InvalidRequest:
    return InvalidRequest(field=field, value=value, problem=problem, fix="correct the graph")
