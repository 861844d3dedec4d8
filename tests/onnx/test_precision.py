"""Models that are computed in another dtype than their files': `load(dtype=)`, beside float64."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from cudnn_actor import DType, TensorSpec, spawn
from cudnn_actor.models.rounding import largest
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.protocol import InvalidRequest

from ..in_one_test import cases_in_one_test
from .small_models import FLOAT, INT64, graph_of, image_model, model_of, node

DEVICE = "cpu"
"""Where models run; `tests/gpu` runs some of these tests on a GPU."""
BOUNDS = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-5}
LEAST = float(np.finfo(np.float32).min)
HALVES = ("bfloat16", "float16")
WEIGHTS = image_model().graph.initializer
rng = np.random.default_rng(36)
BEGIN = rng.bit_generator.state


@pytest.fixture(autouse=True)
def the_same_numbers_whatever_runs_before() -> None:
    rng.bit_generator.state = BEGIN


def normal(*dims: int) -> np.ndarray:
    return rng.standard_normal(dims).astype(np.float32)


def run(proto: onnx.ModelProto, inputs: Mapping[str, Any], dtype: Any = None, **options: Any) -> list[Any]:
    async def result() -> list[Any]:
        async with spawn(device=DEVICE) as gpu, await gpu.load(proto, dtype=dtype, **options) as model:
            assert [each.dtype for each in model.inputs] == [value.dtype for value in inputs.values()]
            found = await gpu.run(model, inputs)
            for each in model.outputs:
                assert found[each.name].dtype == each.dtype
            return list(found.values())

    return asyncio.run(result())


def in_float64(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with float64 for float32 and float16."""
    floats = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
    made = onnx.ModelProto()
    made.CopyFrom(proto)

    def widen(tensor: onnx.TensorProto) -> None:
        if tensor.data_type in floats:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("f8"), tensor.name))

    def graph(of: onnx.GraphProto) -> None:
        for tensor in of.initializer:
            widen(tensor)
        for value in (*of.input, *of.output, *of.value_info):
            if value.type.tensor_type.elem_type in floats:
                value.type.tensor_type.elem_type = TensorProto.DOUBLE
        for each in of.node:
            for attribute in each.attribute:
                if attribute.name == "to" and attribute.i in floats:
                    attribute.i = TensorProto.DOUBLE
                if attribute.HasField("t"):
                    widen(attribute.t)
                if attribute.HasField("g"):
                    graph(attribute.g)

    graph(made.graph)
    return made


def wanted(proto: onnx.ModelProto, inputs: Mapping[str, Any]) -> list[np.ndarray]:
    given = {
        name: value.astype("f8") if value.dtype.kind not in "iub" else value for name, value in inputs.items()
    }
    found: Any = ReferenceEvaluator(in_float64(proto)).run(None, given)
    return list(found)


def apart(found: Any, right: Any) -> float:
    return float(np.abs(found.astype("f8") - right).max() / np.abs(right).max())


def kinds_and_dtypes(
    proto: onnx.ModelProto, dtype: Any, **dims: tuple[int, ...]
) -> list[tuple[str, set[str]]]:
    """Each operation of the graph, and the dtypes that it reads."""
    model: Any = OnnxModel(proto, dtype=dtype)
    specs = {
        each.name: TensorSpec.packed(dims.get(each.name, each.dims), each.dtype) for each in model.inputs
    }
    body = model.specialise(specs, {}).graph.body
    return [
        (str(getattr(each, "mode", each.kind)), {str(body.tensor(uid).spec.dtype) for uid in each.reads})
        for each in body.operations
    ]


def transformer(mask: str = "int") -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A block: layer norm, attention with a mask of float32's least number, a network behind it."""
    size, heads, length = 32, 4, 6
    nodes = [
        node("LayerNormalization", "x g1 b1", "n1", axis=-1, epsilon=1e-12),
        *(
            each
            for name, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
            for each in (
                node("MatMul", f"n1 w{name}", f"{name}1"),
                node("Reshape", f"{name}1 split", f"{name}2"),
                node("Transpose", f"{name}2", name, perm=perm),
            )
        ),
        node("MatMul", "q k", "s1"),
        node("Div", "s1 root", "s2"),
        node("Cast", "mask", "m1", to=FLOAT),
        node("Unsqueeze", "m1 axes", "m2"),
        node("Sub", "one m2", "m3"),
        node("Mul", "m3 least", "m4"),
        node("Add", "s2 m4", "s3"),
        node("Softmax", "s3", "p", axis=-1),
        node("MatMul", "p v", "o1"),
        node("Transpose", "o1", "o2", perm=[0, 2, 1, 3]),
        node("Reshape", "o2 join", "o3"),
        node("MatMul", "o3 wo", "o4"),
        node("Add", "x o4", "y1"),
        # a layer norm that is spelled out
        node("ReduceMean", "y1 last", "mean"),
        node("Sub", "y1 mean", "d"),
        node("Pow", "d two", "dd"),
        node("ReduceMean", "dd last", "var"),
        node("Add", "var epsilon", "var1"),
        node("Sqrt", "var1", "deviation"),
        node("Div", "d deviation", "n2"),
        node("MatMul", "n2 w1", "h1"),
        node("Gelu", "h1", "h2"),
        node("MatMul", "h2 w2", "h3"),
        node("Add", "y1 h3", "y"),
    ]
    weights = {f"w{name}": normal(size, size) / 6 for name in "qkvo"}
    weights |= {
        "w1": normal(size, 64) / 6,
        "w2": normal(64, size) / 8,
        "g1": 1 + normal(size) / 4,
        "b1": normal(size),
    }
    numbers = {"root": np.sqrt(8), "one": 1, "least": LEAST, "two": 2, "epsilon": 1e-12}
    weights |= {name: np.array(number, np.float32) for name, number in numbers.items()}
    weights |= {
        "split": np.array([0, 0, heads, size // heads]),
        "join": np.array([0, 0, size]),
        "axes": np.array([1, 2]),
        "last": np.array([-1]),
    }
    proto = model_of(
        nodes,
        {"x": (FLOAT, ["N", "S", size]), "mask": (INT64, ["N", "S"])},
        {"y": (FLOAT, ["N", "S", size])},
        weights,
    )
    lengths = np.array([length, 3])
    given = {"x": normal(2, length, size), "mask": (np.arange(length) < lengths[:, None]).astype(np.int64)}
    return proto, given


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_convolutional_network(dtype: str) -> None:
    proto, inputs = image_model(), {"image": normal(2, 3, 8, 8)}
    for found, right in zip(run(proto, inputs, dtype), wanted(proto, inputs), strict=True):
        assert apart(found, right) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_transformer_block_with_a_mask(dtype: str) -> None:
    proto, inputs = transformer()
    assert apart(*run(proto, inputs, dtype), *wanted(proto, inputs)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_and_activations_are_of_the_dtype_and_what_is_summed_of_float32(dtype: str) -> None:
    proto, inputs = transformer()
    found = kinds_and_dtypes(proto, dtype, **{name: value.shape for name, value in inputs.items()})
    read: dict[str, set[str]] = {}
    for kind, dtypes in found:
        read.setdefault(kind, set()).update(dtypes)
    for kind in ("matmul", "attention", "layer_norm"):
        assert read[kind] == {dtype}
    for kind in ("pow", "mean", "sqrt"):
        assert read[kind] == {"float32"}


@pytest.mark.parametrize("make", [lambda: (image_model(), {"image": normal(2, 3, 8, 8)}), transformer])
def test_float32_changes_nothing_in_a_model_of_float32(make: Any) -> None:
    proto, inputs = make()
    for found, same in zip(run(proto, inputs, "float32"), run(proto, inputs), strict=True):
        np.testing.assert_array_equal(found, same)


async def test_weights_are_uploaded_in_the_dtype() -> None:
    async with spawn(device="cpu") as gpu:
        sizes = []
        for dtype in (None, "bfloat16"):
            async with await gpu.load(image_model(2), dtype=dtype) as model:
                sizes.append(model.nbytes)
    assert sizes[0] == 2 * sizes[1]


def test_a_model_of_float16_is_computed_in_float32() -> None:
    w, half = normal(64, 8).astype(np.float16), TensorProto.FLOAT16
    proto = model_of(
        [node("MatMul", "x w", "a"), node("Exp", "a", "b"), node("MatMul", "b v", "y")],
        {"x": (half, ["N", 64])},
        {"y": (half, None)},
        {"w": w, "v": w.T.copy()},
    )
    inputs = {"x": (normal(3, 64) / 4).astype(np.float16)}
    assert apart(*run(proto, inputs, "float32"), *wanted(proto, inputs)) < 2**-11
    assert {"matmul"} == {
        kind
        for kind, read in kinds_and_dtypes(proto, "float32", x=(3, 64))
        if read == {"float32"} and kind == "matmul"
    }


@pytest.mark.parametrize("dtype", HALVES)
def test_a_model_that_casts_its_activations_is_computed_in_the_dtype(dtype: str) -> None:
    """PyTorch's exporter writes norms of models in float16 so."""
    half = TensorProto.FLOAT16
    nodes = [
        node("Cast", "x", "wide", to=FLOAT),
        node("Pow", "wide two", "squares"),
        node("ReduceMean", "squares last", "mean"),
        node("Add", "mean epsilon", "moved"),
        node("Sqrt", "moved", "root"),
        node("Reciprocal", "root", "inverse"),
        node("Mul", "wide inverse", "normal"),
        node("Cast", "normal", "narrow", to=half),
        node("Mul", "scale narrow", "scaled"),
        node("MatMul", "scaled w", "y"),
    ]
    weights = {"two": np.array(2, np.float32), "epsilon": np.array(1e-9, np.float32), "last": np.array([-1])}
    weights |= {"scale": normal(32).astype(np.float16), "w": normal(32, 8).astype(np.float16)}
    proto = model_of(nodes, {"x": (half, ["N", 32])}, {"y": (half, ["N", 8])}, weights)
    inputs = {"x": (normal(5, 32) * np.geomspace(1e-4, 1e3, 5)[:, None]).astype(np.float16)}
    assert apart(*run(proto, inputs, dtype), *wanted(proto, inputs)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("how", ["mul", "pow", "sum of squares"])
def test_squares_beyond_the_limits_of_float16_are_summed(dtype: str, how: str) -> None:
    nodes = [node("MatMul", "x w", "a")]
    if how == "sum of squares":
        nodes += [node("ReduceSumSquare", "a last", "s")]
    else:
        square = node("Mul", "a a", "aa") if how == "mul" else node("Pow", "a two", "aa")
        nodes += [square, node("ReduceSum", "aa last", "s")]
    nodes += [node("Sqrt", "s", "r"), node("Div", "a r", "y")]
    proto = model_of(
        nodes,
        {"x": (FLOAT, ["N", 16])},
        {"y": (FLOAT, None)},
        {"w": normal(16, 16), "two": np.array(2.0, np.float32), "last": np.array([-1])},
    )
    inputs = {"x": normal(3, 16) * 200}
    assert apart(*run(proto, inputs, dtype), *wanted(proto, inputs)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("product", ["MatMul", "Mul"])
def test_positions_are_exact(dtype: str, product: str) -> None:
    """A rotary embedding: the angle of position 1,023 would be that of 1,024 in bfloat16."""
    frequencies = 1 / 100 ** (np.arange(4, dtype=np.float32) / 4)
    nodes = [
        node("Unsqueeze", "positions last", "p1"),
        node("Cast", "p1", "p2", to=FLOAT),
        node(product, "p2 frequencies", "half"),
        node("Concat", "half half", "angles", axis=-1),
        node("Cos", "angles", "cos"),
        node("Sin", "angles", "sin"),
        node("MatMul", "x w", "q"),
        node("Split", "q", "left right", axis=-1, num_outputs=2),
        node("Neg", "right", "minus"),
        node("Concat", "minus left", "turned", axis=-1),
        node("Mul", "q cos", "q1"),
        node("Mul", "turned sin", "q2"),
        node("Add", "q1 q2", "y"),
    ]
    proto = model_of(
        nodes,
        {"x": (FLOAT, ["S", 8]), "positions": (INT64, ["S"])},
        {"y": (FLOAT, ["S", 8])},
        {"w": normal(8, 8), "frequencies": frequencies[None], "last": np.array([-1])},
    )
    inputs = {"x": normal(6, 8), "positions": np.array([0, 1, 257, 1023, 2047, 4095])}
    assert apart(*run(proto, inputs, dtype), *wanted(proto, inputs)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", HALVES)
def test_pictures_are_scaled_before_they_are_rounded(dtype: str) -> None:
    """Beyond float16's limits, and in float32's digits."""
    nodes = [node("Sub", "x mean", "a"), node("Div", "a deviation", "b"), node("Conv", "b w", "y")]
    mean, deviation = (np.full((1, 3, 1, 1), each, np.float32) for each in (1e5, 10))
    proto = model_of(
        nodes,
        {"x": (FLOAT, ["N", 3, 5, 5])},
        {"y": (FLOAT, None)},
        {"w": normal(4, 3, 3, 3), "mean": mean, "deviation": deviation},
    )
    inputs = {"x": normal(2, 3, 5, 5) * 10 + 100_000}
    assert apart(*run(proto, inputs, dtype), *wanted(proto, inputs)) < BOUNDS[dtype]


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("least", [LEAST, -np.inf, -1e9])
@pytest.mark.parametrize("how", ["constant", "input", "where", "product", "float64"])
def test_masks_are_within_the_limits_of_the_dtype(dtype: str, least: float, how: str) -> None:
    """Also where they are multiplied with zeros, which makes -inf NaN: in the file, then, too."""
    hidden = np.triu(np.ones((4, 4), bool), 1)
    mask = np.where(hidden, np.float32(least), np.float32(0))
    tensors: dict[str, np.ndarray] = {"w": normal(8, 4), "v": normal(4, 3)}
    inputs: dict[str, Any] = {"x": normal(4, 8)}
    ports: dict[str, Any] = {"x": (FLOAT, ["N", 8])}
    nodes = [
        node("MatMul", "x w", "s"),
        node("Add", "s m", "t"),
        node("Softmax", "t", "p"),
        node("MatMul", "p v", "y"),
    ]
    if how == "input":
        inputs["m"], ports["m"] = mask, (FLOAT, [4, 4])
    elif how == "where":
        nodes = [node("Where", "hidden least s", "t") if each.op_type == "Add" else each for each in nodes]
        tensors["least"] = np.array(least, np.float32)
        inputs["hidden"], ports["hidden"] = hidden, (TensorProto.BOOL, [4, 4])
    elif how == "product" and np.isfinite(least):
        nodes.insert(0, node("Mul", "hidden least", "m"))
        tensors["least"] = np.array(least, np.float32)
        inputs["hidden"], ports["hidden"] = hidden.astype(np.float32), (FLOAT, [4, 4])
    elif how == "float64" and np.isfinite(least):
        nodes.insert(0, node("Cast", "m64", "m", to=FLOAT))
        inputs["m64"], ports["m64"] = mask.astype("f8"), (TensorProto.DOUBLE, [4, 4])
    else:
        tensors["m"] = mask
    proto = model_of(nodes, ports, {"y": (FLOAT, None)}, tensors)
    (found,) = run(proto, inputs, dtype)
    assert apart(found, *wanted(proto, inputs)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("how", ["constant", "number", "input"])
def test_zeros_times_the_least_number_are_zeros(dtype: str, how: str) -> None:
    """Times -inf, they would be NaN."""
    least = np.full((1,) if how == "number" else (2, 4), LEAST, np.float32)
    inputs: dict[str, Any] = {"x": np.zeros((2, 4), np.float32)}
    ports: dict[str, Any] = {"x": (FLOAT, ["N", 4])}
    if how == "input":
        inputs["least"], ports["least"] = least, (FLOAT, ["N", 4])
    proto = model_of(
        [node("MatMul", "x w", "a"), node("Relu", "a", "r"), node("Mul", "r least", "y")],
        ports,
        {"y": (FLOAT, None)},
        {"w": normal(4, 4)} | ({} if how == "input" else {"least": least}),
    )
    (found,) = run(proto, inputs, dtype)
    np.testing.assert_array_equal(found, np.zeros((2, 4)))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_choice_of_the_least_number_is_finite(dtype: str) -> None:
    proto = model_of(
        [node("MatMul", "x w", "a"), node("Where", "hidden least a", "y")],
        {"x": (FLOAT, ["N", 4]), "hidden": (TensorProto.BOOL, ["N", 4])},
        {"y": (FLOAT, None)},
        {"w": normal(4, 4), "least": np.array(LEAST, np.float32)},
    )
    (found,) = run(proto, {"x": normal(2, 4), "hidden": np.ones((2, 4), bool)}, dtype)
    np.testing.assert_array_equal(found, np.full((2, 4), largest(DType(dtype)) * -1, np.float32))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
def test_recurrent_networks(dtype: str, op: str) -> None:
    gates, size, width = {"RNN": 1, "GRU": 3, "LSTM": 4}[op], 6, 5
    one = node(op, "x w r b", "s h", hidden_size=size, name="one")
    proto = model_of(
        [one, node("ReduceMean", "s", "y", axes=[0, 1], keepdims=0)],
        {"x": (FLOAT, [7, "N", width])},
        {"y": (FLOAT, None), "h": (FLOAT, None)},
        {
            "w": normal(1, gates * size, width) / 2,
            "r": normal(1, gates * size, size) / 2,
            "b": normal(1, 2 * gates * size),
        },
        opset_imports=[helper.make_opsetid("", 14)],
    )
    inputs = {"x": normal(7, 3, width)}
    for found, right in zip(run(proto, inputs, dtype), wanted(proto, inputs), strict=True):
        assert apart(found, right) < BOUNDS[dtype]


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "op",
    [
        "BatchNormalization",
        "InstanceNormalization",
        "GroupNormalization",
        "RMSNormalization",
        "LogSoftmax",
        "LpNormalization",
        "GlobalAveragePool",
    ],
)
def test_norms_and_means(dtype: str, op: str) -> None:
    scale, bias = 1 + normal(4) / 4, normal(4)
    tensors, names, attributes = {"w": normal(4, 3, 1, 1), "g": scale, "b": bias}, "a g b", {}
    if op == "BatchNormalization":  # variances beyond float16's limits and below its least number
        names, variance = "a g b m v", np.array([1e-9, 1e7, 3, 4], np.float32)
        tensors |= {"m": normal(4), "v": variance, "g": scale * np.sqrt(variance + 1e-5)}
    elif op == "GroupNormalization":
        attributes = {"num_groups": 2}
    elif op == "RMSNormalization":
        names, tensors["g"] = "a g", normal(6)
    elif not op.startswith("Instance"):
        names = "a"
    proto = model_of(
        [node("Conv", "x w", "a"), node(op, names, "y", **attributes)],
        {"x": (FLOAT, ["N", 3, 5, 6])},
        {"y": (FLOAT, None)},
        tensors,
        opset_imports=[helper.make_opsetid("", 23)],
    )
    inputs = {"x": normal(2, 3, 5, 6)}
    assert apart(*run(proto, inputs, dtype), *wanted(proto, inputs)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_that_decide_over_shapes_are_the_files(dtype: str) -> None:
    """A third of 1,023 columns: in bfloat16 it would be of 1,024. Also if an input says how many."""
    nodes = [
        node("Shape", "x", "dims"),
        node("Cast", "dims", "f", to=FLOAT),
        node("Mul", "f scale", "g"),
        node("Floor", "g", "h"),
        node("Cast", "h", "sizes", to=INT64),
        node("Mul", "n one", "m"),
        node("Cast", "m", "count", to=INT64),
        node("Slice", "x zero sizes", "s"),
        node("Expand", "s count", "y"),
    ]
    proto = model_of(
        nodes,
        {"x": (FLOAT, ["N", "M"]), "n": (FLOAT, [3])},
        {"y": (FLOAT, None)},
        {
            "scale": np.array([1, 0.3340], np.float32),
            "zero": np.array([0, 0]),
            "one": np.array(1, np.float32),
        },
    )
    inputs = {"x": normal(1, 1023), "n": np.array([257, 1, 1], np.float32)}
    (found,), (right,) = run(proto, inputs, dtype), wanted(proto, inputs)
    assert found.shape == right.shape == (257, 1, 341)
    assert apart(found, right) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["nodes", "operators"])
def test_quantised_numbers_are_those_of_the_file(dtype: str, kind: str) -> None:
    """Scales and rounding stay float32: of the same floats, the same integers."""
    w = rng.integers(-100, 100, (8, 4)).astype(np.int8)
    tensors: dict[str, Any] = {"w": w, "zw": np.int8(0), "zx": np.uint8(128), "zy": np.uint8(120)}
    tensors |= {"sw": np.float32(0.0123), "sx": np.float32(0.0345), "sy": np.float32(0.0789)}
    quantise = [node("QuantizeLinear", "x sx zx", "q")]
    if kind == "operators":
        middle = [node("QLinearMatMul", "q sx zx w sw zw sy zy", "r")]
    else:
        middle = [
            node("DequantizeLinear", "q sx zx", "a"),
            node("DequantizeLinear", "w sw zw", "b"),
            node("MatMul", "a b", "c"),
            node("QuantizeLinear", "c sy zy", "r"),
        ]
    proto = model_of(
        [*quantise, *middle, node("DequantizeLinear", "r sy zy", "y")],
        {"x": (FLOAT, ["N", 8])},
        {"y": (FLOAT, None), "q": (TensorProto.UINT8, None)},
        {name: np.asarray(value) for name, value in tensors.items()},
    )
    inputs = {"x": normal(5, 8)}
    (found, integers), (plain, same) = run(proto, inputs, dtype), run(proto, inputs)
    np.testing.assert_array_equal(integers, same)
    step = 0 if kind == "operators" else 1.01 * float(tensors["sy"])
    assert np.abs(found - plain).max() <= step + BOUNDS[dtype] * np.abs(plain).max()


@pytest.mark.parametrize("dtype", HALVES)
def test_branches_loops_and_functions_of_the_model(dtype: str) -> None:
    turn = graph_of(
        [node("MatMul", "state w", "t"), node("Tanh", "t", "next"), node("Identity", "going", "on")],
        {"i": (INT64, []), "going": (TensorProto.BOOL, []), "state": (FLOAT, None)},
        {"on": (TensorProto.BOOL, []), "next": (FLOAT, None), "t": (FLOAT, None)},
    )
    branches = [
        graph_of([node("Add", "h one", name)], {}, {name: (FLOAT, None)}, {"one": normal(4)})
        for name in ("yes", "no")
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    own = helper.make_function(
        "own", "Gate", ["a"], ["b"], [node("Sigmoid", "a", "s"), node("Mul", "a s", "b")], opsets
    )
    nodes = [
        node("Loop", "count choice x", "h all", body=turn),
        node("If", "choice", "c", then_branch=branches[0], else_branch=branches[1]),
        node("Gate", "c", "y", domain="own"),
    ]
    proto = model_of(
        nodes,
        {"x": (FLOAT, ["N", 4])},
        {"y": (FLOAT, None), "all": (FLOAT, None)},
        {"w": normal(4, 4), "count": np.array(3), "choice": np.array(True)},
        functions=[own],
        opset_imports=opsets,
    )
    inputs = {"x": normal(2, 4)}
    right: Any = ReferenceEvaluator(proto).run(None, inputs)
    last, turns = right
    found, every = run(proto, inputs, dtype)
    assert apart(found, last) < BOUNDS[dtype]
    assert apart(every, turns.reshape(every.shape)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", ["float64", "int8", "float8_e4m3fn", 16, np.int32])
async def test_other_dtypes_are_refused(dtype: Any) -> None:
    async with spawn(device="cpu") as gpu:
        with pytest.raises(InvalidRequest, match=r"^dtype=.* give bfloat16, float16 or float32") as raised:
            await gpu.load(image_model(), dtype=dtype)
    assert raised.value.field == "dtype"


async def test_a_model_that_was_read_has_its_dtype() -> None:
    source = OnnxModel(image_model(2), dtype=ml_dtypes.bfloat16)
    async with spawn(device="cpu") as gpu:
        with pytest.raises(InvalidRequest, match=r"OnnxModel\(model, dtype=\.\.\.\)"):
            await gpu.load(source, dtype="float16")
        async with await gpu.load(source) as model:
            assert model.nbytes == 2 * sum(tensor.size for tensor in map(numpy_helper.to_array, WEIGHTS))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", ["GridSample", "RoiAlign"])
def test_places_in_pictures_are_exact(dtype: str, op: str) -> None:
    """Column 1,101.25 of 1,200, of a picture whose columns differ."""
    column = 1101.25
    nodes = [node("Conv", "x w", "a")]
    if op == "GridSample":
        nodes.append(node(op, "a places", "y", align_corners=1, padding_mode="border"))
        inputs: dict[str, Any] = {"places": np.array([[[[column / 1199 * 2 - 1, -1]]]], np.float32)}
        dims: list[list[Any]] = [[1, 1, 1, 2]]
    else:
        nodes.append(node(op, "a places zero", "y", output_height=1, output_width=1, sampling_ratio=1))
        inputs = {"places": np.array([[column, 0, column + 1, 1]], np.float32)}
        dims = [[1, 4]]
    proto = model_of(
        nodes,
        {"x": (FLOAT, [1, 1, 2, 1200]), "places": (FLOAT, dims[0])},
        {"y": (FLOAT, None)},
        {"w": np.ones((1, 1, 1, 1), np.float32), "zero": np.array([0])},
    )
    inputs = {"x": (np.arange(2400, dtype=np.float32) % 8 / 4).reshape(1, 1, 2, 1200), **inputs}
    assert apart(*run(proto, inputs, dtype), *run(proto, inputs)) < BOUNDS[dtype]
