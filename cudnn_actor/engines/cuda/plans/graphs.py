"""From an operation graph to cuDNN's: the same tensors and operations, in the frontend's words.

Tensors get the uid of their canonical number, counted from 1, so that a plan
means the same whatever the graph's own uids were. One spatial dim becomes two,
the first of them 1: cuDNN has no convolution of fewer.
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Convolutions.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans.errata import erratum
from cudnn_actor.protocol.conv import ConvSpec
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.operations import (
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    GraphTensor,
    Operation,
    Pointwise,
    PointwiseMode,
    TensorRole,
)
from cudnn_actor.protocol.tensor import Layout, TensorSpec

__all__ = [
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
"""The frontend has these with a parameter of 1 only."""


class Refused(Exception):
    """Raised when cuDNN does not take a graph: there may be another way to run it. The text says why."""


def frontend_uids(graph: OperationGraph) -> dict[int, int]:
    """Each tensor's uid → the one that it has in cuDNN's graph: its canonical number, from 1."""
    return {uid: number + 1 for uid, number in graph.canonical_uids().items()}


def candidates(graph: OperationGraph, handle: Any, workspace_limit: int | None) -> Any:
    """The frontend's graph with its ranked candidates, none of them built yet. Blocks for milliseconds.

    Raises `Refused` when cuDNN cannot represent the graph or proposes nothing for it.
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
        # Or a descriptor that the library does not take. A dead context says so too: the caller probes.
        raise Refused(_first_line(error)) from error
    return lowered


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _unwanted(graph: OperationGraph) -> list[Any]:
    """Notes of the candidates that do not compute as is asked: in full float32, and always the same bits."""
    note = libraries().cudnn.numerical_note
    notes = [note.REDUCED_PRECISION_REDUCTION]
    if not graph.numerics.tf32:
        notes.append(note.DOWN_CONVERT_INPUTS)
        if any(tensor.dtype is DType.FLOAT32 for tensor in convolved(graph)):
            notes.append(note.TENSOR_CORE)  # which takes float32 as TF32 only
    if graph.numerics.deterministic:
        notes.append(note.NONDETERMINISTIC)
    return notes


def check_bytes(graph: OperationGraph) -> None:
    """Raise `Refused` for a convolution of bytes that lie as cuDNN does not document to take them.

    It takes them all the same, and computes something else, or reads beyond them.
    """
    for operation in graph.operations:
        tensors = [graph.tensor(uid) for uid in (*operation.inputs, operation.output)]
        if not isinstance(operation, Pointwise) and not takes_bytes(tensors):
            raise Refused("of the 8-bit types it takes int8 only, in NHWC, with a multiple of 4 channels")


def takes_bytes(tensors: Sequence[GraphTensor]) -> bool:
    """Whether cuDNN takes a convolution's operands and result (last), as far as they are bytes.

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
    convolutions = [operation for operation in graph.operations if not isinstance(operation, Pointwise)]
    return [graph.tensor(uid) for operation in convolutions for uid in operation.inputs]


class _Lowering:
    """One graph on its way into the frontend's words."""

    def __init__(self, graph: OperationGraph, handle: Any) -> None:
        cudnn = libraries().cudnn
        self._graph = graph
        self._uids = frontend_uids(graph)
        self._frontend = cudnn.pygraph(
            io_data_type=cudnn.data_type.FLOAT,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle,
        )
        self._tensors: dict[int, Any] = {}

    def lower(self) -> Any:
        for operation in self._graph.in_order():
            inputs = [self._tensor(uid) for uid in operation.inputs]
            self._name_output(operation.output, self._add(operation, inputs))
        return self._frontend

    def _add(self, operation: Operation, inputs: list[Any]) -> Any:
        match operation:
            case Pointwise():
                return self._pointwise(operation, inputs)
            case ConvolutionForward():
                add, names = self._frontend.conv_fprop, ("image", "weight")
            case ConvolutionBackwardData():
                add, names = self._frontend.conv_dgrad, ("loss", "filter")
            case ConvolutionBackwardFilter():
                add, names = self._frontend.conv_wgrad, ("image", "loss")
        return add(**dict(zip(names, inputs, strict=True)), **_convolution(operation.conv, operation.compute))

    def _pointwise(self, operation: Pointwise, inputs: list[Any]) -> Any:
        mode, parameter = operation.mode, operation.parameter
        options = {_PARAMETERS[mode]: parameter} if mode in _PARAMETERS else {}
        if mode in _WITHOUT_PARAMETER and parameter != 1.0:
            raise Refused(f"{mode} with a parameter of {parameter} is not one of cuDNN's pointwise modes")
        add = getattr(self._frontend, _POINTWISE[mode])
        return add(*inputs, compute_data_type=data_type(operation.compute), **options)

    def _tensor(self, uid: int) -> Any:
        if uid not in self._tensors:
            tensor = self._graph.tensor(uid)
            dims, strides = spatial(tensor)
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

    def _name_output(self, uid: int, output: Any) -> None:
        tensor = self._graph.tensor(uid)
        dims, strides = spatial(tensor)
        bound = tensor.role is TensorRole.BOUND
        # Sums of int8 products are exact as int32; between operations they are float32, as what follows is.
        dtype = tensor.dtype if bound or tensor.dtype is not DType.INT32 else DType.FLOAT32
        output.set_uid(self._uids[uid])
        output.set_output(bound).set_data_type(data_type(dtype))
        output.set_dim(dims)
        output.set_stride(strides)
        if bound:
            output.set_alignment_value(tensor.alignment)
        self._tensors[uid] = output


def data_type(dtype: DType) -> Any:
    """The frontend's word for an element type."""
    return getattr(libraries().cudnn.data_type, _DATA_TYPES[dtype])


def spatial(tensor: GraphTensor) -> tuple[list[int], list[int]]:
    """Dims and strides with at least two spatial dims."""
    dims, strides = list(tensor.dims), list(tensor.strides)
    if len(dims) == 3:
        dims.insert(2, 1)
        strides.insert(2, strides[2] * tensor.dims[2])
    return dims, strides


def _convolution(conv: ConvSpec, compute: DType) -> Mapping[str, Any]:
    """A convolution's attributes, one spatial dim as two."""

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

    Raises `Refused` when it cannot be built, or when the notes, the workspace limit or an erratum exclude it.
    """
    try:
        if (known := erratum(graph, lowered.get_plan_name_at_index(index))) is not None:
            raise Refused(known)
        lowered.build_plan_at_index(index)
    except (libraries().cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        raise Refused(_first_line(error)) from error
