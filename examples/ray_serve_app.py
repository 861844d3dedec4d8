"""A model behind Ray Serve: asked by the handle and over HTTP, by the Open Inference Protocol.

python examples/ray_serve_app.py [MODEL.onnx]

On GPUs, leave `num_gpus=0` out: each replica then takes one. Serve adds replicas while requests wait.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import onnx
import ray
from onnx import TensorProto, helper, numpy_helper
from ray import serve

from cudnn_actor.ray import deployment


def classifier(path: Path) -> Path:
    """Write a model: scores = x @ w, for any number of samples x of 4 values."""
    node = helper.make_node("MatMul", ["x", "w"], ["scores"])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 2])
    w = numpy_helper.from_array(np.arange(8, dtype=np.float32).reshape(4, 2), "w")
    graph = helper.make_graph([node], "classifier", [x], [scores], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def main(model: Path) -> None:
    """Deploy the model, and ask it in both ways."""
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    app = deployment(
        {"classifier": model},
        num_gpus=0,
        num_cpus=0.5,
        max_batch=8,
        autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 16},
    ).bind()
    handle = await asyncio.to_thread(serve.run, app, name="classifier", route_prefix="/")
    many = [handle.infer.remote({"x": np.full((1, 4), k, np.float32)}) for k in range(20)]
    for k, answer in enumerate(many):
        assert np.array_equal((await answer)["scores"], [[12.0 * k, 16.0 * k]])
    print("answered by the handle:", len(many))
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]}
    url = f"http://127.0.0.1:{port}/v2/models/classifier/infer"
    with await asyncio.to_thread(urllib.request.urlopen, url, json.dumps(body).encode()) as answer:
        print("answered over HTTP:", json.load(answer)["outputs"][0]["data"])
    await asyncio.to_thread(serve.shutdown)


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    if len(sys.argv) > 1:
        asyncio.run(main(Path(sys.argv[1]).resolve()))
    else:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(main(classifier(Path(folder, "classifier.onnx"))))
