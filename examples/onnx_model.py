"""An ONNX model, run with two batch sizes.

    python examples/onnx_model.py                    # a small model, built here
    python examples/onnx_model.py MODEL.onnx         # a model of yours, with random inputs
    python examples/onnx_model.py --save MODEL.onnx  # only write the small model to that file

It needs the package onnx: `pip install -e ".[onnx]"` in a clone.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from cudnn_actor import logging, spawn
from cudnn_actor.models import Feature


async def main(given: Any) -> None:
    """Load the model, run it, and say how it runs."""
    rng = np.random.default_rng(1)
    async with spawn(device="auto") as gpu:
        model = await gpu.load(given)  # a path, bytes or an onnx.ModelProto
        print(model)
        for batch in (1, 8):  # a graph is made for each, at its first run
            inputs = {each.name: drawn(each, batch, rng) for each in model.inputs}
            outputs = await gpu.run(model, inputs)
            print(f"batch {batch}: " + ", ".join(f"{name} {value.shape}" for name, value in outputs.items()))
        print(await model.explain(inputs))

        # Outputs in `keep` stay on the device. Inputs may be there, too.
        first = model.outputs[0].name
        kept = await gpu.run(model, inputs, keep=(first,))
        same = np.array_equal(await gpu.download(kept[first]), outputs[first])
        print(f"{first} on the device: {kept[first]}, the same values: {same}")
        await gpu.free(kept[first])
        await model.close()  # frees the weights


def drawn(feature: Feature, batch: int, rng: np.random.Generator) -> np.ndarray:
    """Random values for an input. Dims without a size get that of the batch."""
    assert feature.dtype is not None, "a model that was loaded has tensors only"
    dims = [size if isinstance(size, int) else batch for size in feature.dims or ()]
    return rng.uniform(0, 2, dims).astype(feature.dtype.numpy)


def small_model() -> ModelProto:
    """Scores of images: a convolution, its relu, a mean over each image, and a product."""
    rng = np.random.default_rng(0)
    filters, head = rng.normal(0, 0.3, (8, 3, 3, 3)), rng.normal(0, 0.3, (8, 5))
    nodes = [
        helper.make_node("Conv", ["image", "filters"], ["sums"], name="filter", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["sums"], ["found"], name="relu"),
        helper.make_node("GlobalAveragePool", ["found"], ["means"], name="pool"),
        helper.make_node("Flatten", ["means"], ["features"], name="flatten"),
        helper.make_node("MatMul", ["features", "head"], ["scores"], name="head"),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 32, 32])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 5])
    weights = [
        numpy_helper.from_array(values.astype("float32"), name)
        for name, values in (("filters", filters), ("head", head))
    ]
    graph = helper.make_graph(nodes, "small", [image], [scores], initializer=weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--save", path]:
            onnx.save(small_model(), path)
        case given:
            logging.configure()  # the service's log lines, on stderr
            asyncio.run(main(given[0] if given else small_model()))
