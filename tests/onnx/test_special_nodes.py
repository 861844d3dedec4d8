"""What ONNX's text says where its reference implementation, or a range of values, is special."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cudnn_actor.errors import InvalidModel, UnsupportedModel
from cudnn_actor.onnx import OnnxModel

from ..in_one_test import cases_in_one_test
from .importing import HALF, PORTS, X, rng, run
from .small_models import FLOAT, graph_of, model_of, node


def results_of(
    op: str, version: int, arrays: list[Any], *, constant: bool, outputs: int = 1, **attributes: Any
) -> list[np.ndarray]:
    """One node's outputs, on constants or on inputs; None for an input that is left out."""
    given = {f"x{n}": np.asarray(each) for n, each in enumerate(arrays) if each is not None}
    names = [f"x{n}" if each is not None else "" for n, each in enumerate(arrays)]
    made = helper.make_node(op, names, [f"y{n}" for n in range(outputs)], **attributes)
    ports = {
        name: (helper.np_dtype_to_tensor_dtype(each.dtype), each.shape)
        for name, each in given.items()
        if not constant
    }
    types = {
        name: helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(each.dtype), each.shape)
        for name, each in given.items()
    }
    imports = [helper.make_opsetid("", version)]
    schema = onnx.defs.get_schema(op, version, "")
    known = onnx.shape_inference.infer_node_outputs(schema, made, types, opset_imports=imports)
    wanted = {name: (known[name].tensor_type.elem_type, None) for name in made.output}
    tensors = given if constant else {}
    proto = model_of([made], ports, wanted, tensors, opset_imports=imports, ir_version=8)
    return run(proto, **({} if constant else given))


def typed(dtype: str, values: Any) -> np.ndarray:
    return np.array(values, dtype)


LARGE = np.array([(1 << 64) - 3, 1 << 63, 5], np.uint64)
DIVIDED = np.array([1, 3, 10**9, (1 << 53) + 1, (1 << 63) - 1, (1 << 63) + 9, (1 << 64) - 1], np.uint64)
SOME = np.array([7, (1 << 63) + 9, (1 << 64) - 1], np.uint64)
MATRICES = np.random.default_rng(2).standard_normal((2, 3, 5, 5)).astype(np.float32)
MATRICES[0, 0, :, 1] = MATRICES[0, 0, :, 3]  # whose determinant is 0
MATRICES[0, 1] = np.eye(5)[::-1]  # which cannot be done without changing rows
E3 = np.exp(X) / np.exp(X).sum()
CASES: list[Any] = [
    ("Add", 14, [LARGE, SOME], {}, [LARGE + SOME]),
    ("Sub", 14, [LARGE, SOME], {}, [LARGE - SOME]),
    ("Mul", 14, [LARGE, SOME], {}, [LARGE * SOME]),
    ("Div", 14, [np.repeat(DIVIDED, 7), np.tile(DIVIDED, 7)], {}, [(DIVIDED[:, None] // DIVIDED).ravel()]),
    ("ReduceMean", 18, [LARGE // 2], {"keepdims": 0}, [np.array((1 << 62), np.uint64)]),
    ("Mod", 13, [LARGE, SOME], {}, [LARGE % SOME]),
    ("Less", 13, [LARGE, SOME], {}, [LARGE < SOME]),
    ("Cast", 21, [LARGE], {"to": TensorProto.INT64}, [LARGE.astype("int64")]),
    ("Cast", 21, [SOME], {"to": TensorProto.INT8}, [SOME.astype("int8")]),
    ("Cast", 21, [SOME], {"to": TensorProto.UINT32}, [SOME.astype("uint32")]),
    (
        "Cast",
        21,
        [typed("int16", [-1, 5])],
        {"to": TensorProto.UINT64},
        [typed("uint64", [(1 << 64) - 1, 5])],
    ),
    ("Cast", 21, [SOME], {"to": TensorProto.FLOAT}, [SOME.astype("float32")]),
    ("MatMul", 13, [LARGE[None], SOME[:, None]], {}, [(LARGE * SOME).sum(dtype="u8").reshape(1, 1)]),
    ("Gemm", 13, [LARGE[:1, None]] * 3, {"alpha": 2.0, "beta": -1.0}, [typed("uint64", [[21]])]),
    (
        "PRelu",
        16,
        [typed("int32", [-(1 << 30), 3]), typed("int32", [9, 9])],
        {},
        [typed("int32", [-(1 << 30), 3])],
    ),
    ("PRelu", 16, [LARGE, SOME], {}, [LARGE]),
    ("Det", 22, [MATRICES], {}, [np.linalg.det(MATRICES)]),
    ("Det", 11, [np.full((1, 1), 3.0)], {}, [np.array(3.0)]),
    (
        "MaxPool",
        22,
        [typed("float32", [[[-2.0]]])],
        {"kernel_shape": [2], "dilations": [2], "auto_pad": "SAME_UPPER"},
        [np.full((1, 1, 1), np.finfo("f4").min)],
    ),
    (
        "MaxPool",
        22,
        [typed("int8", [[[5, 7]]])],
        {"kernel_shape": [2], "pads": [2, 0]},
        [typed("int8", [[[-128, 5, 7]]])],
    ),
    (
        "AveragePool",
        22,
        [typed("float32", [[[6, 8]]])],
        {"kernel_shape": [2], "pads": [2, 0], "count_include_pad": 1},
        [typed("float32", [[[0, 3, 7]]])],
    ),
    (
        "LpPool",
        18,
        [typed("float32", [[[6, 8]]])],
        {"kernel_shape": [2], "pads": [2, 0]},
        [typed("float32", [[[0, 6, 10]]])],
    ),
    ("Compress", 11, [np.empty((2, 0), "f4"), [True, False]], {"axis": 1}, [np.empty((2, 0), "f4")]),
    ("Compress", 11, [np.empty((2, 0), "f4"), [True]], {}, [np.empty(0, "f4")]),
    ("Compress", 11, [X, [False, True, False, True]], {"axis": 0}, [X[1:2]]),
    ("Erf", 9, [typed("int32", [-4, -3, 0, 6])], {}, [typed("int32", [-1, 0, 0, 1])]),
    ("Erf", 9, [typed("uint8", [3, 4])], {}, [typed("uint8", [0, 1])]),
    ("Abs", 13, [typed("int8", [-128, -7])], {}, [typed("int8", [-128, 7])]),
    ("Neg", 13, [typed("int8", [-128, -7])], {}, [typed("int8", [-128, 7])]),
    ("Range", 11, [(1 << 60) + 1, (1 << 60) + 3, 1], {}, [typed("int64", [(1 << 60) + 1, (1 << 60) + 2])]),
    ("Gemm", 13, [typed("int32", [[3]])] * 3, {"alpha": 0.5, "beta": 0.5}, [typed("int32", [[6]])]),
    ("Gemm", 13, [typed("int32", [[1 << 15]])] * 2, {"alpha": 2.0}, [typed("int32", [[-1 << 31]])]),
    ("Celu", 12, [typed("float32", 2.0)], {"alpha": -0.5}, [typed("float32", 2.0)]),
    ("Clip", 6, [X], {"min": 1.0, "max": 0.0}, [np.zeros_like(X)]),
    ("Dropout", 7, [X], {}, [X, np.ones_like(X)]),
    (
        "Pad",
        13,
        [typed("int64", [4]), [1, 0], typed("int64", 3817709934268155566)],
        {},
        [typed("int64", [3817709934268155566, 4])],
    ),
    ("Pad", 13, [np.array([False]), [1, 0], np.array(True)], {}, [np.array([True, False])]),
    ("Squeeze", 13, [X[None], np.empty(0, "i8")], {}, [X[None]]),
    ("Unsqueeze", 11, [X], {"axes": [2, 0]}, [X.reshape(1, 3, 1, 4)]),
    ("Slice", 13, [X, [-9], [-8], [0], [-1]], {}, [X[:1]]),
    ("Shape", 15, [X], {"start": 0, "end": -3}, [np.empty(0, "i8")]),
    ("Softmax", 11, [X[None]], {"axis": 1}, [E3[None]]),
    ("GlobalMaxPool", 1, [X[None]], {}, [X.max(1).reshape(1, 3, 1)]),
    ("LpNormalization", 1, [-np.ones((1, 4), "f4")], {"p": 1}, [np.full((1, 4), -0.25, "f4")]),
    ("ReduceSumSquare", 11, [typed("int32", [1, 2])], {"keepdims": 0}, [typed("int32", 5)]),
    ("Flatten", 13, [np.empty(0, "f4")], {"axis": 1}, [np.empty((0, 1), "f4")]),
    ("CumSum", 14, [np.empty((3, 0), "f4"), [0]], {}, [np.empty((3, 0), "f4")]),
    ("Gelu", 20, [np.empty(0, "f4")], {}, [np.empty(0, "f4")]),
    (
        "ScatterElements",
        18,
        [typed("int8", [100, 1]), [0], typed("int8", [5])],
        {"reduction": "mul"},
        [typed("int8", [-12, 1])],
    ),
    (
        "QuantizeLinear",
        21,
        [typed("float32", [1, 2, 8, 8]), typed("float32", [1, 2]), typed("uint8", [0, 1])],
        {"axis": 0, "block_size": 2},
        [typed("uint8", [1, 2, 5, 5])],
    ),
    *(
        (
            "Resize",
            10,
            [X.reshape(1, 1, 3, 4), typed("float32", [1, 1, *scales])],
            {},
            [X[rows][:, columns][None, None]],
        )
        for scales, rows, columns in (
            ((0.6, 0.6), [0], [0, 2]),
            ((2, 0.6), [0, 0, 1, 1, 2, 2], [0, 2]),
            ((0.7, 1.5), [0, 2], [0, 0, 1, 2, 2, 3]),
        )
    ),
    (
        "Upsample",
        9,
        [X.reshape(1, 1, 3, 4), typed("float32", [1, 1, 0.6, 0.6])],
        {},
        [X[:1, [0, 1]].reshape(1, 1, 1, 2)],
    ),
    (
        "Col2Im",
        18,
        [typed("int32", [[[1, 2], [3, 4]]]), [3], [2]],
        {},
        [typed("int32", [[[1, 5, 4]]])],
    ),
    (
        "NonMaxSuppression",
        11,
        [typed("float32", [[[0, 0, 1, 1]]]), typed("float32", [[[0.5]]]), typed("int64", [3])],
        {},
        [typed("int64", [[0, 0, 0]])],
    ),
]


def test_quotients_are_rounded_to_a_half_type_before_they_are_quantised() -> None:
    x, scale = np.arange(-300, 4000, dtype=np.float16) / np.float16(16), np.array(1.1, np.float16)
    (found,) = results_of("QuantizeLinear", 21, [x, scale, np.array(7, np.uint16)], constant=False)
    np.testing.assert_array_equal(found, np.clip(np.rint(x / scale) + np.float32(7), 0, None))


@cases_in_one_test
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_nodes_that_the_suite_does_not_have(case: Any, constant: bool) -> None:
    op, version, arrays, attributes, wanted = case
    found = results_of(op, version, arrays, constant=constant, outputs=len(wanted), **attributes)
    for value, right in zip(found, wanted, strict=True):
        assert (value.dtype, value.shape) == (right.dtype, right.shape)
        near = right.dtype.kind == "f"
        np.testing.assert_allclose(value, right, rtol=1e-5 if near else 0, atol=1e-6 if near else 0)


@cases_in_one_test
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("size", [(1, 3, 4), (2, 1, 3), (1, 4, 1), (1, 1, 1), (1, 2, 3, 4), (2, 1, 3, 1)])
def test_a_grid_is_where_pytorch_has_it(size: tuple[int, ...], corners: int, constant: bool) -> None:
    batch, *spatial = size
    rank = len(spatial)
    theta = rng.standard_normal((batch, rank, rank + 1))
    sizes = np.array([batch, 5, *spatial])
    (grid,) = results_of("AffineGrid", 20, [theta, sizes], constant=constant, align_corners=corners)
    ends = [0.0 if dim == 1 else 1.0 if corners else 1 - 1 / dim for dim in spatial]
    places = [np.linspace(-end, end, dim) for end, dim in zip(ends, spatial, strict=True)]
    base = np.stack([*np.meshgrid(*places, indexing="ij")[::-1], np.ones(spatial)], -1)
    np.testing.assert_allclose(grid, np.einsum("...i,bji->b...j", base, theta), rtol=1e-12, atol=1e-12)


def test_a_grid_of_endless_dims_is_refused_before_there_are_places() -> None:
    arrays = [np.ones((1, 2, 3), np.float32), np.array([1, 1, 1 << 60, 1])]
    with pytest.raises(UnsupportedModel, match=r"needs [\d,]+ bytes in the importing process"):
        results_of("AffineGrid", 20, arrays, constant=True)


def test_the_statistics_of_a_norm_are_of_the_stashed_dtype() -> None:
    x = X.astype(np.float64)
    y, mean, deviation = results_of("LayerNormalization", 17, [x, np.ones(4)], constant=False, outputs=3)
    assert [str(each.dtype) for each in (y, mean, deviation)] == ["float64", "float32", "float32"]
    np.testing.assert_allclose(mean, x.mean(-1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_norm_of_float64_whose_weights_are_float32(training: bool) -> None:
    x, one = X.astype(np.float64), np.ones(4, np.float32)
    arrays = [x, one, 0 * one, 0 * one, one]
    found = results_of(
        "BatchNormalization",
        15,
        arrays,
        constant=False,
        outputs=3 if training else 1,
        training_mode=int(training),
    )
    mean, variance = (x.mean(0), x.var(0)) if training else (0.0, 1.0)
    assert [str(each.dtype) for each in found] == ["float64", "float32", "float32"][: len(found)]
    np.testing.assert_allclose(found[0], (x - mean) / np.sqrt(variance + 1e-5), rtol=1e-6)


def test_a_dim_that_is_reduced_and_not_there_is_named() -> None:
    with pytest.raises(InvalidModel, match="has axis 3, where the axes are -3 to 2"):
        results_of("MeanVarianceNormalization", 13, [X[None]], constant=False)


def test_a_function_of_half_constants_keeps_their_dtype() -> None:
    x = X.reshape(1, 1, 3, 4).astype(np.float16)
    (found,) = results_of("MeanVarianceNormalization", 13, [x], constant=True)
    assert found.dtype == np.float16


@pytest.mark.parametrize("backwards", [0, 1])
def test_a_scan_of_version_8_is_of_each_sample(backwards: int) -> None:
    body = graph_of(
        [node("Add", "state x", "next"), node("Mul", "next next", "square")],
        {"state": (FLOAT, [4]), "x": (FLOAT, [4])},
        {"next": (FLOAT, [4]), "square": (FLOAT, [4])},
    )
    x, initial = np.stack([X, X + 1, -X]), np.ones((3, 4), np.float32)
    scan = node("Scan", "- initial x", "last all", body=body, num_scan_inputs=1, directions=[backwards])
    ports = {"initial": (FLOAT, initial.shape), "x": (FLOAT, x.shape)}
    wanted = {"last": (FLOAT, None), "all": (FLOAT, None)}
    proto = model_of([scan], ports, wanted, opset_imports=[helper.make_opsetid("", 8)], ir_version=8)
    sums = np.cumsum(x[:, :: -1 if backwards else 1], axis=1) + initial[:, None]
    last, every = run(proto, initial=initial, x=x)
    np.testing.assert_allclose(last, sums[:, -1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(every, sums**2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_convolution_that_is_deformed_alike_everywhere_is_one_of_a_moved_image(rank: int) -> None:
    """Of one dim and of three, which the reference implementation does not have."""
    rng = np.random.default_rng(rank)
    x, w = (rng.standard_normal(dims).astype("f4") for dims in ((2, 4, *(6,) * rank), (6, 2, *(3,) * rank)))
    x[:, :, -1] = 0
    moved = x.copy()  # the second group of offsets reads the element before, along the first dim
    moved[:, 2:, 1:] = x[:, 2:, :-1]
    moved[:, 2:, 0] = 0
    of: dict[str, Any] = {
        "group": 2,
        "pads": [1, 0, 1][:rank] * 2,
        "strides": [1, 2, 1][:rank],
        "dilations": [2, 1, 1][:rank],
    }
    (wanted,) = results_of("Conv", 22, [moved, w], constant=False, **of)
    offset = np.zeros((2, 2, 3**rank, rank, *wanted.shape[2:]), np.float32)
    offset[:, 1, :, 0] = -1
    arrays = [x, w, offset.reshape(2, -1, *wanted.shape[2:])]
    (found,) = results_of("DeformConv", 22, arrays, constant=False, offset_group=2, **of)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_regions_of_version_10_begin_at_the_corners_of_elements() -> None:
    """The reference implementation gives what version 16 does."""
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    arrays = [x, typed("float32", [[0, 0, 2, 2]]), typed("int64", [0])]
    of = {"output_height": 2, "output_width": 2, "sampling_ratio": 1}
    for constant in (False, True):
        (found,) = results_of("RoiAlign", 10, arrays, constant=constant, **of)
        np.testing.assert_allclose(found, [[[[2.5, 3.5], [6.5, 7.5]]]])


NOTHING: dict[str, tuple[list[onnx.NodeProto], dict[str, tuple[int, ...]], tuple[int, ...], float]] = {
    "a product over none": ([node("MatMul", "a b", "y")], {"a": (2, 0), "b": (0, 3)}, (2, 3), 0),
    "a product over none, and more": (
        [node("Gemm", "a b c", "y", alpha=2.0)],
        {"a": (2, 0), "b": (0, 3), "c": (3,)},
        (2, 3),
        1,
    ),
    "no images": ([node("Conv", "x w", "y")], {"x": (0, 3, 5, 5), "w": (4, 3, 3, 3)}, (0, 4, 3, 3), 0),
    "pooling": ([node("MaxPool", "x", "y", kernel_shape=[2, 2])], {"x": (0, 3, 5, 5)}, (0, 3, 4, 4), 0),
    "a norm": ([node("LayerNormalization", "x s", "y")], {"x": (0, 5), "s": (5,)}, (0, 5), 0),
    "a norm of channels": (
        [node("InstanceNormalization", "x s b", "y")],
        {"x": (0, 3, 5), "s": (3,), "b": (3,)},
        (0, 3, 5),
        0,
    ),
    "a recurrence": (
        [node("GRU", "x w r", "y", hidden_size=2)],
        {"x": (3, 0, 4), "w": (1, 6, 4), "r": (1, 6, 2)},
        (3, 1, 0, 2),
        0,
    ),
}


@pytest.mark.parametrize("name", NOTHING)
def test_models_of_tensors_without_elements(name: str) -> None:
    nodes, inputs, dims, value = NOTHING[name]
    proto = model_of(nodes, {of: (FLOAT, each) for of, each in inputs.items()}, {"y": (FLOAT, None)})
    (y,) = run(proto, **{of: np.ones(each, np.float32) for of, each in inputs.items()})
    np.testing.assert_array_equal(y, np.full(dims, value))


@pytest.mark.parametrize("keys", [0, 5])
@pytest.mark.parametrize("batch", [0, 2])
def test_spelled_out_attention_to_nothing_is_0(batch: int, keys: int) -> None:
    nodes = [
        node("Transpose", "k", "kt", perm=[0, 1, 3, 2]),
        node("MatMul", "q kt", "s"),
        node("Softmax", "s", "p", axis=-1),
        node("MatMul", "p v", "y"),
    ]
    dims = {"q": (batch, 2, 3, 4), "k": (batch, 2, keys, 4), "v": (batch, 2, keys, 6)}
    proto = model_of(nodes, {of: (HALF, each) for of, each in dims.items()}, {"y": (HALF, None)})
    (y,) = run(proto, **{of: np.ones(each, np.float16) for of, each in dims.items()})
    np.testing.assert_array_equal(y, np.full((batch, 2, 3, 6), 1 if keys else 0))


@pytest.mark.parametrize(("op", "version"), [("Resize", 11), ("Resize", 21), ("Upsample", 9)])
def test_scales_may_leave_nothing_of_a_dim(op: str, version: int) -> None:
    scales = {"scales": np.array([1, 0.1], np.float32), "roi": np.array([], np.float32)}
    resize = node(op, "x scales" if op == "Upsample" else "x roi scales", "y", mode="nearest")
    nodes = [resize, node("Concat", "y x", "z", axis=1)]
    proto = model_of(
        nodes,
        {"x": (FLOAT, [3, "N"])},
        {"z": (FLOAT, None)},
        scales,
        opset_imports=[helper.make_opsetid("", version)],
    )
    np.testing.assert_array_equal(run(proto, x=X)[0], X)


def test_operators_of_versions_before_7_are_refused_with_how_to_convert_them() -> None:
    proto = model_of([node("Add", "x x", "y")], *PORTS, opset_imports=[helper.make_opsetid("", 6)])
    with pytest.raises(
        UnsupportedModel, match=r"known from version 7 .* asks for 6: convert it with onnx\.ver"
    ):
        OnnxModel(proto)
