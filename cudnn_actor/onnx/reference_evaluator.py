"""Outputs of ONNX's own reference implementation, which is slow, and independent of every engine here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

__all__ = ["reference_outputs"]


def reference_outputs(
    model: Path, inputs: Mapping[str, np.ndarray], tensors: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """The outputs of a model, by name, computed with NumPy in this process. Blocks. Raises ONNX's errors.

    `tensors`: values that replace the model's initialisers.
    """
    file = onnx.load(str(model))
    for each in file.graph.initializer:
        if tensors is not None and each.name in tensors:
            each.CopyFrom(numpy_helper.from_array(tensors[each.name], each.name))
    evaluator = ReferenceEvaluator(file)
    results: Any = evaluator.run(None, dict(inputs))
    return dict(zip(evaluator.output_names, results, strict=True))
