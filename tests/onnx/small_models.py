"""Small models for the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from cudnn_actor import CudnnRef

__all__ = ["FLOAT", "INT64", "graph_of", "image_model", "live_buffers", "model_of", "node"]

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
Dims = Sequence[int | str | None] | None


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """A node, from names separated by spaces; "-" for one that is left out."""

    def names(text: str) -> list[str]:
        return ["" if each == "-" else each for each in text.split()]

    return helper.make_node(op, names(inputs), names(outputs), **attributes)


def graph_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Dims]],
    outputs: Mapping[str, tuple[int, Dims]],
    tensors: Mapping[str, np.ndarray] | None = None,
) -> onnx.GraphProto:
    """A graph: inputs and outputs with their dtypes and dims, and initialisers."""
    given, made = (
        [helper.make_tensor_value_info(name, dtype, dims) for name, (dtype, dims) in each.items()]
        for each in (inputs, outputs)
    )
    kept = [numpy_helper.from_array(array, name) for name, array in (tensors or {}).items()]
    return helper.make_graph(list(nodes), "graph", given, made, initializer=kept)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Dims]],
    outputs: Mapping[str, tuple[int, Dims]],
    tensors: Mapping[str, np.ndarray] | None = None,
    **options: Any,
) -> onnx.ModelProto:
    """A model of opset 21 with such a graph."""
    options.setdefault("opset_imports", [helper.make_opsetid("", 21)])
    return helper.make_model(graph_of(nodes, inputs, outputs, tensors), **options)


def image_model(batch: int | str = "N") -> onnx.ModelProto:
    """Two convolutions, a pool and a product: images of (batch, 3, 8, 8) to scores of (batch, 5)."""
    rng = np.random.default_rng(3)

    def weights(*dims: int) -> np.ndarray:
        return rng.standard_normal(dims).astype(np.float32) / 4

    return model_of(
        [
            node("Conv", "image w1 b1", "c1", pads=[1, 1, 1, 1], name="conv1"),
            node("Relu", "c1", "r1", name="relu1"),
            node("MaxPool", "r1", "p1", kernel_shape=[2, 2], strides=[2, 2], name="pool1"),
            node("Conv", "p1 w2", "features", name="conv2"),
            node("Flatten", "features", "flat", name="flatten"),
            node("Gemm", "flat w3 b3", "scores", transB=1, name="head"),
        ],
        {"image": (FLOAT, [batch, 3, 8, 8])},
        {"scores": (FLOAT, [batch, 5]), "features": (FLOAT, [batch, 4, 2, 2])},
        {
            "w1": weights(6, 3, 3, 3),
            "b1": weights(6),
            "w2": weights(4, 6, 3, 3),
            "w3": weights(5, 16),
            "b3": weights(5),
        },
    )


async def live_buffers(gpu: CudnnRef) -> int:
    """How many buffers there are, once those are freed that nobody waits for.

    By the first `drain`, a request whose caller has left is answered, and a message that frees its buffer has
    been sent. By the second, that message is answered.
    """
    await gpu.drain()
    await gpu.drain()
    return (await gpu.statistics()).live_buffers
