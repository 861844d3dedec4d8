"""Values that are made from names: weights that a file of a network leaves out, and inputs.

A tensor without values has its recipe as `doc_string`, in JSON. Equal recipes give equal values with every
release of NumPy: they are made from the bits of PCG64, whose stream NumPy promises to keep.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

__all__ = ["Recipe", "inputs_of", "made", "read", "seeded"]

Recipe = list[Any]
"""What to make, then of what: a name, numbers, dims, or other recipes. `made` has one case for each."""
TOKENS = 97
"""Inputs of whole numbers are below it."""


def seeded(name: str, dims: Sequence[int], offset: float = 0.0, spread: float = 1.0) -> np.ndarray:
    """Uniform float32 values from `offset - spread` up to `offset + spread`, which depend on the name."""
    return (offset + spread * (_bits(name, dims) * 2.0**-31 - 1)).astype(np.float32)


def _bits(name: str, dims: Sequence[int]) -> np.ndarray:
    count = math.prod(dims)
    raw: np.ndarray = np.random.PCG64(zlib.crc32(name.encode())).random_raw((count + 1) // 2)
    return np.asarray(raw.astype("<u8").view("<u4")[:count].reshape(dims))


def made(recipe: Recipe) -> np.ndarray:
    """The values of a recipe, in float32."""
    match recipe:
        case ["seeded", name, dims, offset, spread]:
            return seeded(name, dims, offset, spread)
        case ["reshaped", of, dims]:
            return made(of).reshape(dims)
        case ["transposed", of]:
            return np.asarray(made(of).T)
        case ["norm's scale in", weight, gamma, variance, epsilon]:
            factor = made(gamma) / np.sqrt(made(variance) + np.float32(epsilon))
            values = made(weight)
            return np.asarray(values * factor.reshape(-1, *[1] * (values.ndim - 1)))
        case ["norm's shift", beta, mean, gamma, variance, epsilon]:
            factor = made(gamma) / np.sqrt(made(variance) + np.float32(epsilon))
            return np.asarray(made(beta) - made(mean) * factor)
    raise ValueError(f"unknown recipe: {recipe}")


def read(path: Path) -> onnx.ModelProto:
    """A network with its weights."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.doc_string:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            tensor.raw_data = np.ascontiguousarray(made(json.loads(tensor.doc_string)), dtype).tobytes()
            tensor.doc_string = ""
    return model


def inputs_of(model: onnx.ModelProto, batch: int) -> dict[str, np.ndarray]:
    """Inputs of a network for a batch: of unit variance, tokens, or a mask that hides the last of them."""
    return {each.name: _input(each.name, each.type.tensor_type, batch) for each in model.graph.input}


def _input(name: str, kind: Any, batch: int) -> np.ndarray:
    dims = [dim.dim_value or batch for dim in kind.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    if name.endswith("mask"):
        seen = dims[1] - 3 * np.arange(batch) % dims[1]
        return (np.arange(dims[1]) < seen[:, None]).astype(dtype)
    if np.issubdtype(dtype, np.integer):
        return (_bits(f"{name} {batch}", dims) % TOKENS).astype(dtype)
    return seeded(f"{name} {batch}", dims, 0.0, math.sqrt(3)).astype(dtype)
