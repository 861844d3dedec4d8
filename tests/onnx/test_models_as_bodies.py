"""A model's graph as the body of a loop: a detector that hears a recording in chunks, beside ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from cudnn_actor import Loop, spawn
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.protocol import TensorSpec

from .onnx_runtime import answers
from .small_models import FLOAT, graph_of, model_of, node

CHUNK, UNITS = 64, 16
STATE, SOUND = (FLOAT, (1, 1, UNITS)), (FLOAT, (1, CHUNK))
CHUNKS = 1875
"""A minute of chunks of 32 ms."""
FEWER = 300
"""For the exact engine, which takes much longer."""


def detector() -> dict[str, Any]:
    """Of a chunk of sound: a filter bank, an LSTM whose state goes from chunk to chunk, and a probability."""
    rng = np.random.default_rng(3)

    def weights(*dims: int) -> np.ndarray:
        values: np.ndarray = 2 * rng.standard_normal(dims) / np.sqrt(dims[-1])
        return values.astype(np.float32)

    nodes = [
        node("MatMul", "chunk bank", "filtered"),
        node("Relu", "filtered", "energies"),
        node("Unsqueeze", "energies first", "step"),
        node("LSTM", "step w r b - h c", "- new_h new_c", hidden_size=UNITS),
        node("Squeeze", "new_h first", "last"),
        node("MatMul", "last head", "score"),
        node("Sigmoid", "score", "probability"),
    ]
    tensors = {
        "bank": weights(CHUNK, UNITS),
        "first": np.zeros(1, np.int64),
        "w": weights(1, 4 * UNITS, UNITS),
        "r": weights(1, 4 * UNITS, UNITS),
        "b": weights(1, 8 * UNITS),
        "head": weights(UNITS, 1),
    }
    inputs = {"h": STATE, "c": STATE, "chunk": SOUND}
    outputs = {"new_h": STATE, "new_c": STATE, "probability": (FLOAT, (1, 1))}
    return {"nodes": nodes, "inputs": inputs, "outputs": outputs, "tensors": tensors}


def whole(chunks: int) -> onnx.ModelProto:
    """The same for a recording: ONNX's `Scan` of it."""
    scan = node("Scan", "h c sound", "new_h new_c found", body=graph_of(**detector()), num_scan_inputs=1)
    sound = (FLOAT, (chunks, 1, CHUNK))
    outputs = {"new_h": STATE, "new_c": STATE, "found": (FLOAT, (chunks, 1, 1))}
    return model_of([scan], {"h": STATE, "c": STATE, "sound": sound}, outputs)


@pytest.mark.parametrize(("exact", "chunks"), [(False, CHUNKS), (True, FEWER)])
async def test_a_loop_of_a_model_gives_what_a_scan_of_it_gives(exact: bool, chunks: int) -> None:
    rng = np.random.default_rng(5)
    sound = rng.standard_normal((chunks, 1, CHUNK)).astype(np.float32)
    state = np.zeros((1, 1, UNITS), np.float32)
    ((new_h, new_c, found),) = answers([(whole(chunks), {"h": state, "c": state, "sound": sound})])
    model = OnnxModel(model_of(**detector()))
    specs = {each.name: TensorSpec.packed(dims, "float32") for each, dims in _dims(model)}
    made = model.specialise(specs, {})
    assert made.graph is not None
    loop = Loop(body=made.graph, carried={"h": "new_h", "c": "new_c"}, scanned=("chunk",))
    async with spawn(device="cpu", exact=exact) as gpu:
        given = {"h": state, "c": state, "chunk": sound}
        for port, (_, values) in made.weights.items():
            given[port] = values() if callable(values) else values
        buffers = {name: await gpu.upload(array) for name, array in given.items()}
        outputs = await gpu.loop(loop, buffers, turns=chunks)
        assert found.std() > 0.01, "it hears something"
        for name, wanted in (("probability", found), ("new_h", new_h), ("new_c", new_c)):
            got = await gpu.download(getattr(outputs, name))
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
        if exact:
            return
        async with await gpu.load(whole(chunks)) as scan:  # which is too long to be unrolled
            results = await gpu.run(scan, h=state, c=state, sound=sound)
        for got, wanted in zip(results.values(), (new_h, new_c, found), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def _dims(model: OnnxModel) -> list[tuple[Any, tuple[int, ...]]]:
    return [(each, tuple(map(int, each.dims))) for each in model.inputs]  # type: ignore[arg-type]
