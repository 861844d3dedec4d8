"""Translates an operation graph into cuDNN's, and asks cuDNN for the candidates that can run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.cudnn.compiled_attention import COMPILED_ATTENTION
from cudnn_actor.engines.cuda.cudnn.errata import erratum
from cudnn_actor.engines.cuda.cudnn.frontend_graph import FrontendGraph, Refused
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS
from cudnn_actor.engines.cuda.operations.implementation import Computed
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Convolution, GraphTensor, Node, Pointwise
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec

__all__ = [
    "COMPILES",
    "DYNAMIC",
    "TAKES_LONGER",
    "AbsentDevice",
    "CandidateNames",
    "OnRefusal",
    "build_candidate",
    "candidates",
    "check_whole",
    "computed_first",
    "ignore_refusal",
    "is_compiled_first",
    "names_of",
    "serialise",
    "takes_bytes",
    "why_never_built",
]


OnRefusal = Callable[[str], object]
"""Called with the reason why a plan cannot be built. To find the reason may have taken half a second."""
COMPILES = "cuDNN would compile its kernel first: left for later"
"""The reason why a candidate is not built where there is no time to compile kernels."""
TAKES_LONGER = "cuDNN takes longer to give its plan: left for later"
"""The reason why cuDNN is not asked if another plan is available sooner."""
DYNAMIC = "-dynamic"
"""The end of the names of plans that share their kernels with graphs of other sizes."""


def ignore_refusal(reason: str) -> None:
    """Ignore the reason why a plan cannot be built."""


class AbsentDevice(NamedTuple):
    """Takes the place of a handle without a device: cuDNN builds plans from a device's properties alone."""

    device_property: Any
    sm_version: int
    sm_count: int


def candidates(
    graph: OperationGraph,
    handle: Any,
    workspace_limit: int | None,
    *,
    fallbacks: bool = True,
    cache: Any = None,
) -> Any:
    """The frontend's graph with its ranked candidates, none of them built yet. Blocks for milliseconds.

    `handle` may be an `AbsentDevice`. cuDNN's fallbacks come after the others, and take three times as long
    to ask for. `cache` is one of cuDNN's kernel caches: candidates are then those whose kernels it can keep.

    Raises `Refused` if cuDNN cannot represent the graph or has no candidate for it.
    """
    cudnn = libraries().cudnn
    modes = [cudnn.heur_mode.A] + [cudnn.heur_mode.FALLBACK] * fallbacks
    try:
        lowered = _lower(graph, handle, cache)
        lowered.validate()
        lowered.build_operation_graph()
        lowered.create_execution_plans(modes)
        lowered.deselect_numeric_notes(_notes_to_avoid(graph))
        if workspace_limit is not None:
            lowered.deselect_workspace_greater_than(workspace_limit)
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        # Also raised for descriptors that cuDNN rejects, and in a dead context, which the caller must check.
        raise Refused(_first_line(error)) from error
    return lowered


class CandidateNames:
    """The names of the candidates, in order. cuDNN is asked for a name when it is needed.

    To ask for the names of all candidates of a convolution takes about as long as to ask for the candidates.
    """

    def __init__(self, lowered: Any) -> None:
        self._lowered = lowered
        self._count = int(lowered.get_execution_plan_count())

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> str:
        name: str = self._lowered.get_plan_name_at_index(index)
        return name


def names_of(lowered: Any) -> list[str]:
    """The names of all candidates, in order."""
    names = CandidateNames(lowered)
    return [names[index] for index in range(len(names))]


def _lower(graph: OperationGraph, handle: Any, cache: Any) -> Any:
    """The graph as one of the frontend's, with no candidates yet. Raises `Refused`."""
    cudnn = libraries().cudnn
    pygraph = cudnn.pygraph(
        io_data_type=cudnn.data_type.FLOAT,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **(handle._asdict() if isinstance(handle, AbsentDevice) else {"handle": handle}),
        **({} if cache is None else {"is_dynamic_shape_enabled": True, "kernel_cache": cache}),
    )
    frontend_graph = FrontendGraph(graph, pygraph)
    for operation in graph.operations:
        lower = IMPLEMENTATIONS[type(operation)].lower
        if lower is None:
            raise Refused(f"there is no frontend call for {operation.kind}")
        lower(frontend_graph, operation)
    return pygraph


def _first_line(error: Exception) -> str:
    """The first line of an error's text."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _notes_to_avoid(graph: OperationGraph) -> list[Any]:
    """The numeric notes of candidates that are less accurate or deterministic than the numerics ask for."""
    note = libraries().cudnn.numerical_note
    notes = [note.REDUCED_PRECISION_REDUCTION]
    if not graph.numerics.tf32:
        notes.append(note.DOWN_CONVERT_INPUTS)
        if any(_multiplies_float32(graph, operation) for operation in graph.operations):
            notes.append(note.TENSOR_CORE)  # tensor cores round float32 to TF32
    if graph.numerics.deterministic:
        notes.append(note.NONDETERMINISTIC)
    return notes


def _multiplies_float32(graph: OperationGraph, operation: Node) -> bool:
    """Whether an operation may be computed in TF32."""
    return not isinstance(operation, Pointwise) and graph.tensor(operation.reads[0]).dtype is DType.FLOAT32


def check_whole(graph: OperationGraph) -> None:
    """Raise `Refused` for a graph that must not run as a single graph of cuDNN's, even where it accepts it.

    cuDNN computes wrong results or reads out of bounds for a convolution of bytes in a layout that it does
    not document as supported, for operands that must be computed first (`Implementation.computed`), and for
    operands that are overwritten. Behind a convolution, it computes wrong results for operands that differ
    between samples but not between pixels (9.19, bfloat16).
    Its frontend's attention changes the shape of the tensor of keys, so that queries of the same tensor are
    read wrongly.
    """
    overwritten = {tensor.overwrites for tensor in graph.tensors}
    for operation in graph.operations:
        others = overwritten - _statistics_in_place(graph, operation)
        if not isinstance(operation, Pointwise) and not others.isdisjoint(operation.reads):
            raise Refused(f"cuDNN's {operation.kind} may still read what a result overwrites")
        if computed_first(graph, operation):
            raise Refused(f"cuDNN's {operation.kind} needs operands that are computed first")
        if isinstance(operation, Convolution) and _has_operand_of_samples(graph, operation.writes[0]):
            raise Refused("behind a convolution, cuDNN takes values of other samples than each sample's own")
        reads = operation.reads
        if not isinstance(operation, Pointwise) and len(set(reads)) < len(reads):
            raise Refused(f"cuDNN's {operation.kind} needs a tensor for each of its operands")
        tensors = [graph.tensor(uid) for uid in (*operation.reads, *operation.writes)]
        if isinstance(operation, Convolution) and not takes_bytes(tensors):
            raise Refused("cuDNN supports only one 8-bit type: int8, in NHWC, with a multiple of 4 channels")


def _has_operand_of_samples(graph: OperationGraph, result: int) -> bool:
    """Whether an operand behind a convolution differs between samples, but not between pixels or channels."""
    dims = graph.tensor(result).dims
    read = {uid for op in graph.operations if isinstance(op, Pointwise) for uid in op.reads}
    shapes = [graph.tensor(uid).dims for uid in read - graph.written]
    return any(len(shape) == len(dims) and shape != dims and shape[0] > 1 for shape in shapes)


def _statistics_in_place(graph: OperationGraph, operation: Node) -> set[int]:
    """The running statistics that a norm overwrites. It may: a new number depends on the old one alone."""
    named = dict(operation.named())
    pairs = ((uid, named.get(f"new_{name}")) for name, uid in named.items())
    return {uid for uid, new in pairs if new is not None and graph.tensor(new).overwrites == uid}


def computed_first(graph: OperationGraph, operation: Node) -> Mapping[str, Computed]:
    """The tensors that cuDNN must get instead of some operands, by name: see `Implementation.computed`."""
    compute = IMPLEMENTATIONS[type(operation)].computed
    if compute is None:
        return {}
    named = operation.named()
    return compute(operation, {name: graph.tensor(uid) for name, uid in named})


def takes_bytes(tensors: Sequence[GraphTensor]) -> bool:
    """Whether cuDNN supports a convolution's operands and, the last, its result. False only for bytes.

    https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-cnn-library.html
    """
    x, w, *_ = tensors
    if x.dtype.is_floating:
        return True
    fours = all(size % 4 == 0 for size in (x.dims[1], *w.dims[:2]))
    packed = (TensorSpec.packed(t.dims, t.dtype, Layout.NHWC).strides == t.strides for t in tensors)
    return x.dtype is DType.INT8 and fours and all(packed)


def serialise(lowered: Any) -> bytes:
    """A built graph as cuDNN's bytes. Raises `Refused` if cuDNN cannot write them."""
    try:
        return bytes(lowered.serialize(as_bytes=True))
    except (libraries().cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        raise Refused(_first_line(error)) from error


def is_compiled_first(lowered: Any, index: int) -> bool:
    """Whether cuDNN notes that it compiles a candidate's kernel when it builds the plan."""
    notes = lowered.get_behavior_notes_for_plan_at_index(index)
    return libraries().cudnn.behavior_note.RUNTIME_COMPILATION in notes


def why_never_built(
    graph: OperationGraph, lowered: Any, index: int, name: str, *, subject: str = "it"
) -> str | None:
    """Why a candidate of this name is never built; None if it may be. `subject`: begins the reason."""
    cudnn = libraries().cudnn
    # The frontend has engines of its own, kernels written in Python, and ranks some before cuDNN's.
    if cudnn.engines.is_python_engine(lowered.plans[index].engine_id):
        return f"{subject} is an engine of the frontend, not of cuDNN"
    if graph.numerics.excludes(name):
        return f"{subject} is excluded by the graph's numerics"
    return erratum(graph, name, cudnn.backend_version())


def build_candidate(graph: OperationGraph, lowered: Any, index: int, *, precompiled: bool = False) -> None:
    """Build one of the candidates. Blocks for milliseconds to a second.

    Raises `Refused` if it cannot be built, if the notes, the workspace limit or an erratum exclude it, or if
    it is not cuDNN's. With `precompiled`, also if cuDNN notes that it compiles the kernel: the reason is then
    `COMPILES`.
    """
    cudnn = libraries().cudnn
    try:
        name = lowered.get_plan_name_at_index(index)
        if (reason := why_never_built(graph, lowered, index, name, subject=name)) is not None:
            raise Refused(reason)
        if precompiled and is_compiled_first(lowered, index):
            raise Refused(COMPILES)
        lowered.build_plan_at_index(index)
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        raise Refused(_first_line(error)) from error
    COMPILED_ATTENTION.note(graph, name)
