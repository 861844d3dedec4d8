"""Models with recurrent layers in the sizes of their use: they give what ONNX Runtime gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest

from cudnn_actor import spawn
from cudnn_actor.onnx import OnnxModel

from .onnx_runtime import answers
from .small_models import FLOAT, INT64, model_of, node

rng = np.random.default_rng(11)
Case = tuple[onnx.ModelProto, dict[str, np.ndarray]]


def normal(*dims: int, over: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(dims) / over).astype(np.float32)


def layer(op: str, ways: int, size: int, units: int) -> list[np.ndarray]:
    """The weights of a layer, which keep its state from growing."""
    rows = {"GRU": 3, "LSTM": 4}[op] * units
    over = 2 * np.sqrt(units)
    return [normal(ways, rows, size, over=over), normal(ways, rows, units, over=over), normal(ways, 2 * rows)]


def voice_detector() -> Case:
    """1,875 chunks of 64 samples, as a minute of sound has of 32 ms: filters of each chunk, and an LSTM."""
    chunks, units = 1875, 16
    weights = dict(zip(("w", "r", "b"), layer("LSTM", 1, 48, units), strict=True))
    weights |= {"filters": normal(8, 1, 16, over=4), "last": normal(units, 1), "h": normal(1, 1, units)}
    nodes = [
        node("Conv", "chunks filters", "heard", strides=[8], pads=[0, 0]),
        node("Relu", "heard", "loud"),
        node("Slice", "loud zero six two", "cut"),
        node("Reshape", "cut flat", "steps"),
        node("LSTM", "steps w r b - h h", "y h_n c_n", hidden_size=units),
        node("Squeeze", "y one", "states"),
        node("MatMul", "states last", "scores"),
        node("Sigmoid", "scores", "probabilities"),
    ]
    weights |= {"zero": np.array([0]), "six": np.array([6]), "two": np.array([2]), "one": np.array([1])}
    weights["flat"] = np.array([chunks, 1, 48])
    outputs: dict[str, Any] = {"probabilities": (FLOAT, None), "h_n": (FLOAT, None), "c_n": (FLOAT, None)}
    inputs = {"chunks": normal(chunks, 1, 64)}
    return model_of(nodes, {"chunks": (FLOAT, [chunks, 1, 64])}, outputs, weights), inputs


def reader() -> Case:
    """A picture of a line of text, 600 columns: filters, two LSTMs in both directions, and classes."""
    columns, units, classes = 600, 12, 20
    weights: dict[str, np.ndarray] = {"filters": normal(4, 1, 3, 3, over=3), "bias": normal(4)}
    nodes = [
        node("Conv", "picture filters bias", "seen", pads=[1, 1, 1, 1]),
        node("Relu", "seen", "lines"),
        node("MaxPool", "lines", "pooled", kernel_shape=[4, 1], strides=[4, 1]),
        node("Transpose", "pooled", "columns", perm=[3, 0, 1, 2]),
        node("Reshape", "columns flat", "steps0"),
    ]
    for number, size in enumerate((8, 2 * units)):
        w, r, b = (f"{name}{number}" for name in "wrb")
        weights |= dict(zip((w, r, b), layer("LSTM", 2, size, units), strict=True))
        nodes += [
            node(
                "LSTM",
                f"steps{number} {w} {r} {b}",
                f"y{number}",
                hidden_size=units,
                direction="bidirectional",
            ),
            node("Transpose", f"y{number}", f"ways{number}", perm=[0, 2, 1, 3]),
            node("Reshape", f"ways{number} joined", f"steps{number + 1}"),
        ]
    nodes += [node("MatMul", "steps2 last", "scores"), node("LogSoftmax", "scores", "classes", axis=-1)]
    weights |= {"last": normal(2 * units, classes), "flat": np.array([columns, 2, 8])}
    weights["joined"] = np.array([0, 0, -1])
    inputs = {"picture": normal(2, 1, 8, columns)}
    return model_of(
        nodes, {"picture": (FLOAT, [2, 1, 8, columns])}, {"classes": (FLOAT, None)}, weights
    ), inputs


def encoder() -> Case:
    """Texts of 200 characters and fewer: an embedding, two GRUs in both directions, their last states."""
    characters, units = 200, 10
    weights: dict[str, np.ndarray] = {"embedding": normal(60, 8), "joined": np.array([0, 0, -1])}
    nodes = [node("Gather", "embedding text", "steps0", axis=0)]
    for number, size in enumerate((8, 2 * units)):
        w, r, b = (f"{name}{number}" for name in "wrb")
        weights |= dict(zip((w, r, b), layer("GRU", 2, size, units), strict=True))
        how: dict[str, Any] = {"direction": "bidirectional", "linear_before_reset": number}
        nodes += [
            node(
                "GRU", f"steps{number} {w} {r} {b} lengths", f"y{number} h{number}", hidden_size=units, **how
            ),
            node("Transpose", f"y{number}", f"ways{number}", perm=[0, 2, 1, 3]),
            node("Reshape", f"ways{number} joined", f"steps{number + 1}"),
        ]
    outputs: dict[str, Any] = dict.fromkeys(("steps2", "h0", "h1"), (FLOAT, None))
    ports: dict[str, Any] = {"text": (INT64, [characters, 3]), "lengths": (onnx.TensorProto.INT32, [3])}
    inputs: dict[str, np.ndarray] = {
        "text": rng.integers(0, 60, (characters, 3)),
        "lengths": np.array([characters, 1, characters // 3], np.int32),
    }
    return model_of(nodes, ports, outputs, weights), inputs


CASES = {"a voice detector": voice_detector(), "a reader of text": reader(), "an encoder": encoder()}


@pytest.fixture(scope="module")
def wanted() -> Mapping[str, list[np.ndarray]]:
    """What ONNX Runtime gives, for all of them at once."""
    return dict(zip(CASES, answers(list(CASES.values())), strict=True))


@pytest.mark.parametrize("name", CASES)
async def test_a_model_of_many_steps_gives_what_onnx_runtime_gives(
    name: str, wanted: Mapping[str, list[np.ndarray]]
) -> None:
    proto, inputs = CASES[name]
    async with spawn(device="cpu") as gpu, await gpu.load(OnnxModel(proto)) as model:
        results = await gpu.run(model, inputs)
    for (output, found), expected in zip(results.items(), wanted[name], strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5, err_msg=output)
