"""Five models, each of another datatype: what they are given, added to itself."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx

from ..onnx.small_models import model_of, node

__all__ = ["DTYPES", "KINDS", "values_of", "write_models"]

KINDS = {"square": "FP32", "halves": "FP16", "brains": "BF16", "whole": "INT64", "truth": "BOOL"}
"""The names of the models, and the datatype of each."""
DTYPES = {
    "FP32": np.float32,
    "FP16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "INT64": np.int64,
    "BOOL": np.bool_,
}


def write_models(folder: Path) -> None:
    """A repository of the models: numbers of (N, 3) as they are added to themselves."""
    for name, kind in KINDS.items():
        place = folder / name / "1"
        place.mkdir(parents=True)
        code = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(DTYPES[kind]))
        op = "Or" if kind == "BOOL" else "Add"
        dims = {"x": (code, ("N", 3))}
        onnx.save(model_of([node(op, "x x", "y")], dims, {"y": (code, ("N", 3))}), place / "model.onnx")


def values_of(name: str, rng: np.random.Generator, rows: int) -> np.ndarray:
    """Random numbers for a model."""
    dtype = np.dtype(DTYPES[KINDS[name]])
    return (rng.standard_normal((rows, 3)) * 8).astype(dtype)
