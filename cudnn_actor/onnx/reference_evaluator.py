"""What ONNX's own reference implementation gives: slow, and independent of every engine here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx.reference import ReferenceEvaluator

__all__ = ["reference_outputs"]


def reference_outputs(model: Path, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of a model, by name, computed with NumPy in this process. Blocks. Raises what ONNX does."""
    evaluator = ReferenceEvaluator(str(model))
    results: Any = evaluator.run(None, dict(inputs))
    return dict(zip(evaluator.output_names, results, strict=True))
