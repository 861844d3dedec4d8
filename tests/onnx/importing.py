"""Imports of small models, and comparisons of what they compute with ONNX's reference implementation."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from cudnn_actor import TensorSpec, spawn
from cudnn_actor.onnx import OnnxModel

from .small_models import FLOAT

__all__ = ["BOOL", "HALF", "PORTS", "X", "check", "imported", "kinds", "rng", "run"]


BOOL, HALF = TensorProto.BOOL, TensorProto.FLOAT16
rng = np.random.default_rng(11)


def imported(proto: onnx.ModelProto, **dims: tuple[int, ...]) -> Any:
    """A model for inputs of these dims: what it is made into."""
    model = OnnxModel(proto)
    inputs: Any = model.inputs
    specs = {each.name: TensorSpec.packed(dims.get(each.name, each.dims), each.dtype) for each in inputs}
    return model.specialise(specs, {})


def kinds(special: Any) -> list[str]:
    """The operations of a graph, in order."""
    return [str(getattr(each, "mode", each.kind)) for each in special.graph.body.operations]


def run(proto: onnx.ModelProto, **inputs: np.ndarray) -> list[np.ndarray]:
    async def result() -> list[np.ndarray]:
        async with spawn(device="cpu") as gpu:
            model = await gpu.load(proto)
            found = list((await gpu.run(model, inputs)).values())
            await model.close()
            return found

    return asyncio.run(result())


def check(proto: onnx.ModelProto, **inputs: np.ndarray) -> None:
    """Compare with ONNX's reference implementation."""
    for value, wanted in zip(run(proto, **inputs), ReferenceEvaluator(proto).run(None, inputs), strict=True):
        assert value.dtype == wanted.dtype
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


X = rng.standard_normal((3, 4)).astype(np.float32)
PORTS = {"x": (FLOAT, [3, 4])}, {"y": (FLOAT, [3, 4])}
