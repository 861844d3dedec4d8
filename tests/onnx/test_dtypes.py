"""Dtypes that contradict an operator, each other, or what the model declares."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cudnn_actor import DType, TensorSpec
from cudnn_actor.errors import InvalidModel
from cudnn_actor.onnx import OnnxModel

from ..in_one_test import cases_in_one_test
from .small_models import FLOAT, INT64, graph_of, model_of, node

HALF, DOUBLE, BFLOAT, BOOL = (
    getattr(TensorProto, each) for each in ("FLOAT16", "DOUBLE", "BFLOAT16", "BOOL")
)
PAIRS = [
    ("Mul", HALF, FLOAT, HALF),
    ("Max", FLOAT, DOUBLE, FLOAT),
    ("Sum", FLOAT, DOUBLE, FLOAT),
    ("Concat", FLOAT, HALF, FLOAT),
    ("Add", FLOAT, INT64, FLOAT),
    ("Less", FLOAT, HALF, BOOL),
    ("MatMul", DOUBLE, FLOAT, DOUBLE),
    ("Pow", INT64, BOOL, INT64),
    ("LayerNormalization", HALF, FLOAT, HALF),
    ("PRelu", HALF, BFLOAT, HALF),
]


def two_inputs(op: str, first: int, second: int, result: int, dims: Any = (3, 3)) -> onnx.ModelProto:
    attributes = {"axis": 0} if op == "Concat" else {}
    inputs = {"a": (first, dims), "b": (second, dims)}
    return model_of([node(op, "a b", "y", **attributes)], inputs, {"y": (result, None)})


@cases_in_one_test
@pytest.mark.parametrize("dims", [(3, 3), ("N", "N")])
@pytest.mark.parametrize(("op", "first", "second", "result"), PAIRS)
def test_operands_that_contradict_their_operator_are_refused_when_a_model_is_loaded(
    op: str, first: int, second: int, result: int, dims: Any
) -> None:
    with pytest.raises(InvalidModel, match=rf"\({op}\): (has \w+ as input .* must be of one|takes no \w+)"):
        OnnxModel(two_inputs(op, first, second, result, dims))
    if op != "Pow":  # whose operands may differ
        OnnxModel(two_inputs(op, first, first, result, dims))


@cases_in_one_test
@pytest.mark.parametrize(
    ("made", "declared"),
    [
        (node("Relu", "x", "y"), HALF),
        (node("Cast", "x", "y", to=HALF), FLOAT),
        (node("Shape", "x", "y"), FLOAT),
        (node("ArgMax", "x", "y"), FLOAT),
        (node("IsNaN", "x", "y"), FLOAT),
        (node("EyeLike", "x", "y", dtype=INT64), FLOAT),
        (node("Constant", "", "y", value_int=1), FLOAT),
        (node("DynamicQuantizeLinear", "x", "y s z"), TensorProto.INT8),
    ],
    ids=lambda each: getattr(each, "op_type", str(each)),
)
@pytest.mark.parametrize("inner", [False, True])
def test_a_result_of_another_dtype_than_is_declared_is_refused(
    made: onnx.NodeProto, declared: int, inner: bool
) -> None:
    proto = model_of([made], {"x": (FLOAT, ["N", 3])}, {} if inner else {"y": (declared, None)})
    if inner:
        proto.graph.value_info.append(helper.make_tensor_value_info("y", declared, None))
        proto.graph.node.append(node("Cast", "y", "end", to=FLOAT))
        proto.graph.output.append(helper.make_tensor_value_info("end", FLOAT, None))
    with pytest.raises(InvalidModel, match=r"gives 'y' in \w+, and the model declares it as \w+"):
        OnnxModel(proto)


def test_a_branch_and_a_loop_are_looked_into() -> None:
    branch = graph_of([node("Mul", "x h", "m")], {}, {"m": (FLOAT, None)})
    choice = node("If", "c", "y", then_branch=branch, else_branch=branch)
    inputs = {"c": (BOOL, []), "x": (FLOAT, ["N"]), "h": (HALF, ["N"])}
    with pytest.raises(InvalidModel, match=r"'m' \(Mul\): has float32 as input 'A' and float16"):
        OnnxModel(model_of([choice], inputs, {"y": (FLOAT, None)}))
    right = graph_of([node("Cast", "x", "m", to=HALF)], {}, {"m": (HALF, None)})
    choice = node("If", "c", "y", then_branch=right, else_branch=right)
    with pytest.raises(InvalidModel, match=r"\(If\): gives 'y' in float16, and the model declares it as flo"):
        OnnxModel(model_of([choice], inputs, {"y": (FLOAT, None)}))


def test_an_initialiser_of_another_dtype_than_is_declared_is_refused() -> None:
    proto = model_of(
        [node("Add", "x w", "y")], {"x": (FLOAT, [2])}, {"y": (FLOAT, [2])}, {"w": np.ones(2, np.float32)}
    )
    proto.graph.value_info.append(helper.make_tensor_value_info("w", HALF, None))
    with pytest.raises(InvalidModel, match="initialiser 'w': gives 'w' in float32, and the model declares"):
        OnnxModel(proto)


def test_what_a_function_of_the_model_contradicts_is_refused_where_it_is_called() -> None:
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    body = [node("Cast", "x", "h", to=HALF), node("Add", "h x", "y")]
    function = helper.make_function("own", "F", ["x"], ["y"], body, imports[:1])
    proto = model_of(
        [node("F", "x", "y", domain="own", name="call")],
        {"x": (FLOAT, ["N"])},
        {"y": (FLOAT, None)},
        functions=[function],
        opset_imports=imports,
    )
    model = OnnxModel(proto)
    with pytest.raises(
        InvalidModel, match=r"'call' \(own.F\), in node 'y' \(Add\): has float16 as input 'A'"
    ):
        model.specialise({"x": TensorSpec.packed((2,), DType.FLOAT32)}, {})


def test_float32_constants_beside_half_operands_have_their_dtype() -> None:
    """PyTorch writes norms of half types so."""
    scale = {"scale": np.full(3, 2, np.float32), "more": np.ones((2, 3), np.float32)}
    nodes = [node("LayerNormalization", "x scale", "n"), node("Max", "more n", "y")]
    proto = model_of(nodes, {"x": (HALF, [2, 3])}, {"y": (HALF, None)}, scale)
    special = OnnxModel(proto).specialise({"x": TensorSpec.packed((2, 3), DType.FLOAT16)}, {})
    assert special.graph is not None
    assert {each.spec.dtype for each in special.graph.inputs} == {DType.FLOAT16}


def test_a_dtype_that_a_later_version_of_an_operator_takes_is_taken() -> None:
    proto = model_of(
        [node("Relu", "x", "y")],
        {"x": (INT64, [2])},
        {"y": (INT64, None)},
        opset_imports=[helper.make_opsetid("", 7)],
    )
    assert OnnxModel(proto).inputs
