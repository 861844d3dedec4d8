"""Translates an operation graph into cuDNN's: the same tensors and operations, as a frontend graph.

A tensor's uid in cuDNN's graph is its canonical number plus 1, so that a plan
does not depend on the graph's own uids. One spatial dim becomes two, the first
of size 1, because cuDNN's convolutions have at least two.
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Convolutions.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans.errata import erratum
from cudnn_actor.protocol.conv import ConvSpec
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.operations import (
    Convolution,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    GraphTensor,
    Node,
    Pointwise,
    PointwiseMode,
    TensorRole,
)
from cudnn_actor.protocol.tensor import Layout, TensorSpec

__all__ = [
    "AbsentDevice",
    "Refused",
    "build_candidate",
    "candidates",
    "check_bytes",
    "convolved",
    "frontend_uids",
    "takes_bytes",
]

_DATA_TYPES = {
    DType.FLOAT64: "DOUBLE",
    DType.FLOAT32: "FLOAT",
    DType.FLOAT16: "HALF",
    DType.BFLOAT16: "BFLOAT16",
    DType.INT8: "INT8",
    DType.INT32: "INT32",
    DType.INT64: "INT64",
    DType.UINT8: "UINT8",
}
_POINTWISE = {
    PointwiseMode.ADD: "add",
    PointwiseMode.MUL: "mul",
    PointwiseMode.RELU: "relu",
    PointwiseMode.LEAKY_RELU: "leaky_relu",
    PointwiseMode.SIGMOID: "sigmoid",
    PointwiseMode.TANH: "tanh",
    PointwiseMode.GELU: "gelu",
    PointwiseMode.GELU_TANH: "gelu_approx_tanh",
    PointwiseMode.SWISH: "swish",
    PointwiseMode.ELU: "elu",
    PointwiseMode.SOFTPLUS: "softplus",
}
_PARAMETERS = {PointwiseMode.LEAKY_RELU: "negative_slope", PointwiseMode.SWISH: "swish_beta"}
_WITHOUT_PARAMETER = {PointwiseMode.ELU, PointwiseMode.SOFTPLUS}
"""The frontend supports these only with a parameter of 1."""


class Refused(Exception):
    """Raised when cuDNN does not accept a graph; there may be another way to run it. The text says why."""


class AbsentDevice(NamedTuple):
    """Takes the place of a handle where there is no device: cuDNN builds plans from its properties alone."""

    device_property: Any
    sm_version: int
    sm_count: int


def frontend_uids(graph: OperationGraph) -> dict[int, int]:
    """Each tensor's uid → its uid in cuDNN's graph: its canonical number plus 1."""
    return {uid: number + 1 for uid, number in graph.canonical_uids.items()}


def candidates(graph: OperationGraph, handle: Any, workspace_limit: int | None) -> Any:
    """The frontend's graph with its ranked candidates, none of them built yet. Blocks for milliseconds.

    `handle` may be an `AbsentDevice`. Raises `Refused` if cuDNN cannot represent the graph or has no
    candidate for it.
    """
    cudnn = libraries().cudnn
    try:
        lowered = _Lowering(graph, handle).lower()
        lowered.validate()
        lowered.build_operation_graph()
        lowered.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        lowered.deselect_numeric_notes(_unwanted(graph))
        if workspace_limit is not None:
            lowered.deselect_workspace_greater_than(workspace_limit)
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        # Also raised for descriptors that cuDNN rejects, and in a dead context, which the caller must check.
        raise Refused(_first_line(error)) from error
    return lowered


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _unwanted(graph: OperationGraph) -> list[Any]:
    """Notes of candidates to exclude: those less accurate or less deterministic than the graph's numerics."""
    note = libraries().cudnn.numerical_note
    notes = [note.REDUCED_PRECISION_REDUCTION]
    if not graph.numerics.tf32:
        notes.append(note.DOWN_CONVERT_INPUTS)
        if any(tensor.dtype is DType.FLOAT32 for tensor in convolved(graph)):
            notes.append(note.TENSOR_CORE)  # tensor cores round float32 to TF32
    if graph.numerics.deterministic:
        notes.append(note.NONDETERMINISTIC)
    return notes


def check_bytes(graph: OperationGraph) -> None:
    """Raise `Refused` for a convolution of bytes in a layout that cuDNN does not document as supported.

    cuDNN accepts such layouts all the same, and then computes wrong results or reads out of bounds.
    """
    for operation in graph.operations:
        tensors = [graph.tensor(uid) for uid in (*operation.reads, *operation.writes)]
        if isinstance(operation, Convolution) and not takes_bytes(tensors):
            raise Refused("cuDNN supports only one 8-bit type: int8, in NHWC, with a multiple of 4 channels")


def takes_bytes(tensors: Sequence[GraphTensor]) -> bool:
    """Whether cuDNN supports a convolution's operands and result (last). False only for some of bytes.

    https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-cnn-library.html
    """
    x, w, *_ = tensors
    if x.dtype.is_floating:
        return True
    fours = all(size % 4 == 0 for size in (x.dims[1], *w.dims[:2]))
    packed = (TensorSpec.packed(t.dims, t.dtype, Layout.NHWC).strides == t.strides for t in tensors)
    return x.dtype is DType.INT8 and fours and all(packed)


def convolved(graph: OperationGraph) -> list[GraphTensor]:
    """The tensors that convolutions read."""
    convolutions = [operation for operation in graph.operations if isinstance(operation, Convolution)]
    return [graph.tensor(uid) for operation in convolutions for uid in operation.reads]


class _Lowering:
    """Translates one graph into a frontend graph."""

    def __init__(self, graph: OperationGraph, handle: Any) -> None:
        cudnn = libraries().cudnn
        self._graph = graph
        self._uids = frontend_uids(graph)
        self._frontend = cudnn.pygraph(
            io_data_type=cudnn.data_type.FLOAT,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            **(handle._asdict() if isinstance(handle, AbsentDevice) else {"handle": handle}),
        )
        self._tensors: dict[int, Any] = {}
        self._widens = bool(convolved(graph))
        """Whether tensors need at least two spatial dims."""

    def lower(self) -> Any:
        for operation in self._graph.operations:
            inputs = [self._tensor(uid) for uid in operation.reads]
            (result,) = operation.writes
            self._name_output(result, self._add(operation, inputs))
        return self._frontend

    def _add(self, operation: Node, inputs: list[Any]) -> Any:
        match operation:
            case Pointwise():
                return self._pointwise(operation, inputs)
            case ConvolutionForward():
                add, names = self._frontend.conv_fprop, ("image", "weight")
            case ConvolutionBackwardData():
                add, names = self._frontend.conv_dgrad, ("loss", "filter")
            case ConvolutionBackwardFilter():
                add, names = self._frontend.conv_wgrad, ("image", "loss")
            case _:
                raise Refused(f"there is no frontend call for {operation.kind}")
        return add(
            **dict(zip(names, inputs, strict=True)),
            **_convolution(operation.conv, self._graph.compute(operation)),
        )

    def _pointwise(self, operation: Pointwise[int], inputs: list[Any]) -> Any:
        mode, parameter = operation.mode, operation.effective_parameter
        options = {_PARAMETERS[mode]: parameter} if mode in _PARAMETERS else {}
        if mode in _WITHOUT_PARAMETER and parameter != 1.0:
            raise Refused(f"{mode} with a parameter of {parameter} is not one of cuDNN's pointwise modes")
        add = getattr(self._frontend, _POINTWISE[mode])
        return add(*inputs, compute_data_type=data_type(self._graph.compute(operation)), **options)

    def _tensor(self, uid: int) -> Any:
        if uid not in self._tensors:
            tensor = self._graph.tensor(uid)
            dims, strides = self._shape(tensor)
            self._tensors[uid] = self._frontend.tensor(
                dim=dims,
                stride=strides,
                data_type=data_type(tensor.dtype),
                is_pass_by_value=tensor.role is TensorRole.SCALAR,
                uid=self._uids[uid],
            )
            if tensor.role is TensorRole.BOUND:
                self._tensors[uid].set_alignment_value(tensor.alignment)
        return self._tensors[uid]

    def _shape(self, tensor: GraphTensor) -> tuple[list[int], list[int]]:
        return spatial(tensor) if self._widens else (list(tensor.dims), list(tensor.strides))

    def _name_output(self, uid: int, output: Any) -> None:
        tensor = self._graph.tensor(uid)
        dims, strides = self._shape(tensor)
        bound = tensor.role is TensorRole.BOUND
        # Sums of int8 products are exact as int32. Between operations they are float32, like what follows.
        dtype = tensor.dtype if bound or tensor.dtype is not DType.INT32 else DType.FLOAT32
        output.set_uid(self._uids[uid])
        output.set_output(bound).set_data_type(data_type(dtype))
        output.set_dim(dims)
        output.set_stride(strides)
        if bound:
            output.set_alignment_value(tensor.alignment)
        self._tensors[uid] = output


def data_type(dtype: DType) -> Any:
    """The frontend's name for an element type."""
    return getattr(libraries().cudnn.data_type, _DATA_TYPES[dtype])


def spatial(tensor: GraphTensor) -> tuple[list[int], list[int]]:
    """Dims and strides with at least two spatial dims."""
    dims, strides = list(tensor.dims), list(tensor.strides)
    if len(dims) == 3:
        dims.insert(2, 1)
        strides.insert(2, strides[2] * tensor.dims[2])
    return dims, strides


def _convolution(conv: ConvSpec, compute: DType) -> Mapping[str, Any]:
    """A convolution's attributes; one spatial dim becomes two."""

    def both(values: tuple[int, ...], other: int) -> list[int]:
        return [other, *values] if len(values) == 1 else list(values)

    return {
        "pre_padding": both(conv.pre_padding, 0),
        "post_padding": both(conv.post_padding, 0),
        "stride": both(conv.stride, 1),
        "dilation": both(conv.dilation, 1),
        "compute_data_type": data_type(compute),
    }


def build_candidate(graph: OperationGraph, lowered: Any, index: int) -> None:
    """Build one of the candidates. Blocks for milliseconds to a second.

    Raises `Refused` if it cannot be built, if the notes, the workspace limit or an erratum exclude it, or if
    it is not cuDNN's.
    """
    cudnn = libraries().cudnn
    try:
        name = lowered.get_plan_name_at_index(index)
        # The frontend has engines of its own, kernels written in Python, and ranks some before cuDNN's.
        if cudnn.engines.is_python_engine(lowered.plans[index].engine_id):
            raise Refused(f"{name} is an engine of the frontend, not of cuDNN")
        if (known := erratum(graph, name, cudnn.backend_version())) is not None:
            raise Refused(known)
        lowered.build_plan_at_index(index)
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        raise Refused(_first_line(error)) from error
