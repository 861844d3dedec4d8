"""What ONNX's own reference implementation computes: an oracle for operations that follow its definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper
from onnx.reference import ReferenceEvaluator

from .remembered import remembered

__all__ = ["OPSET", "reference"]

OPSET = 22


@remembered
def reference(operator: str, inputs: list[np.ndarray | None], outputs: int = 1, **attributes: Any) -> Any:
    """The result of an operator, or a list of several. An input of None is left out."""
    names = [f"input{n}" if array is not None else "" for n, array in enumerate(inputs)]
    results = [f"output{n}" for n in range(outputs)]
    node = helper.make_node(operator, names, results, **attributes)
    given = {name: array for name, array in zip(names, inputs, strict=True) if array is not None}
    graph = helper.make_graph(
        [node],
        "graph",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in given.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in results],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    found: Any = ReferenceEvaluator(model).run(None, given)
    return found if outputs > 1 else found[0]
