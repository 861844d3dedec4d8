"""A plan as data: the steps that run one after the other, and the location of each step's tensors.

A plan has one step if cuDNN accepts the whole graph, or if one kernel of our own computes it; else several:
kernels that pack tensors whose layout cuDNN does not read, one step for each operation, and a kernel for each
pointwise result. Tensors between steps are in the workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from cudnn_actor.engines.cuda.kernels.depthwise_kernels import Depthwise
from cudnn_actor.engines.cuda.kernels.elementwise import Elementwise
from cudnn_actor.engines.cuda.kernels.joined_kernels import Joined
from cudnn_actor.engines.cuda.kernels.line_kernels import Lined
from cudnn_actor.engines.cuda.kernels.row_copies import Rows
from cudnn_actor.engines.cuda.kernels.transposes import Tiled
from cudnn_actor.engines.cuda.operations.cublaslt import LtProduct
from cudnn_actor.engines.cuda.operations.fused_norms import Normed
from cudnn_actor.engines.cuda.operations.recurrent_calls import (
    LayerBackwardData,
    LayerBackwardWeights,
    Layers,
    LayersBackward,
    LayerWeights,
)
from cudnn_actor.protocol.operations import GraphTensor, Node

__all__ = [
    "Between",
    "Buffer",
    "GraphStep",
    "KernelStep",
    "Number",
    "OperationStep",
    "Part",
    "ProductStep",
    "Recipe",
    "Scratch",
    "Source",
    "Step",
    "Tuning",
    "align",
]

_ALIGNMENT = 256


def align(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of the alignment of device memory."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Buffer(msgspec.Struct, frozen=True, tag="buffer"):
    """A source in one of the plan's buffers, by its index in `graph.bound`, from this byte on."""

    number: int
    offset: int = 0


class Number(msgspec.Struct, frozen=True, tag="number"):
    """A source that is one of the plan's scalars, by its index in `graph.scalars`; cuDNN reads it on the
    host."""

    number: int
    double: bool


class Scratch(msgspec.Struct, frozen=True, tag="scratch"):
    """A place in the workspace, in bytes behind the part that cuDNN's own steps use.

    Parameters
    ----------
    offset
        The byte at which it begins.
    nbytes
        The most bytes that are read or written there.
    """

    offset: int
    nbytes: int


Source = Buffer | Number | Scratch


class GraphStep(msgspec.Struct, frozen=True, tag="graph"):
    """A step that runs one of cuDNN's plans.

    Parameters
    ----------
    engine
        cuDNN's name for the plan: "eng45_k2=5".
    workspace
        Bytes of workspace that it needs.
    uids, sources
        Its tensors' uids in cuDNN's graph, ascending, and the location of each.
    plan
        The plan as serialised by cuDNN. Empty if it has just been built, unless its kernels come from a
        kernel cache: the compiler then loads it from these bytes before its self-check.
    beside
        The numbers of the sources that its kernel may read too early; see `barriers.waits`.
    reads
        The numbers of the sources that it only reads. It may write all others.
    digest
        The digest of the operation graph; empty if it is not known.
    """

    engine: str
    workspace: int
    uids: tuple[int, ...]
    sources: tuple[Source, ...]
    plan: bytes = b""
    beside: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    digest: str = ""


AnyKernel = Elementwise | Joined | Rows | Tiled | Lined | Normed | Depthwise
"""The kernels of our own that plans store: each is a `Kernel`."""
K_co = TypeVar("K_co", bound=AnyKernel, covariant=True)


class KernelStep(msgspec.Struct, Generic[K_co], frozen=True, tag="kernel"):
    """A step that runs a kernel of our own. `sources`: the locations of the kernel's tensors."""

    kernel: K_co
    sources: tuple[Source, ...]

    @property
    def reads(self) -> Sequence[int]:
        """The numbers of the sources that the step only reads. It may write all other sources."""
        return self.kernel.reads


class OperationStep(msgspec.Struct, frozen=True, tag="operation"):
    """A step that runs one operation by one of its launchers: our own kernels, or libcudnn's functions.

    Parameters
    ----------
    operation
        The operation. Its operands are indices in `tensors`, and it has its graph's numerics.
    tensors, sources
        Its operands as they are stored, in the order of its fields, and the location of each. If there is
        one more location, it is that of the launcher's workspace.
    launcher
        The name of the launcher that runs it.
    """

    operation: (
        Node
        | LayerWeights[int]
        | Layers[int]
        | LayersBackward[int]
        | LayerBackwardData[int]
        | LayerBackwardWeights[int]
    )
    tensors: tuple[GraphTensor, ...]
    sources: tuple[Source, ...]
    launcher: str

    @property
    def reads(self) -> Sequence[int]:
        """The numbers of the sources that the step only reads. It may write all other sources."""
        changed = {*self.operation.writes}
        if isinstance(self.operation, LayersBackward):
            changed.add(self.operation.reserve)  # libcudnn writes to it, too
        return [number for number in range(len(self.tensors)) if number not in changed]


class ProductStep(msgspec.Struct, frozen=True, tag="product"):
    """A step that runs a product by cuBLASLt. `sources`: the locations of its tensors: see `LtProduct`."""

    product: LtProduct
    sources: tuple[Source, ...]

    @property
    def reads(self) -> Sequence[int]:
        """The numbers of the sources that the step only reads. It may write all other sources."""
        return self.product.reads


Step = GraphStep | KernelStep[AnyKernel] | OperationStep | ProductStep


class Timed(msgspec.Struct, frozen=True):
    """The times that tuning measured of a candidate for a piece.

    Parameters
    ----------
    name
        Its name among the candidates.
    us
        Device time by itself, in microseconds; None if it was not timed.
    workspace
        Bytes of workspace.
    fault
        Why it failed its self-check; empty if it did not.
    """

    name: str
    us: float | None
    workspace: int
    fault: str = ""


class Tuning(msgspec.Struct, frozen=True):
    """The result of tuning a plan, or one piece of it in a run of the whole.

    Parameters
    ----------
    heuristic_us, tuned_us
        Device time of the heuristic's plan and of the fastest plan, in microseconds.
    timed
        How many plans were timed.
    discarded
        Why candidates failed their self-check: "engine: reason".
    took_s
        Seconds that it took; 0 for a piece.
    instead_of
        The name of the first choice, if another plan was taken; else empty.
    candidates
        The measurements of each candidate, for a piece or for a whole that is a single piece.
    """

    heuristic_us: float
    tuned_us: float
    timed: int
    discarded: tuple[str, ...]
    took_s: float = 0.0
    instead_of: str = ""
    candidates: tuple[Timed, ...] = ()


class Part(msgspec.Struct, frozen=True):
    """A piece of the graph that a plan runs, for explanations and errors.

    Parameters
    ----------
    operations
        Its operations' numbers in the graph.
    steps
        How many of the recipe's steps run it.
    tag, workspace, checked, tuning
        Those of the piece's own plan.
    refused
        The reasons why plans that were preferred to this one do not run.
    own
        The offset from which on no other part uses the scratch memory.
    """

    operations: tuple[int, ...]
    steps: int
    tag: str
    workspace: int
    refused: tuple[str, ...] = ()
    checked: bool = True
    tuning: Tuning | None = None
    own: int = 0


class Between(msgspec.Struct, frozen=True):
    """A tensor between parts: its canonical number, its bytes and place, and its first and last part."""

    tensor: int
    nbytes: int
    offset: int
    first: int
    last: int


class Recipe(msgspec.Struct, frozen=True):
    """Everything in a plan except its live library objects.

    Parameters
    ----------
    tag
        The plan's tag, as in receipts.
    steps
        The steps, in the order in which they run.
    scratch
        Bytes for tensors between the steps.
    buffers, scalars
        The number of each that a run takes.
    tuning
        The measurements, if the plan was chosen by tuning.
    checked
        Whether it has passed its self-check.
    provisional
        Whether another plan was preferred, but takes long to compile.
    parts
        The pieces of the graph, in the order in which they run.
    between
        The tensors between the pieces.
    """

    tag: str
    steps: tuple[Step, ...]
    scratch: int
    buffers: int
    scalars: int
    tuning: Tuning | None = None
    checked: bool = True
    parts: tuple[Part, ...] = ()
    between: tuple[Between, ...] = ()
    provisional: bool = False

    @property
    def own_workspace(self) -> int:
        """Bytes that cuDNN's steps need; they run one after the other and share this memory."""
        return align(max((step.workspace for step in self.steps if isinstance(step, GraphStep)), default=0))

    @property
    def workspace(self) -> int:
        """Bytes of workspace in total."""
        return self.own_workspace + self.scratch
