"""The kernels that copy tensors from one form to another."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_actor.engines.cuda.kernels.elementwise import Elementwise, describe_copy
from cudnn_actor.engines.cuda.kernels.row_copies import Rows, row_concatenation, row_copy
from cudnn_actor.engines.cuda.kernels.transposes import Tiled, describe_tiled
from cudnn_actor.engines.cuda.running.recipe import AnyKernel
from cudnn_actor.protocol.operations import Concat, GraphTensor

__all__ = ["copy_kernel", "copy_kernel_by_elements", "rows_of_parts"]


def copy_kernel(tensor: GraphTensor, to: GraphTensor) -> AnyKernel:
    """The kernel that copies a tensor, perhaps converted, to another of its dims.

    It copies whole rows, if both tensors have rows for that.
    """
    kernel = copy_kernel_by_elements(tensor, to)
    if isinstance(kernel, Elementwise) and tensor.dtype is to.dtype:
        strides, alignments = [to.strides, tensor.strides], [to.alignment, tensor.alignment]
        return row_copy(to.dims, strides, alignments, to.dtype.itemsize) or kernel
    return kernel


def copy_kernel_by_elements(tensor: GraphTensor, to: GraphTensor) -> Elementwise | Tiled:
    """The kernel that copies a tensor, perhaps converted, to another of the same dims."""
    strides, alignments = [to.strides, tensor.strides], [to.alignment, tensor.alignment]
    if tensor.dtype is to.dtype:
        tiles = describe_tiled(to.dims, strides, alignments, to.dtype.itemsize)
        if tiles is not None:
            return tiles
    return describe_copy((to.dtype, tensor.dtype), to.dims, strides, alignments)


def rows_of_parts(operation: Concat[int], result: GraphTensor, tensors: Sequence[GraphTensor]) -> Rows | None:
    """The kernel that copies all parts of a concatenation row by row; None if their rows do not fit."""
    return row_concatenation(
        operation.axis % len(result.dims),
        result.strides,
        [(tensor.dims, tensor.strides) for tensor in tensors],
        [result.alignment, *(tensor.alignment for tensor in tensors)],
        result.dtype.itemsize,
    )
