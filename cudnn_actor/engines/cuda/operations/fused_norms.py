"""Norms as kernels of our own, alone or with the pointwise operations around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cudnn_actor.engines.cuda.kernels.element_types import value_dtype
from cudnn_actor.engines.cuda.kernels.expressions import (
    Earlier,
    Expression,
    Leaf,
    Result,
    scalars_of,
)
from cudnn_actor.engines.cuda.kernels.kernel import Launch
from cudnn_actor.engines.cuda.kernels.norm_kernels import Norm, Normal, Operand, launches_of, workspace_of
from cudnn_actor.engines.cuda.operations import channel_norms, normalization
from cudnn_actor.engines.cuda.operations.implementation import implement, kernels
from cudnn_actor.engines.cuda.operations.norm_passes import ELEMENTS
from cudnn_actor.protocol.graphs.step_kinds import StepKind
from cudnn_actor.protocol.operations import (
    BatchNorm,
    BatchNormBackward,
    BatchNormTraining,
    GenStats,
    GraphTensor,
    GroupNorm,
    GroupNormBackward,
    InstanceNorm,
    InstanceNormBackward,
    LayerNorm,
    LayerNormBackward,
    Node,
    RMSNorm,
    RMSNormBackward,
)
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["FUSED", "Normed", "alone", "beside", "elements", "norm_launches", "norm_of", "norm_workspace"]

_LOWERED: tuple[type[Node], ...] = (BatchNormTraining, BatchNormBackward, InstanceNorm, GenStats)
"""The norms of channels that cuDNN has, too."""
_OWN: tuple[type[Node], ...] = (BatchNorm, InstanceNormBackward, GroupNorm, GroupNormBackward)
"""The other norms of channels. cuDNN 9.19 gives other results of InstanceNormBackward from run to run."""
FUSED = frozenset((*_LOWERED, *_OWN))
"""The norms that are fused with the pointwise operations around them.

Norms of rows are not: their gradients take three to eight times as long as cuDNN's (9.19, H200), which is
more than fusing gains.
"""


class Normed(msgspec.Struct, frozen=True, tag="normed"):
    """A norm with the pointwise operations around it, as data.

    Parameters
    ----------
    operation
        The norm. Its operands are indices in `tensors`.
    tensors
        The operands, as they are stored or, if they are not, as they would be.
    body
        The values that are computed of each element, in this order; one is a `Normal`. `Earlier` has the
        index of an earlier one.
    results
        The results that are stored for each element.
    operands
        The element types of the leaves, by number. The first leaf has x's dims.
    strides
        The strides of the leaves, then of the results, over x's dims; 0 where a leaf is broadcast.
    in_place
        Whether a result may overwrite a leaf.
    """

    operation: Node
    tensors: tuple[GraphTensor, ...]
    body: tuple[Expression | Normal, ...]
    results: tuple[Result, ...]
    operands: tuple[DType, ...]
    strides: tuple[tuple[int, ...], ...]
    in_place: bool = False

    @property
    def workspace(self) -> int:
        """Bytes for the parts of lines."""
        return workspace_of(norm_of(self))

    # `Kernel`. Its tensors are the leaves, the norm's operands that are `beside`, the results, the workspace.

    is_empty = False

    @property
    def name(self) -> str:
        """See `Kernel.name`."""
        return f"{self.operation.kind}-fused"

    @property
    def title(self) -> str:
        """See `Kernel.title`."""
        return StepKind.NORM.step_name(f"{self.operation.kind}: {len(self.launches())}")

    @property
    def reads(self) -> list[int]:
        """See `Kernel.reads`."""
        leaves = range(len(self.operands))
        weights = (
            len(leaves) + number
            for number, operand in enumerate(beside(self.operation))
            if operand not in self.operation.writes
        )
        return [*leaves, *weights]

    def launches(self) -> tuple[Launch, ...]:
        """A launch for each of the norm's kernels."""
        return launches_of(norm_of(self))


def elements(operation: Node) -> list[int]:
    """The inputs of a norm that have an element for each of x's."""
    return [operand for name, operand in operation.named(operation.inputs) if name in ELEMENTS]


def beside(operation: Node) -> list[int]:
    """The operands of a norm that have other dims than x: weights and statistics."""
    return [operand for name, operand in operation.named() if name not in ELEMENTS]


def norm_of(of: Normed) -> Norm:
    """The norm as its kernels see it."""
    given = {name: of.tensors[number] for name, number in of.operation.named()}
    dims = given["x"].dims
    describe = channel_norms.describe if type(of.operation) in FUSED else normalization.describe
    found = describe(of.operation, given)
    operands, results = {}, {}
    for n, (dtype, steps) in enumerate(zip(of.operands, of.strides, strict=False)):
        whole = all(step or size == 1 for step, size in zip(steps, dims, strict=True))
        operands[f"in{n}"] = Operand(dtype, found.split(steps), whole, written=False)
    for name, strides in found.beside.items():
        operands[name] = Operand(given[name].dtype, strides, False, name in of.operation.outputs)
    for n, (result, steps) in enumerate(zip(of.results, of.strides[len(of.operands) :], strict=True)):
        results[f"out{n}"] = result
        operands[f"out{n}"] = Operand(result.dtype, found.split(steps), whole=True, written=True)
    (normal,) = (node for node in of.body if isinstance(node, Normal))
    names = [name for name in of.operation.inputs if name in ELEMENTS]
    return Norm(
        dims=found.dims,
        operands=operands,
        passes=found.passes,
        compute=value_dtype(given["x"].dtype),
        given=dict(zip(names, normal.operands, strict=True)),
        body=of.body,
        results=results,
        numbers=found.numbers,
        scalars=scalars_of(of.body),
        in_place=of.in_place,
    )


# A norm alone.


def norm_launches(operation: Any, tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launches of a norm."""
    order = [*_order(operation), len(tensors)]  # the workspace is the last
    return [launch.on(order) for launch in alone(operation, tensors).launches()]


def norm_workspace(operation: Any, tensors: Sequence[GraphTensor]) -> int:
    """Bytes for the parts of lines."""
    return alone(operation, tensors).workspace


def alone(operation: Any, tensors: Sequence[GraphTensor]) -> Normed:
    """Describe a norm with nothing around it."""
    read = [tensors[number] for number in elements(operation)]
    written = [tensors[number] for name, number in operation.named(operation.outputs) if name in ELEMENTS]
    given = tuple(Leaf(n, tensor.dtype) for n, tensor in enumerate(read))
    return Normed(
        operation=operation,
        tensors=tuple(tensors),
        body=(Normal(given),),
        results=tuple(Result(Earlier(0), tensor.dtype) for tensor in written),
        operands=tuple(tensor.dtype for tensor in read),
        strides=tuple(tensor.strides for tensor in (*read, *written)),
    )


def _order(operation: Any) -> list[int]:
    """The places of a kernel's tensors among the operation's operands."""
    places = {name: place for place, (name, _) in enumerate(operation.named())}
    names = [name for name in places if name not in ELEMENTS]
    read, written = (
        [n for n in of if n in ELEMENTS and n in places] for of in (operation.inputs, operation.outputs)
    )
    return [places[name] for name in (*read, *names, *written)]


_KERNEL = kernels(norm_launches, norm_workspace)
implement(
    LayerNorm,
    LayerNormBackward,
    RMSNorm,
    RMSNormBackward,
    lower=normalization.lower_normalization,
    launchers=_KERNEL,
)
implement(*_LOWERED, lower=channel_norms.lower_channel_norm, launchers=_KERNEL)
implement(*_OWN, launchers=_KERNEL)
