"""GELU behind products of half types: as a node, and spelled out in other nodes."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cudnn_actor import DType

from ..in_one_test import cases_in_one_test
from .importing import imported, kinds, run
from .small_models import model_of, node

HALF, FLOAT, BFLOAT16 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.BFLOAT16
rng = np.random.default_rng(5)

TANH = "Pow x three c, Mul c factor d, Add x d e, Mul e scale f, Tanh f t, Add t one u"
SPELLED = {
    "tanh, half of x": f"{TANH}, Mul x half h, Mul h u y",
    "tanh, half at last": f"{TANH}, Mul x u v, Mul half v y",
    "tanh, x squared": "Mul x x q, Mul q factor p, Add one p r, Mul x scale s, Mul s r g, Tanh g t, "
    "Add one t u, Mul u half v, Mul v x y",
    "tanh, x times its square": "Mul x x q, Mul q x c, Mul factor c d, Add d x e, Mul scale e f, Tanh f t, "
    "Add t one u, Mul x half h, Mul u h y",
    "erf, half at last": "Div x root r, Erf r e, Add e one u, Mul x u v, Mul v half y",
    "erf, half first": "Mul inverse x r, Erf r e, Add one e u, Mul half u v, Mul x v y",
}
OTHERS = {
    "another factor": "Div x root r, Erf r e, Add e one u, Mul x u v, Mul v two y",
    "another sum": "Div x root r, Erf r e, Add e two u, Mul x u v, Mul v half y",
    "another argument": "Mul x root r, Erf r e, Add e one u, Mul x u v, Mul v half y",
    "of something else": "Div b root r, Erf r e, Add e one u, Mul x u v, Mul v half y",
    "another power": f"{TANH.replace('three', 'two')}, Mul x half h, Mul h u y",
    "another scale": f"{TANH.replace('scale', 'two')}, Mul x half h, Mul h u y",
    "another cube": f"{TANH.replace('factor', 'two')}, Mul x half h, Mul h u y",
    "one function more": "Div x root r, Erf r e, Add e one u, Mul x u v, Mul u half z, Mul v z y",
}
NUMBERS = {
    "half": 0.5,
    "one": 1,
    "two": 2,
    "three": 3,
    "factor": 0.044715,
    "scale": math.sqrt(2 / math.pi),
    "root": math.sqrt(2),
    "inverse": math.sqrt(0.5),
}


def behind_a_product(
    nodes: list[onnx.NodeProto], code: int = HALF, *, reshaped: bool = False
) -> onnx.ModelProto:
    """(4, 8) times (8, 6), and a bias, as x, and what these nodes make of it."""
    of = helper.tensor_dtype_to_np_dtype(code)
    first = [node("MatMul", "a w", "m"), node("Add", "b m", "x")]
    if reshaped:
        first = [node("Gemm", "a w b", "m"), node("Reshape", "m dims", "x")]
    used = {name for each in nodes for name in each.input}
    constants = {name: np.array(value, of) for name, value in NUMBERS.items() if name in used}
    if reshaped:
        constants["dims"] = np.array([2, 2, 6])
    return model_of(
        [*first, *nodes],
        {"a": (code, [4, 8]), "w": (code, [8, 6]), "b": (code, [6])},
        {"y": (code, [2, 2, 6] if reshaped else [4, 6])},
        constants,
    )


def spelled(text: str) -> list[onnx.NodeProto]:
    return [node(op, " ".join(names[:-1]), names[-1]) for op, *names in map(str.split, text.split(", "))]


def gelu(x: np.ndarray, *, tanh: bool) -> np.ndarray:
    argument = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3) if tanh else x / math.sqrt(2)
    return np.asarray(x / 2 * (1 + np.vectorize(math.tanh if tanh else math.erf)(argument)))


def check(proto: onnx.ModelProto, *, tanh: bool, rtol: float) -> None:
    of = helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type)
    given = {
        port.name: rng.uniform(-1, 1, [dim.dim_value for dim in port.type.tensor_type.shape.dim]).astype(of)
        for port in proto.graph.input
    }
    a, w, b = (each.astype("f8") for each in given.values())
    (y,) = run(proto, **given)
    wanted = gelu(a @ w + b, tanh=tanh).reshape(y.shape)
    np.testing.assert_allclose(y.astype("f8"), wanted, rtol=rtol, atol=rtol)


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("reshaped", [False, True])
@pytest.mark.parametrize("code", [HALF, BFLOAT16])
@pytest.mark.parametrize("name", SPELLED)
def test_gelu_that_is_spelled_out_in_a_half_type_is_one_function(
    name: str, code: int, reshaped: bool
) -> None:
    proto, tanh = behind_a_product(spelled(SPELLED[name]), code, reshaped=reshaped), name.startswith("tanh")
    found = kinds(imported(proto))
    assert ("gelu_tanh" if tanh else "gelu") in found
    assert {*found}.isdisjoint({"erf", "tanh", "pow", "mul"})
    check(proto, tanh=tanh, rtol=2e-2 if code == BFLOAT16 else 2e-3)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_nearly_gelu_is_computed_as_it_is_written(name: str) -> None:
    found = kinds(imported(behind_a_product(spelled(OTHERS[name]))))
    assert {*found}.isdisjoint({"gelu", "gelu_tanh"})
    assert not {*found}.isdisjoint({"erf", "tanh"})


def test_gelu_that_is_spelled_out_in_float32_stays_as_it_is_written() -> None:
    found = kinds(imported(behind_a_product(spelled(SPELLED["erf, half first"]), FLOAT)))
    assert "erf" in found


def test_a_factor_of_more_dims_is_no_part_of_gelu() -> None:
    proto = behind_a_product(spelled(SPELLED["erf, half at last"]))
    (half,) = (each for each in proto.graph.initializer if each.name == "half")
    half.dims[:] = [1, 1, 1]
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", HALF, [1, 4, 6]))
    assert "erf" in kinds(imported(proto))


def rounds(proto: onnx.ModelProto) -> bool:
    """Whether what GELU reads is rounded to the model's half type."""
    body = imported(proto).graph.body
    (read,) = (
        each.operands[0] for each in body.operations if getattr(each, "mode", "") in ("gelu", "gelu_tanh")
    )
    return bool(body.tensor(read).dtype.is_half)


@pytest.mark.parametrize("reshaped", [False, True])
def test_a_product_is_rounded_before_gelu_by_erf(reshaped: bool) -> None:
    """As ONNX says. So what lies between a product and the kernel behind it is of the half type."""
    assert rounds(behind_a_product([node("Gelu", "x", "y")], reshaped=reshaped))
    assert rounds(behind_a_product(spelled(SPELLED["erf, half first"]), reshaped=reshaped))


def test_nothing_else_is_rounded_before_gelu() -> None:
    """By tanh, it is computed with the product, in float32."""
    assert not rounds(behind_a_product([node("Gelu", "x", "y", approximate="tanh")]))
    assert not rounds(behind_a_product(spelled(SPELLED["tanh, half of x"])))
    assert not rounds(behind_a_product([node("Exp", "x", "e"), node("Gelu", "e", "y")]))
    assert not rounds(behind_a_product([node("Gelu", "x", "y")], FLOAT))


@pytest.mark.parametrize("code", [HALF, FLOAT])
def test_a_product_of_a_half_type_is_rounded_before_a_transpose(code: int) -> None:
    """So that it is stored in the half type, as ConvNeXt's is before what scales its layers."""
    nodes = [node("Transpose", "x", "t", perm=[1, 0]), node("Mul", "t t", "q"), node("Transpose", "q", "y")]
    body = imported(behind_a_product(nodes, code)).graph.body
    (moved, *_) = (each for each in body.operations if each.kind == "transpose")
    assert body.tensor(moved.x).dtype is (DType.FLOAT32 if code == FLOAT else DType.FLOAT16)
