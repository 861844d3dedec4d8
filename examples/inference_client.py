"""A client of the inference server: pictures in, scores out, over HTTP and over a stream of gRPC.

    pip install "tritonclient[http,grpc]"
    cudnn-actor serve classifier.onnx --batch 8 &
    python examples/inference_client.py 127.0.0.1:8000 127.0.0.1:8001 classifier

The model has one input, a batch of pictures in FP32. When the server's worker dies, another takes over: the
client waits, and sees no error.
"""

from __future__ import annotations

import queue
import sys

import numpy as np
import tritonclient.grpc
import tritonclient.http

PICTURES = 16


def main(http: str, grpc: str, model: str) -> int:
    with tritonclient.http.InferenceServerClient(http) as client:
        given = client.get_model_metadata(model)["inputs"][0]
        wanted = client.get_model_metadata(model)["outputs"][0]["name"]
        shape = [max(size, 1) for size in given["shape"]]  # -1 is for the client to choose
        picture = np.random.default_rng(0).random(shape, np.float32)
        tensor = tritonclient.http.InferInput(given["name"], shape, "FP32")
        tensor.set_data_from_numpy(picture)
        scores = client.infer(model, [tensor]).as_numpy(wanted)
    print("over HTTP:", scores[0].argmax())

    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for number in range(PICTURES):
            tensor = tritonclient.grpc.InferInput(given["name"], shape, "FP32")
            tensor.set_data_from_numpy(picture)
            client.async_stream_infer(model, [tensor], request_id=str(number))
        for _ in range(PICTURES):
            answer = answers.get()
            if isinstance(answer, Exception):
                raise answer
        client.stop_stream()
    print(f"over gRPC: {PICTURES} answers")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
