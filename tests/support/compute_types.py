"""For which types of sums cuDNN has plans. Used in a child."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.protocol import DType, TensorSpec

from .device import h200

__all__ = ["KINDS", "plans"]

_IMAGES, _FILTERS = (8, 64, 28, 28), (64, 64, 3, 3)
_SPEC = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}


def plans(kind: str, dtype: DType, compute: DType) -> bool:
    """Whether cuDNN finalises a plan of an operation on tensors of a dtype, which computes in a type."""
    cudnn: Any = libraries().cudnn
    types = {
        DType.FLOAT64: cudnn.data_type.DOUBLE,
        DType.FLOAT32: cudnn.data_type.FLOAT,
        DType.FLOAT16: cudnn.data_type.HALF,
        DType.BFLOAT16: cudnn.data_type.BFLOAT16,
    }
    graph = cudnn.pygraph(
        io_data_type=types[dtype],
        intermediate_data_type=types[compute],
        compute_data_type=types[compute],
        **h200()._asdict(),
    )
    try:
        _ADD[kind](graph).set_output(True)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.build_plans()
    except Exception as error:
        if "NotSupported" not in type(error).__name__ and "ompilation" not in str(error):
            raise
        return False
    return True


def _tensor(graph: Any, dims: tuple[int, ...]) -> Any:
    return graph.tensor(dim=list(dims), stride=list(TensorSpec.packed(dims).strides))


def _shaped(output: Any, dims: tuple[int, ...]) -> Any:
    return output.set_dim(list(dims)).set_stride(list(TensorSpec.packed(dims).strides))


def _forward(graph: Any) -> Any:
    return graph.conv_fprop(image=_tensor(graph, _IMAGES), weight=_tensor(graph, _FILTERS), **_SPEC)


def _by_data(graph: Any) -> Any:
    dx = graph.conv_dgrad(loss=_tensor(graph, _IMAGES), filter=_tensor(graph, _FILTERS), **_SPEC)
    return _shaped(dx, _IMAGES)


def _by_filter(graph: Any) -> Any:
    dw = graph.conv_wgrad(image=_tensor(graph, _IMAGES), loss=_tensor(graph, _IMAGES), **_SPEC)
    return _shaped(dw, _FILTERS)


def _product(graph: Any) -> Any:
    return graph.matmul(_tensor(graph, (4, 128, 256)), _tensor(graph, (4, 256, 64)))


def _sum(graph: Any) -> Any:
    return graph.add(_tensor(graph, (4, 128, 256)), _tensor(graph, (4, 128, 256)))


_ADD: Mapping[str, Callable[[Any], Any]] = {
    "convolution": _forward,
    "its gradient by data": _by_data,
    "its gradient by filter": _by_filter,
    "product": _product,
    "elements": _sum,
}
KINDS = tuple(_ADD)
