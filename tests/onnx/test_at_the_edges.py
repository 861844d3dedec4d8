"""Operators at the edges of what they take: no turns, infinities, unsigned integers, empty tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, TensorProto, helper

from cudnn_actor.errors import UnsupportedModel
from cudnn_actor.models import InvalidModel
from cudnn_actor.onnx import backend

from ..in_one_test import cases_in_one_test
from .small_models import FLOAT, INT64, graph_of, model_of, node

INF, NAN = np.inf, np.nan


@pytest.fixture(autouse=True)
def the_shared_service_ends() -> Iterator[None]:
    yield
    backend.close()


def run(op: str, *arrays: Any, outputs: str = "y", opset: int = 21, **attributes: Any) -> Any:
    """The outputs of one node, of the newest version in which there are such attributes."""
    names = " ".join(f"x{number}" for number in range(len(arrays)))
    of = node(op, names, outputs, **attributes)
    found = backend.run_node(of, [np.asarray(each) for each in arrays], opset_version=opset)
    return found[0] if len(found) == 1 else found


def floats(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


@pytest.mark.parametrize("given", ["a count of 0", "a condition that is false"])
def test_a_loop_of_no_turn_gives_its_states_and_nothing_stacked(given: str) -> None:
    state = {"s": (FLOAT, [2, 3])}
    made = {"go": (TensorProto.BOOL, []), "s_out": (FLOAT, [2, 3]), "seen": (FLOAT, [2, 3])}
    nodes = [node("Identity", "c", "go"), node("Neg", "s", "s_out"), node("Identity", "s", "seen")]
    body = graph_of(nodes, {"i": (INT64, []), "c": (TensorProto.BOOL, []), **state}, made)
    model = model_of(
        [node("Loop", "most first x", "last all", body=body)],
        {"x": (FLOAT, [2, 3])},
        {"last": (FLOAT, None), "all": (FLOAT, None)},
        {"most": np.array(0 if "count" in given else 5), "first": np.array("count" in given)},
    )
    x = np.ones((2, 3), np.float32)
    last, every = backend.run_model(model, [x])
    assert (last == x).all()
    assert (every.shape, every.dtype) == ((0, 2, 3), np.float32)


def test_a_scan_over_nothing_gives_its_states_and_nothing_stacked() -> None:
    nodes = [node("Add", "s e", "s_out"), node("Mul", "s e", "seen")]
    dims = [3]
    body = graph_of(
        nodes, {"s": (FLOAT, dims), "e": (FLOAT, dims)}, {"s_out": (FLOAT, dims), "seen": (FLOAT, dims)}
    )
    scan = node("Scan", "x0 x1", "last all", body=body, num_scan_inputs=1, scan_output_axes=[1])
    model = model_of(
        [scan],
        {"x0": (FLOAT, [3]), "x1": (FLOAT, [0, 3])},
        {"last": (FLOAT, None), "all": (FLOAT, None)},
    )
    last, every = backend.run_model(model, [floats(1, 2, 3), np.empty((0, 3), np.float32)])
    assert last.tolist() == [1, 2, 3]
    assert every.shape == (3, 0)


def test_different_elements_come_in_the_order_in_which_they_are_first() -> None:
    x = np.array([[3, 1, 3], [2, 1, 0]], np.float32)
    values, first, inverse, counts = run("Unique", x, outputs="y first inverse counts", sorted=0)
    assert values.tolist() == [3, 1, 2, 0]
    assert first.tolist() == [0, 1, 3, 5]
    assert inverse.tolist() == [0, 1, 0, 2, 1, 3]
    assert counts.tolist() == [2, 2, 1, 1]


def test_different_slices_come_in_the_order_in_which_they_are_first() -> None:
    x = np.array([[2, 1, 2], [0, 1, 0], [5, 5, 5]], np.float32)
    values, inverse = run("Unique", x, outputs="y - inverse", sorted=0, axis=-1)
    assert values.tolist() == [[2, 1], [0, 1], [5, 5]]
    assert inverse.tolist() == [0, 1, 0]


def test_the_different_elements_of_nothing_have_one_dim() -> None:
    assert run("Unique", np.empty((0, 2, 4), np.float32), sorted=0).shape == (0,)


def test_a_slope_that_is_infinite_does_not_touch_zeros() -> None:
    y = run("PRelu", floats(0, -0.0, 2, -1), floats(INF))
    assert y.tolist() == [0, 0, 2, -INF]


def test_infinities_stay_where_they_are_when_blocks_become_an_image() -> None:
    x = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    x[0, 0, 0] = INF
    y = run("Col2Im", x, np.array([1, 5]), np.array([1, 2]))
    assert y.reshape(-1).tolist() == [INF, 1 + 4, 2 + 5, 3 + 6, 7]


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "float16", "float64"])
def test_sums_of_blocks_have_the_dtype_of_the_blocks(dtype: str) -> None:
    x = np.ones((2, 3 * 4, 9), dtype)
    y = run("Col2Im", x, np.array([4, 4]), np.array([2, 2]))
    assert (y.dtype, y.shape) == (np.dtype(dtype), (2, 3, 4, 4))
    assert y[1, 2].tolist() == [[1, 2, 2, 1], [2, 4, 4, 2], [2, 4, 4, 2], [1, 2, 2, 1]]


def test_what_a_transposed_convolution_wants_beyond_its_full_size_comes_at_the_end() -> None:
    x, w = np.ones((1, 1, 2), np.float32), np.ones((1, 1, 2), np.float32)
    y = run("ConvTranspose", x, w, strides=[2], output_shape=[7])
    assert y.reshape(-1).tolist() == [1, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("axis", [0, 1])
def test_an_inverse_transform_has_complex_results(axis: int) -> None:
    z = np.random.default_rng(1).standard_normal((3, 4, 2))
    y = run("DFT", z, np.array(5), np.array(axis), inverse=1, opset=20)
    wanted = np.fft.ifft(z[..., 0] + 1j * z[..., 1], 5, axis)
    np.testing.assert_allclose(y[..., 0] + 1j * y[..., 1], wanted, atol=1e-12)


def test_an_inverse_transform_may_be_of_real_numbers() -> None:
    x = floats(1, 2, 3, 5).reshape(1, 4, 1)
    y = run("DFT", x, inverse=1, opset=20)
    np.testing.assert_allclose(y[0, :, 0] + 1j * y[0, :, 1], np.fft.ifft(x[0, :, 0]), atol=1e-6)


def test_half_a_transform_is_of_real_numbers() -> None:
    of = node("DFT", "x", "y", onesided=1)
    model = model_of([of], {"x": (FLOAT, [1, 4, 2])}, {"y": (FLOAT, None)})
    with pytest.raises(InvalidModel, match="has complex numbers"):
        backend.run_model(model, [np.ones((1, 4, 2), np.float32)])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_the_centre_is_cut_and_padded_to_sizes_of_both_integer_types(dtype: str) -> None:
    x = np.arange(1, 11, dtype=np.float32).reshape(2, 5)
    y = run("CenterCropPad", x, np.array([5, 2], dtype))
    assert y.tolist() == [[0, 0], [2, 3], [7, 8], [0, 0], [0, 0]]


def test_a_function_of_each_element_of_a_list_runs() -> None:
    body = graph_of([node("Add", "e e", "f")], {"e": (FLOAT, None)}, {"f": (FLOAT, None)})
    model = model_of(
        [
            node("SequenceConstruct", "a b", "list"),
            node("SequenceMap", "list", "twice", body=body),
            node("ConcatFromSequence", "twice", "y", axis=0),
        ],
        {"a": (FLOAT, [2]), "b": (FLOAT, [1])},
        {"y": (FLOAT, None)},
    )
    (y,) = backend.run_model(model, [floats(1, 2), floats(3)])
    assert y.tolist() == [2, 4, 6]


def test_unsigned_integers_wrap_around_where_they_shrink() -> None:
    y = run("Shrink", np.array([0, 1, 5], np.uint32), bias=2.0, lambd=0.5)
    assert y.tolist() == [0, 2**32 - 1, 3]


def test_the_first_of_two_conditions_that_shrink_counts() -> None:
    assert run("Shrink", floats(-0.5, 0, 2), bias=0.25, lambd=-1.0).tolist() == [-0.25, 0.25, 1.75]


def test_a_choice_of_truths_is_one() -> None:
    model = model_of(
        [node("Where", "c yes no", "y")],
        {"c": (TensorProto.BOOL, [])},
        {"y": (TensorProto.BOOL, None)},
        {"yes": np.array(True), "no": np.array([[False]])},
    )
    (y,) = backend.run_model(model, [np.array(True)])
    assert (y.dtype, y.tolist()) == (np.dtype(bool), [[True]])


@pytest.mark.parametrize("dtype", ["uint8", "uint64", "int64"])
def test_the_error_function_of_small_integers_is_0(dtype: str) -> None:
    y = run("Erf", np.array([0, 1, 3, 4], dtype), opset=9)
    assert (y.dtype, y.tolist()) == (np.dtype(dtype), [0, 0, 0, 1])


def test_nothing_is_padded_to_dims_without_elements_or_filled() -> None:
    x = np.empty((2, 0), np.float32)
    assert run("Pad", x, np.array([1, 0, 0, 0]), np.array(7, np.float32)).shape == (3, 0)
    assert run("Pad", x, np.array([-1, 1, 0, 1]), np.array(7, np.float32)).tolist() == [[7, 7]]


def test_keys_of_attention_may_be_negative() -> None:
    q, v = np.zeros((1, 1, 1, 2), np.float32), floats(1, 3).reshape(1, 1, 2, 1)
    k = np.full((1, 1, 2, 2), -5, np.float32)  # TopK's K is a count; this is none
    assert run("Attention", q, k, v, opset=23).tolist() == [[[[2]]]]


def test_means_and_variances_are_of_float64_too() -> None:
    x = np.array([[1, 3], [2, 2]], np.float64)
    y = run("MeanVarianceNormalization", x, axes=[1], opset=12)
    np.testing.assert_allclose(y, [[-1, 1], [0, 0]], rtol=1e-8)
    assert run("MeanVarianceNormalization", x[:0], axes=[1], opset=12).shape == (0, 2)


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "Mod", "Max", "BitwiseXor"])
def test_constants_of_uint64_beyond_int64_are_themselves(op: str) -> None:
    x, by = np.array([3, 1 << 63, (1 << 64) - 5], np.uint64), np.array((1 << 64) - 7, np.uint64)
    port = (TensorProto.UINT64, [3])
    proto = model_of([node(op, "x by", "y")], {"x": port}, {"y": port}, {"by": by})
    (y,) = backend.run_model(proto, [x])
    names = {"Sub": "subtract", "Mul": "multiply", "Div": "floor_divide", "BitwiseXor": "bitwise_xor"}
    of = getattr(np, names.get(op, {"Add": "add", "Mod": "remainder", "Max": "maximum"}.get(op, op)))
    np.testing.assert_array_equal(y, of(x, by))


@pytest.mark.parametrize("opset", [9, 13, 18])
def test_a_norm_along_no_axes_is_one_of_all_elements(opset: int) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 1, 3, 1)
    of = node("MeanVarianceNormalization", "x", "y")
    of.attribute.append(helper.make_attribute("axes", [], attr_type=AttributeProto.INTS))
    (y,) = backend.run_node(of, [x], opset_version=opset)
    np.testing.assert_allclose(y, (x - x.mean()) / x.std(), rtol=1e-5)


@pytest.mark.parametrize("dims", [(0, 4, 3), (2, 4, 0)])
@pytest.mark.parametrize("op", ["GroupNormalization", "InstanceNormalization"])
def test_a_norm_of_nothing_is_nothing(op: str, dims: tuple[int, ...]) -> None:
    attributes: dict[str, Any] = {"num_groups": 2} if op == "GroupNormalization" else {}
    y = run(op, np.ones(dims, np.float32), floats(1, 2, 3, 4), floats(1, 2, 3, 4), **attributes)
    assert (y.shape, y.dtype) == (dims, np.float32)


def test_a_shape_of_both_0_and_1_unknown_is_refused() -> None:
    of = node("Reshape", "x shape", "y", allowzero=1)
    given = {"x": (FLOAT, [0, 3])}
    model = model_of([of], given, {"y": (FLOAT, None)}, {"shape": np.array([0, -1])})
    with pytest.raises(InvalidModel, match="both a 0 and a -1"):
        backend.run_model(model, [np.empty((0, 3), np.float32)])


def test_a_mode_of_no_name_that_onnx_has_is_refused() -> None:
    with pytest.raises(InvalidModel, match="'nonsense', where it takes linear and circular"):
        run("TensorScatter", *[np.ones((1, 1, 2), np.float32)] * 2, mode="nonsense", opset=24)
    image, region = np.ones((1, 1, 4, 4), np.float32), np.ones((1, 4), np.float32)
    with pytest.raises(InvalidModel, match="the mode 'nonsense', where it takes avg and max"):
        run("RoiAlign", image, region, np.zeros(1, np.int64), mode="nonsense")
    with pytest.raises(InvalidModel, match="the auto_pad 'SAME', where it takes NOTSET, SAME_UPPER"):
        run("MaxPool", image, kernel_shape=[2, 2], auto_pad="SAME")


def test_quantised_sums_of_nothing_are_zero_points() -> None:
    scale, a, b = np.float32(1), np.empty((2, 0), np.uint8), np.empty((0, 3), np.uint8)
    y = run("QLinearMatMul", a, scale, np.uint8(3), b, scale, np.uint8(2), scale, np.uint8(5))
    assert y.tolist() == [[5, 5, 5]] * 2
    assert run("MatMulInteger", a, b).tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize("b", [(), (3,), (3, 4), (4, 0, 3)])
def test_a_quantised_sum_of_nothing_that_does_not_fit_is_told_with_its_dims(b: tuple[int, ...]) -> None:
    given = {"a": (TensorProto.UINT8, [2, 3, 0]), "b": (TensorProto.UINT8, list(b))}
    model = model_of([node("MatMulInteger", "a b", "y")], given, {"y": (TensorProto.INT32, None)})
    with pytest.raises(InvalidModel, match=r"has a product of dims \(2, 3, 0\) and \("):
        backend.run_model(model, [np.empty((2, 3, 0), np.uint8), np.ones(b, np.uint8)])


@cases_in_one_test
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize(
    ("equation", "dims"),
    [
        ("bij, bjk -> bik", [(0, 3, 4), (0, 4, 5)]),
        ("bij,bjk->ik", [(0, 3, 4), (0, 4, 5)]),
        ("...ij,...jk", [(0, 1, 3, 4), (1, 2, 4, 5)]),
        ("i...i->...", [(3, 0, 3)]),
        ("i,i->", [(0,), (0,)]),
        ("a,b,c->cab", [(2,), (0,), (3,)]),
    ],
)
def test_an_einsum_of_nothing_has_dims_and_zeros(equation: str, dims: Any, dtype: str) -> None:
    given = [np.empty(each, dtype) for each in dims]
    y, wanted = run("Einsum", *given, equation=equation), np.einsum(equation, *given)
    assert (y.shape, y.dtype) == (wanted.shape, wanted.dtype)
    assert (y == 0).all()


@cases_in_one_test
@pytest.mark.parametrize("op", ["Expand", "Where", "Add", "Mul", "Max", "MatMulInteger", "PRelu", "Pow"])
@pytest.mark.parametrize("rank", [32, 33, 64])
def test_more_dims_than_are_broadcast_are_refused(op: str, rank: int) -> None:
    """A tensor of a service has 8 at most, and an array of NumPy's 64, of which it broadcasts 32."""
    whole = op == "MatMulInteger"
    dtype = np.uint8 if whole else np.float32
    constants = {"w": np.ones([1] * rank, dtype), "yes": np.array([True])}
    if op == "Expand":
        constants = {"w": np.array([1] * rank)}
    proto = model_of(
        [node(op, "yes x w" if op == "Where" else "x w", "y")],
        {"x": (TensorProto.UINT8 if whole else FLOAT, [1, 2])},
        {"y": (TensorProto.INT32 if whole else FLOAT, None)},
        constants,
    )
    with pytest.raises((InvalidModel, UnsupportedModel)):
        backend.run_model(proto, [np.ones((1, 2), dtype)])
