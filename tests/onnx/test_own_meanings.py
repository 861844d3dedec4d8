"""Operators that mean something of their own here: lists, integers, quotients, norms and older versions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from cudnn_actor import DType
from cudnn_actor.errors import InvalidModel, UnsupportedModel

from .importing import BOOL, HALF, PORTS, X, check, imported, rng, run
from .small_models import FLOAT, INT64, graph_of, model_of, node


def test_lists_are_there_while_a_model_is_imported() -> None:
    """Parts are put into a list, taken out of it and concatenated, as a loop does for bags of embeddings."""
    tensors = {"one": np.array(1), "last": np.array(-1), "sizes": np.array([1, 3]), "four": np.array(4)}
    body = graph_of(
        [
            node("SequenceAt", "parts i", "part"),
            node("ReduceSum", "part", "sum", keepdims=0),
            node("SequenceInsert", "before sum", "after"),
            node("Identity", "on", "still"),
        ],
        {"i": (INT64, []), "on": (BOOL, []), "before": (FLOAT, None)},
        {"still": (BOOL, []), "after": (FLOAT, None)},
    )
    for value in (body.input[2], body.output[1]):
        elements = helper.make_tensor_type_proto(FLOAT, None)
        value.type.CopyFrom(helper.make_sequence_type_proto(elements))
    nodes = [
        node("SplitToSequence", "x", "parts", axis=1, keepdims=0),
        node("SequenceEmpty", "", "none"),
        node("Loop", "four - none", "sums", body=body),
        node("ConcatFromSequence", "sums", "of_columns", axis=0, new_axis=1),
        node("SplitToSequence", "x sizes", "two", axis=1),
        node("SequenceInsert", "two x last", "three"),
        node("SequenceErase", "three one", "again"),
        node("SequenceConstruct", "x x", "pair"),
        node("SequenceLength", "pair", "length"),
        node("SequenceAt", "again last", "rest"),
        node("ConcatFromSequence", "three", "all", axis=1),
    ]
    outputs: dict[str, tuple[int, Any]] = {
        "of_columns": (FLOAT, None),
        "length": (INT64, []),
        "rest": (FLOAT, None),
        "all": (FLOAT, None),
    }
    found = run(model_of(nodes, PORTS[0], outputs, tensors), x=X)
    wanted: list[Any] = [X.sum(0), 2, X[:, 1:], np.concatenate([X[:, :1], X, X[:, 1:]], 1)]
    for value, each in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, each, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", [4, -5])
def test_a_place_that_a_list_does_not_have_is_reported(place: int) -> None:
    nodes = [node("SplitToSequence", "x", "parts", axis=1), node("SequenceAt", "parts place", "y")]
    proto = model_of(nodes, PORTS[0], {"y": (FLOAT, None)}, {"place": np.array(place)})
    with pytest.raises(UnsupportedModel, match=f"the place {place} in a list of 4"):
        imported(proto)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [(0, "parts of 0"), ([1, 2], "do not add up"), (1, "more than 1024 parts")],
)
def test_parts_that_a_tensor_does_not_have_are_reported(sizes: Any, problem: str) -> None:
    nodes = [node("SplitToSequence", "x sizes", "parts", axis=1), node("SequenceAt", "parts zero", "y")]
    tensors = {"sizes": np.array(sizes), "zero": np.array(0)}
    width = 1025 if sizes == 1 else 4
    with pytest.raises(UnsupportedModel, match=problem):
        imported(model_of(nodes, {"x": (FLOAT, [1, width])}, {"y": (FLOAT, None)}, tensors))


def test_a_list_is_no_tensor_and_no_output() -> None:
    nodes = [node("SequenceConstruct", "x x", "pair"), node("Relu", "pair", "y")]
    with pytest.raises(UnsupportedModel, match="a list where it needs a tensor"):
        imported(model_of(nodes, PORTS[0], {"y": (FLOAT, None)}))
    proto = model_of(nodes[:1], PORTS[0], {"pair": (FLOAT, None)})
    with pytest.raises(UnsupportedModel, match="output 'pair': has a list"):
        imported(proto)


def test_integers_wrap_around_as_those_of_onnx() -> None:
    large = np.array([100, -100, 127], np.int8)
    for op in ("Add", "Mul", "Sub"):
        proto = model_of(
            [node(op, "a b", "c"), node("Cast", "c", "y", to=TensorProto.INT32)],
            {"a": (TensorProto.INT8, [3]), "b": (TensorProto.INT8, [3])},
            {"y": (TensorProto.INT32, [3])},
        )
        with np.errstate(over="ignore"):
            check(proto, a=large, b=large[::-1].copy())


@pytest.mark.parametrize("exponents", [np.int32, np.float32])
def test_powers_of_integers_wrap_around_and_lose_no_digits_to_float32(exponents: type[Any]) -> None:
    a = np.array([3, -3, 2, 10, 46341, -46341, 0, 7] if exponents is np.int32 else [7, -3, 13, 8], np.int32)
    b = np.array([40, 41, 31, 10, 2, 3, 0, 10] if exponents is np.int32 else [10, 19, 8, 10], exponents)
    of = helper.np_dtype_to_tensor_dtype(b.dtype)
    ports = {"a": (TensorProto.INT32, a.shape), "b": (of, b.shape)}
    proto = model_of([node("Pow", "a b", "y")], ports, {"y": (TensorProto.INT32, a.shape)})
    (wanted,) = ReferenceEvaluator(proto).run(None, {"a": a, "b": b})
    np.testing.assert_array_equal(run(proto, a=a, b=b)[0], wanted)


def test_powers_below_0_of_integers_lose_their_fractions() -> None:
    """As in onnxruntime; NumPy, and so ONNX's reference, refuses them."""
    a, b = np.array([1, -1, 2, -1, -7], np.int64), np.array([-2, -3, -1, -4, -1], np.int64)
    ports = {name: (INT64, [5]) for name in ("a", "b")}
    proto = model_of([node("Pow", "a b", "y")], ports, {"y": (INT64, [5])})
    assert run(proto, a=a, b=b)[0].tolist() == [1, -1, 0, 1, 0]


@pytest.mark.parametrize(("axis", "dims"), [(0, (2, 1)), (0, (1, 4)), (1, (2, 1)), (1, (1, 6))])
def test_elements_are_gathered_for_the_indices_that_there_are(axis: int, dims: tuple[int, ...]) -> None:
    """Not for those that NumPy would broadcast them to."""
    places = rng.integers(-X.shape[axis], X.shape[axis], dims)
    proto = model_of(
        [node("GatherElements", "x places", "y", axis=axis)],
        {"x": PORTS[0]["x"], "places": (INT64, dims)},
        {"y": (FLOAT, dims)},
    )
    wanted = [X[(p, j) if axis == 0 else (i, p)] for (i, j), p in np.ndenumerate(places)]
    np.testing.assert_array_equal(run(proto, x=X, places=places)[0], np.reshape(wanted, dims))


@pytest.mark.parametrize("dtype", ["int32", "int64", "int8"])
def test_quotients_of_integers_are_exact(dtype: str) -> None:
    limits = np.iinfo(dtype)
    a = np.array([7, -7, 7, -7, limits.max, limits.max, 0], dtype)
    b = np.array([2, 2, -2, -2, 3, limits.max, 5], dtype)
    code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    proto = model_of([node("Div", "a b", "y")], {"a": (code, [7]), "b": (code, [7])}, {"y": (code, [7])})
    wanted = [
        int(abs(int(p)) // abs(int(q))) * (1 if (p < 0) == (q < 0) else -1) for p, q in zip(a, b, strict=True)
    ]
    np.testing.assert_array_equal(run(proto, a=a, b=b)[0], np.array(wanted, dtype))


@pytest.mark.parametrize(
    "dtypes", [("float32", "bfloat16"), ("float16", "bfloat16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("op", ["BatchNormalization", "RMSNormalization"])
def test_norms_whose_weights_have_another_dtype(op: str, dtypes: tuple[str, str]) -> None:
    """A batch norm's result is of its input's dtype, and an RMS norm's of its weights'."""
    of_x, of_weights = (DType(name).numpy for name in dtypes)
    x = X.astype(of_x)
    weights = {name: (0.5 + rng.random(4)).astype(of_weights) for name in "sbmv"}
    wide = {name: values.astype(np.float64) for name, values in weights.items()}
    if op == "BatchNormalization":
        wanted = (x - wide["m"]) / np.sqrt(wide["v"] + 1e-5) * wide["s"] + wide["b"]
        inputs, dtype = "x s b m v", of_x
    else:
        wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * wide["s"]
        inputs, dtype = "x s", of_weights
    codes = [helper.np_dtype_to_tensor_dtype(each) for each in (x.dtype, dtype)]
    ports = {"x": (codes[0], [3, 4])}, {"y": (codes[1], [3, 4])}
    used = {name: weights[name] for name in inputs.split()[1:]}
    (found,) = run(
        model_of([node(op, inputs, "y")], *ports, used, opset_imports=[helper.make_opsetid("", 23)]), x=x
    )
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("code", [HALF, TensorProto.BFLOAT16])
def test_float32_weights_beside_operands_of_a_half_type_are_of_that_type(code: int) -> None:
    """As PyTorch's exporter writes convolutions that it has folded norms into."""
    x = X.astype(helper.tensor_dtype_to_np_dtype(code))
    w = rng.standard_normal((4, 2)).astype(np.float32)
    proto = model_of([node("MatMul", "x w", "y")], {"x": (code, [3, 4])}, {"y": (code, [3, 2])}, {"w": w})
    (found,) = run(proto, x=x)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(found.astype(np.float32), x.astype(np.float32) @ w, rtol=0.02, atol=0.05)


def test_float64_weights_beside_float32_operands_are_reported() -> None:
    proto = model_of(
        [node("MatMul", "x w", "y")], {"x": (FLOAT, [3, 4])}, {"y": (FLOAT, [3, 2])}, {"w": np.ones((4, 2))}
    )
    with pytest.raises(InvalidModel, match="has float32 as input 'A' and float64 as input 'B', which must"):
        imported(proto)


def test_a_copy_of_an_output_is_not_told_as_a_node_before_it() -> None:
    outputs = {"y": (FLOAT, [3, 4]), "z": (FLOAT, [3, 4])}
    proto = model_of([node("Relu", "x", "y"), node("Identity", "y", "z")], PORTS[0], outputs)
    body = imported(proto).graph.body
    assert body.label(1) == "identity at the outputs"


def test_truth_values_where_an_operator_takes_numbers_are_reported() -> None:
    nodes = [node("Greater", "x zero", "truth"), node("CumSum", "truth axis", "y", name="sum")]
    tensors = {"zero": np.zeros((), np.float32), "axis": np.array(1)}
    proto = model_of(nodes, PORTS[0], {"y": (INT64, [3, 4])}, tensors)
    with pytest.raises(InvalidModel, match=r"'sum' \(CumSum\): takes no bool as input 'x'"):
        imported(proto)


def test_bfloat16_weights() -> None:
    w = X.astype(ml_dtypes.bfloat16)
    proto = model_of(
        [
            node("Cast", "x", "b", to=TensorProto.BFLOAT16),
            node("Mul", "b w", "m"),
            node("Cast", "m", "y", to=FLOAT),
        ],
        *PORTS,
    )
    proto.graph.initializer.append(
        TensorProto(name="w", dims=[3, 4], data_type=TensorProto.BFLOAT16, raw_data=w.tobytes())
    )
    special = imported(proto)
    assert special.weights["w"][1].dtype == DType.BFLOAT16.numpy
    (y,) = run(proto, x=X)
    np.testing.assert_allclose(y, X.astype(ml_dtypes.bfloat16).astype("f4") * w.astype("f4"), rtol=1e-2)


@pytest.mark.parametrize("version", [7, 9, 11, 13, 17, 21, 23])
def test_older_versions_of_operators(version: int) -> None:
    """Those that a version changes: axes as attributes, flattening softmax, padding."""
    axes_given = version >= 13
    nodes = [
        node("Unsqueeze", "x axes" if axes_given else "x", "u", **({} if axes_given else {"axes": [0]})),
        node("Softmax", "u", "s", axis=1),
        node(
            "ReduceSum",
            "s axes" if axes_given else "s",
            "r",
            keepdims=1,
            **({} if axes_given else {"axes": [0]}),
        ),
        node("Squeeze", "r axes" if axes_given else "r", "y", **({} if axes_given else {"axes": [0]})),
    ]
    tensors = {"axes": np.array([0])} if axes_given else {}
    proto = model_of(nodes, *PORTS, tensors, opset_imports=[helper.make_opsetid("", version)], ir_version=8)
    e = np.exp(X - X.max())
    wanted = e / e.sum() if version < 13 else np.exp(X) / np.exp(X).sum(0)
    np.testing.assert_allclose(run(proto, x=X)[0], wanted, rtol=1e-5)
