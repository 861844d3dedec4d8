"""Softmax by libcudnn. Kernels of our own come first: see `in_lines`.

libcudnn's accurate algorithm takes an axis of any length, and at most three other
dims, neighbours of which count as one where possible.
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels.kernel import Run
from cudnn_actor.engines.cuda.kernels.lines import lines_of
from cudnn_actor.engines.cuda.library.libcudnn import factor, libcudnn, tensor_descriptor
from cudnn_actor.engines.cuda.operations.implementation import Launcher, implement
from cudnn_actor.protocol.operations import GraphTensor, Softmax, SoftmaxBackward

__all__ = ["library_softmax"]

AnySoftmax = Softmax[int] | SoftmaxBackward[int]

_ACCURATE, _LOG = 1, 2
"""cudnnSoftmaxAlgorithm_t."""
_BY_CHANNEL = 1
"""cudnnSoftmaxMode_t."""
_MOST_OTHERS = 3


def library_softmax(operation: AnySoftmax, tensors: Sequence[GraphTensor], handle: Any) -> Run:
    """The run of a softmax by libcudnn. Raises `Refused`, and `EngineFailure` if it does not take it."""
    axis = operation.axis % len(tensors[0].dims)
    strides, dtypes = [tensor.strides for tensor in tensors], [tensor.dtype for tensor in tensors]
    lines = lines_of(tensors[0].dims, strides, (axis,), dtypes, vectors=range(len(tensors)))
    if len(lines.across) > _MOST_OTHERS:
        raise Refused("libcudnn's softmax has four dims")
    if not lines.total * lines.length:
        raise Refused("libcudnn's softmax needs elements")
    ones = [(1, (1,) * len(tensors))] * _MOST_OTHERS
    along = lines.along[0] if lines.along else ones[0]
    first, *rest = [*lines.across, *ones][:_MOST_OTHERS]
    axes = [first, along, *rest]
    descriptors = [
        tensor_descriptor([size for size, _ in axes], [steps[t] for _, steps in axes], tensor.dtype)
        for t, tensor in enumerate(tensors)
    ]
    one, zero = (factor(value, tensors[0].dtype) for value in (1.0, 0.0))
    references = ctypes.byref(one), ctypes.byref(zero)
    algorithm = _LOG if operation.log else _ACCURATE
    library, cudnn_handle = libcudnn(), handle.backend_handle

    def forward(addresses: Sequence[int], _: Sequence[float]) -> None:
        x, y = addresses
        of_x, of_y = (descriptor.pointer for descriptor in descriptors)
        library.cudnnSoftmaxForward(
            cudnn_handle, algorithm, _BY_CHANNEL, references[0], of_x, x, references[1], of_y, y
        )

    def backward(addresses: Sequence[int], _: Sequence[float]) -> None:
        dy, y, dx = addresses
        of_dy, of_y, of_dx = (descriptor.pointer for descriptor in descriptors)
        library.cudnnSoftmaxBackward(
            cudnn_handle, algorithm, _BY_CHANNEL, references[0], of_y, y, of_dy, dy, references[1], of_dx, dx
        )

    return forward if isinstance(operation, Softmax) else backward


implement(Softmax, SoftmaxBackward, launchers={"library": Launcher(library_softmax)})
