"""A place to run messages on an engine, the way the actor does, with arrays in and arrays out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.base import Engine, Plan
from cudnn_actor.protocol import BufferRef, DType, TensorSpec, UnsupportedGraph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.messages.messages import Compute
from cudnn_actor.protocol.messages.operands import operand
from cudnn_actor.protocol.types.dtypes import DTypeLike

from .refusals import may_refuse

ARENA_BYTES = 16 << 20
_arenas = itertools.count(1000)


def old_value(dtype: DType) -> float:
    """What a buffer holds before it is written: NaN, 77, or True."""
    return float("nan") if dtype.is_floating else dtype is DType.BOOL or 77


class Workbench:
    """Buffers in one arena of an engine; everything not yet written holds what `old_value` says."""

    def __init__(self, engine: Engine, arena: int) -> None:
        self.engine = engine
        self._arena = arena
        self._next = 0
        self._offsets: dict[int, int] = {}
        self._plans: dict[str, Plan] = {}
        """By graph: those that `run` was asked to keep."""

    def begin_case(self) -> None:
        """Forget all buffers: the next case of a test has the whole arena. See `tests.in_one_test`.

        Waits for all that is enqueued: a device must not write to what the case before had.
        """
        _outlast(self.engine)
        self._next = 0
        self._offsets.clear()

    def place(self, array: np.ndarray, spec: TensorSpec | None = None) -> BufferRef:
        """A buffer that holds an array, packed unless a spec says otherwise."""
        array = np.asarray(array)  # a number of NumPy's is no array
        ref = self.empty(TensorSpec.like(np.array(array, order="C")) if spec is None else spec)
        self.engine.write(self.binding(ref), array)
        return ref

    def empty(self, spec: TensorSpec) -> BufferRef:
        """A buffer whose old contents would show."""
        ref = BufferRef(slot=len(self._offsets), generation=0, spec=spec, device=self.engine.device)
        self._offsets[ref.slot] = self._next
        self._next += -(-max(spec.nbytes, 1) // 256) * 256
        assert self._next <= ARENA_BYTES
        self.engine.fill(self.binding(ref), old_value(spec.dtype))
        return ref

    def binding(self, ref: BufferRef, spec: TensorSpec | None = None) -> Any:
        return self.engine.bind(self._arena, self._offsets[ref.slot], ref.spec if spec is None else spec)

    def bytes_of(self, ref: BufferRef) -> np.ndarray:
        """All bytes that a buffer spans, gaps included."""
        return self.engine.read(self.binding(ref, TensorSpec.packed((ref.spec.nbytes,), DType.UINT8)))

    def read(self, ref: BufferRef) -> np.ndarray:
        return self.engine.read(self.binding(ref))

    def run(
        self, message: Compute, *, workspace_limit: int | None = None, keep_plan: bool = False
    ) -> np.ndarray:
        """Build and run a message; its output. Skips the test where the engine may, and does, refuse it.

        `keep_plan`: build no plan if an earlier case of the test has kept that of an equal graph.
        """
        lowered = lower(message)
        graph = lowered.graph.digest() if keep_plan else ""
        plan = self._plans.get(graph) or self._build(lowered.graph, workspace_limit)
        if keep_plan:
            self._plans[graph] = plan
        self.execute(plan, message)
        return self.read(operand(message, lowered.outputs[0]))

    def _build(self, graph: OperationGraph, workspace_limit: int | None) -> Plan:
        try:
            return self.engine.build(graph, workspace_limit=workspace_limit)
        except UnsupportedGraph:
            if (why := may_refuse(self.engine.name, graph)) is None:
                raise
            pytest.skip(f"the {self.engine.name} engine refuses {why}")

    def execute(self, plan: Plan, message: Compute) -> None:
        """Run a plan with a message's buffers and scalars."""
        self.engine.execute(plan, *self.bound(message))

    def bound(self, message: Compute) -> tuple[list[Any], list[float]]:
        """A message's buffers and scalars, as an engine takes them."""
        lowered = lower(message)
        tensors = map(lowered.graph.tensor, lowered.graph.bound)
        buffers = [
            self.binding(operand(message, name), tensor.spec)
            for name, tensor in zip(lowered.buffers, tensors, strict=True)
        ]
        return buffers, [float(getattr(message, name)) for name in lowered.scalars]

    def run_graph(self, graph: OperationGraph, given: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Run a graph with arrays for the bound tensors that it only reads; what it wrote."""
        buffers = {uid: self.empty(graph.tensor(uid).spec) for uid in graph.bound}
        for uid, array in given.items():
            self.engine.write(self.binding(buffers[uid]), array)
        plan = self.engine.build(graph, workspace_limit=None)
        self.engine.execute(plan, [self.binding(buffers[uid]) for uid in graph.bound], ())
        return {uid: self.read(ref) for uid, ref in buffers.items() if uid not in given}


@contextmanager
def workbench(engine: Engine) -> Iterator[Workbench]:
    """A workbench in an arena of its own, given back in the end."""
    arena = next(_arenas)
    fd = engine.create_arena(arena, ARENA_BYTES)
    try:
        yield Workbench(engine, arena)
    finally:
        try:
            _outlast(engine)
        finally:
            engine.unmap_arena(arena)
            os.close(fd)


def _outlast(engine: Engine) -> None:
    """Wait for all that is enqueued: what a device still writes to must not be unmapped."""
    fence = engine.fence()
    while not engine.has_passed(fence):
        pass


def spread(dims: tuple[int, ...], dtype: DTypeLike, gap: int = 2) -> TensorSpec:
    """A spec with gaps between neighbours in every dim, spatial dims slowest."""
    strides, step = [0] * len(dims), gap
    for axis in (1, 0, *range(2, len(dims))) if len(dims) > 1 else range(len(dims)):
        strides[axis] = step
        step = step * dims[axis] + 1
    return TensorSpec.strided(dims, strides, dtype)
