"""Dims that do not fit an operator: those of the file are a fault of the file, others of what was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from cudnn_actor import spawn
from cudnn_actor.models import InvalidModel
from cudnn_actor.protocol.errors import InvalidRequest

from .small_models import FLOAT, model_of, node

CASES: list[tuple[str, list[tuple[int, ...]], dict[str, Any], str]] = [
    ("Add", [(2, 3), (4, 3)], {}, "not broadcast"),
    ("MatMul", [(2, 3), (4, 5)], {}, "4 rows, but a, of dims"),
    ("Gemm", [(2, 3), (4, 5)], {}, "4 rows, but a, of dims"),
    ("Conv", [(1, 3, 8, 8), (4, 2, 3, 3)], {}, r"input 1 of dims .*\[\?, 3, \?, \?\]"),
    ("Conv", [(1, 3, 8, 8), (4, 3, 3, 3), (5,)], {}, r"input 2 of dims \(5,\), where .*\[4\]"),
    ("Conv", [(1, 3, 8, 8), (4, 1, 3, 3)], {"group": 2}, "3 channels, which are no 2 groups"),
    ("ConvTranspose", [(1, 3, 8, 8), (4, 2, 3, 3)], {}, r"input 1 of dims"),
    ("Concat", [(2, 3), (4, 4)], {"axis": 1}, "differs from dims"),
    ("BatchNormalization", [(1, 3, 4), (4,), (4,), (4,), (4,)], {}, "shape that follows"),
    ("InstanceNormalization", [(1, 3, 4), (4,), (3,)], {}, "input 1 of dims"),
    ("GroupNormalization", [(1, 3, 4), (3,), (3,)], {"num_groups": 2}, "3 channels, which are no 2 groups"),
    ("GroupNormalization", [(1, 4, 4), (3,), (4,)], {"num_groups": 2}, "input 1 of dims"),
    ("LayerNormalization", [(2, 3), (4,), (4,)], {}, "not broadcast"),
    ("PRelu", [(2, 3), (2,)], {}, "not broadcast"),
    ("LSTM", [(2, 1, 3), (1, 8, 4), (1, 8, 2)], {"hidden_size": 2}, r"input 1 of dims .*\[1, 8, 3\]"),
    ("GRU", [(2, 1, 3), (1, 6, 3), (1, 6, 2), (1, 6)], {"hidden_size": 2}, r"input 3 of dims .*\[1, 12\]"),
    ("Det", [(2, 3)], {}, "a determinant of dims"),
    ("Einsum", [(2, 3), (4, 5)], {"equation": "ij,jk->ik"}, "one label to dims of 3 and 4"),
    ("Einsum", [(2, 3), (4,)], {"equation": "ij,jk->ik"}, "a label for each of 1 dims"),
    ("SwiGLU", [(2, 3), (2, 1)], {}, r"has inputs of dims \(2, 3\), \(2, 1\)"),
]
"""Operators, dims of their inputs that contradict it, attributes, and what the error says."""
OF_RANKS = {"a label for each of 1 dims"}
"""What is wrong whatever sizes the dims have."""


def model(op: str, dims: list[Any], attributes: dict[str, Any]) -> onnx.ModelProto:
    names = [f"x{number}" for number in range(len(dims))]
    inputs = {name: (FLOAT, each) for name, each in zip(names, dims, strict=True)}
    one = node(op, " ".join(names), "y", name="one", **attributes)
    opsets = [helper.make_opsetid("", 28)]
    return model_of([one], inputs, {"y": (FLOAT, None)}, opset_imports=opsets)


@pytest.mark.parametrize(("op", "dims", "attributes", "problem"), CASES)
async def test_dims_of_the_file_that_do_not_fit_are_a_fault_of_the_file(
    op: str, dims: list[tuple[int, ...]], attributes: dict[str, Any], problem: str
) -> None:
    async with spawn(device="cpu") as gpu:
        with pytest.raises(InvalidModel, match=rf"node 'one' \({op}\).*{problem}"):
            await gpu.load(model(op, dims, attributes))


@pytest.mark.parametrize(
    ("op", "dims", "attributes", "problem"), [each for each in CASES if each[3] not in OF_RANKS]
)
async def test_dims_of_inputs_that_do_not_fit_are_a_fault_of_what_was_given(
    op: str, dims: list[tuple[int, ...]], attributes: dict[str, Any], problem: str
) -> None:
    free = [[f"d{number}{axis}" for axis in range(len(each))] for number, each in enumerate(dims)]
    async with spawn(device="cpu") as gpu:
        loaded = await gpu.load(model(op, free, attributes))
        given = {f"x{number}": np.ones(each, np.float32) for number, each in enumerate(dims)}
        with pytest.raises(InvalidRequest, match=rf"^inputs=x0 .* do not fit .*{problem}"):
            await gpu.run(loaded, given)
        await loaded.close()


def of_indices(op: str, dims: list[Any], indices: list[Any], **attributes: Any) -> onnx.ModelProto:
    inputs = {"x": (FLOAT, dims), "i": (onnx.TensorProto.INT64, indices)}
    if op == "ScatterElements":
        inputs["u"] = (FLOAT, indices)
    one = node(op, " ".join(inputs), "y", name="one", **attributes)
    return model_of([one], inputs, {"y": (FLOAT, None)}, opset_imports=[helper.make_opsetid("", 28)])


@pytest.mark.parametrize(
    ("op", "indices"),
    [
        ("GatherElements", (5,)),
        ("GatherElements", (2, 7)),
        ("ScatterElements", (5,)),
        ("ScatterElements", (2, 7)),
        ("GatherND", (2, 5)),
    ],
)
async def test_indices_that_do_not_fit_are_a_fault_of_the_file_or_of_what_was_given(
    op: str, indices: tuple[int, ...]
) -> None:
    async with spawn(device="cpu") as gpu:
        with pytest.raises(
            InvalidModel, match=rf"node 'one' \({op}\).* has indices \({indices[0]},.*which do not"
        ):
            await gpu.load(of_indices(op, [2, 3], list(indices)))
        free = of_indices(op, [2, 3], [f"d{axis}" for axis in range(len(indices))])
        loaded = await gpu.load(free)
        given = {
            "x": np.ones((2, 3), np.float32),
            "i": np.zeros(indices, np.int64),
            "u": np.ones(indices, np.float32),
        }
        with pytest.raises(InvalidRequest, match=r"^inputs=.* do not fit .*has indices"):
            await gpu.run(loaded, {each.name: given[each.name] for each in loaded.inputs})
        await loaded.close()


async def test_a_shape_of_other_elements_than_there_are_does_not_fit() -> None:
    reshape = node("Reshape", "x shape", "y", name="one")
    ports: Any = {"x": (FLOAT, ["N", 3])}, {"y": (FLOAT, None)}, {"shape": np.array([4, 3])}
    async with spawn(device="cpu") as gpu:
        loaded = await gpu.load(model_of([reshape], *ports))
        with pytest.raises(InvalidRequest, match=r"x \(2, 3\).*shape \(4, 3\) for the 6 elements"):
            await gpu.run(loaded, x=np.ones((2, 3), np.float32))
        await loaded.close()
