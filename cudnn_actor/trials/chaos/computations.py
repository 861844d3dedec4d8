"""The computations of the load: the examples of every operation, and facts that follow from them.

The facts are the buffers that a request names, their specs, the values that its inputs need, and its results.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from cudnn_actor.protocol import (
    BufferRef,
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    DType,
    Operation,
    RunGraph,
    TensorSpec,
)
from cudnn_actor.protocol.messages.messages import Compute
from cudnn_actor.protocol.operations import convolution, examples
from cudnn_actor.protocol.operations.example import Example
from cudnn_actor.trials.chaos.graph_computation import GraphComputation
from cudnn_actor.trials.chaos.loop_computation import LoopComputation

__all__ = [
    "HEAVY",
    "PROBLEMS",
    "Computation",
    "Problem",
    "accumulates",
    "allocates",
    "bare",
    "message",
    "message_to_apply",
    "updated_inputs",
]

Computation = Operation[str] | GraphComputation | LoopComputation
"""An operation, a graph or a loop, whose operands are names of a problem's tensors: their roles."""

_COMPOSITES: dict[type, Any] = {
    ConvolutionForward: ConvFwd,
    ConvolutionBackwardData: ConvBwdData,
    ConvolutionBackwardFilter: ConvBwdFilter,
}
"""Operations that are sent as other messages, which can also add to their results."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem(Example):
    """An example of operations, a graph or a loop, and facts that follow from it. Names of tensors are
    roles."""

    operations: tuple[Computation, ...]

    @functools.cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The spec of each tensor's buffers."""
        specs = {
            role: self._packed_spec(dims, self.dtypes.get(role, DType.FLOAT32))
            for role, dims in self.dims.items()
        }
        for operation in self.operations:
            inputs = dict(operation.named(operation.inputs))
            for role in inputs.values():
                specs.setdefault(role, specs[role.removeprefix("d")])
            inferred = operation.infer({name: specs[role] for name, role in inputs.items()})
            for name, role in operation.named(operation.outputs):
                if role not in specs:
                    like = inferred[name] if name in inferred else specs[role.removeprefix("d")]
                    specs[role] = self._packed_spec(like.dims, like.dtype)
        return specs

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """The tensors that operations read."""
        return tuple(dict.fromkeys(role for operation in self.operations for role in operation.reads))

    @functools.cached_property
    def source(self) -> str:
        """The tensor that all of it begins with."""
        return self.inputs[0]

    @functools.cached_property
    def handed_on(self) -> frozenset[str]:
        """The tensors that one operation writes and another reads."""
        return frozenset(
            role for operation in self.operations for role in operation.writes if role in self.inputs
        )

    @property
    def forms(self) -> tuple[Computation, ...]:
        """The operations, with and without their optional operands."""
        forms = ((each, bare(each)) if each.optional else (each,) for each in self.operations)
        return tuple(itertools.chain.from_iterable(forms))

    def specs_of(self, operation: Computation) -> dict[str, TensorSpec]:
        """The spec of each operand, by its name."""
        return {name: self.specs[role] for name, role in operation.named()}

    def _packed_spec(self, dims: tuple[int, ...], dtype: DType) -> TensorSpec:
        return TensorSpec.packed(dims, dtype, self.layout if 3 <= len(dims) <= 5 else "NCHW")


def bare(operation: Computation) -> Computation:
    """The operation without its optional operands."""
    if isinstance(operation, GraphComputation | LoopComputation):
        return operation
    return msgspec.structs.replace(operation, **dict.fromkeys(operation.optional))


def accumulates(operation: Computation) -> bool:
    """Whether there is a message that adds to the operation's result."""
    return type(operation) in _COMPOSITES


def updated_inputs(operation: Computation) -> frozenset[str]:
    """The inputs that an operation also writes: a graph's running state. It must not run twice."""
    return operation.updated_inputs if isinstance(operation, GraphComputation) else frozenset()


def message(operation: Computation, refs: Mapping[str, BufferRef], *, beta: float = 0.0) -> Compute:
    """The message for an operation on buffers, by the operands' names."""
    composite = _COMPOSITES.get(type(operation))
    if composite is None:
        asked: Compute = operation.with_operands(refs.__getitem__)
        return asked
    found: Compute = composite(**refs, conv=operation.conv, beta=beta)  # type: ignore[union-attr]
    return found


def allocates(operation: Computation) -> bool:
    """Whether it can be applied, so that the service allocates all that it writes. Nobody gets the scratch
    buffer of a loop that way."""
    return not isinstance(operation, LoopComputation)


def message_to_apply(operation: Computation, refs: Mapping[str, BufferRef]) -> Compute:
    """The message that applies an operation to buffers, by the operands' names.

    The service allocates the outputs that have no buffer.
    """
    if isinstance(operation, GraphComputation):
        graph = operation.graph
        left_out: Any = None
        return RunGraph(graph=graph, buffers=tuple(refs.get(name, left_out) for name in graph.places))
    asked: Compute = operation.with_operands(refs.get)  # type: ignore[arg-type]
    return asked


PROBLEMS = (
    *(Problem(**vars(example)) for example in examples()),
    Problem(**vars(convolution.example((1, 1, 260, 260), (1, 1, 1, 1)))),
)
"""Many problems, since a quarantined plan is not used again. Some write much and compute little, so that a
fault sometimes hits them while they write."""

HEAVY = len(PROBLEMS) - 1
"""The last problem: its arrays have 264 KiB, more than an event loop copies itself."""
