"""Large constants that follow from initialisers: one buffer for all dims of a model, and each its own."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from cudnn_actor import DType, TensorSpec, spawn
from cudnn_actor.models.source import values_of
from cudnn_actor.onnx import OnnxModel

from .small_models import FLOAT, model_of, node

HALF = TensorProto.FLOAT16
SIDE = 192
"""A matrix of so many rows and columns is large: two in half types, too."""
rng = np.random.default_rng(36)


def matrix() -> np.ndarray:
    return rng.standard_normal((SIDE, SIDE)).astype(np.float32)


def folded() -> onnx.ModelProto:
    """Seven products with matrices of the same dims, which follow from two initialisers in seven ways."""
    ways = {
        "across": node("Transpose", "w", "across", perm=[1, 0]),
        "same": node("Transpose", "w", "same", perm=[0, 1]),
        "other": node("Transpose", "v", "other", perm=[1, 0]),
        "less": node("Sub", "w v", "less"),
        "more": node("Sub", "v w", "more"),
        "scaled": node("Mul", "w two", "scaled"),
        "halved": node("Mul", "w half", "halved"),
    }
    products = [node("MatMul", f"x {name}", f"y-{name}") for name in ways]
    numbers = {"two": np.float32(2), "half": np.float32(0.5)}
    return model_of(
        [*ways.values(), *products],
        {"x": (FLOAT, ["N", SIDE])},
        {f"y-{name}": (FLOAT, ["N", SIDE]) for name in ways},
        {"w": matrix(), "v": matrix(), **{name: np.array(number) for name, number in numbers.items()}},
    )


def halved() -> onnx.ModelProto:
    """A norm of half type whose scale and bias are in float32, as PyTorch writes it, and a large factor."""
    wide = SIDE * SIDE
    return model_of(
        [node("LayerNormalization", "x scale bias", "n"), node("Mul", "n scale", "y")],
        {"x": (HALF, ["N", wide])},
        {"y": (HALF, ["N", wide])},
        {"scale": matrix().reshape(-1), "bias": matrix().reshape(-1)},
    )


def weights(model: OnnxModel, count: int, wide: int, dtype: DType) -> dict[str, np.ndarray]:
    """The weights of a model for so many rows, by their keys."""
    of = model.specialise({"x": TensorSpec.packed((count, wide), dtype)}, {})
    found: Any = of.weights
    return {key: values_of(values) for key, values in found.values()}


def test_what_follows_from_initialisers_is_right_for_each_size() -> None:
    proto = folded()
    given = [rng.standard_normal((count, SIDE)).astype(np.float32) for count in (2, 3)]

    async def results() -> list[dict[str, np.ndarray]]:
        async with spawn(device="cpu") as gpu, await gpu.load(proto) as model:
            return [await gpu.run(model, {"x": x}) for x in given]

    for x, found in zip(given, asyncio.run(results()), strict=True):
        wanted = ReferenceEvaluator(proto).run(None, {"x": x})
        for (name, value), right in zip(found.items(), wanted, strict=True):
            np.testing.assert_allclose(value, right, rtol=1e-4, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("proto", [folded(), halved()], ids=["folded", "halved"])
def test_another_size_uploads_no_weight_again(proto: onnx.ModelProto) -> None:
    (feature,) = OnnxModel(proto).inputs
    assert feature.dims is not None
    assert feature.dtype is not None
    given = [np.ones((count, int(feature.dims[1] or 0)), feature.dtype.numpy) for count in (2, 3)]

    async def sizes() -> list[int]:
        async with spawn(device="cpu") as gpu, await gpu.load(proto) as model:
            found = []
            for x in given:
                await gpu.run(model, {"x": x})
                found.append(model.nbytes)
            return found

    first, second = asyncio.run(sizes())
    assert first == second


def test_float32_constants_are_converted_to_the_half_type() -> None:
    proto = halved()
    found = weights(OnnxModel(proto), 2, SIDE * SIDE, DType.FLOAT16)
    tensors = {each.name: onnx.numpy_helper.to_array(each) for each in proto.graph.initializer}
    assert len(found) == len(tensors)
    for values, wanted in zip(found.values(), tensors.values(), strict=True):
        np.testing.assert_array_equal(values, wanted.astype(np.float16))


def test_small_constants_that_are_equal_are_one() -> None:
    """Such as the scales of many norms."""
    ones = {name: np.ones(SIDE, np.float32) for name in ("one", "two")}
    proto = model_of(
        [node("LayerNormalization", "x one", "n"), node("LayerNormalization", "n two", "y")],
        {"x": (HALF, ["N", SIDE])},
        {"y": (HALF, ["N", SIDE])},
        ones,
    )
    assert len(weights(OnnxModel(proto), 2, SIDE, DType.FLOAT16)) == 1


def test_a_weight_whose_name_looks_like_that_of_a_converted_one_stays_its_own() -> None:
    wide, name = SIDE * SIDE, "scale as float16"
    tensors = {each: matrix().reshape(-1) for each in ("scale", "bias", name)}
    tensors[name] = tensors[name].astype(np.float16)
    proto = model_of(
        [node("LayerNormalization", "x scale bias", "n"), onnx.helper.make_node("Add", ["n", name], ["y"])],
        {"x": (HALF, ["N", wide])},
        {"y": (HALF, ["N", wide])},
        tensors,
    )
    found = weights(OnnxModel(proto), 2, wide, DType.FLOAT16).values()
    for wanted in tensors.values():
        assert any((values == wanted.astype(np.float16)).all() for values in found)
