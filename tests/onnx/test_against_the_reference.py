"""Operators with attributes drawn at random, beside ONNX's reference implementation.

Only what that implementation gets right: it moves the windows of average pools in `ceil_mode`, and takes
no groups in transposed convolutions, for example.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from cudnn_actor.onnx import backend

from ..in_one_test import cases_in_one_test
from ..whole import some

_CASES = some(12)
Drawn = tuple[str, list[np.ndarray | None], dict[str, Any], int]
"""An operator, its inputs, its attributes, and how many outputs it has."""


@pytest.fixture(autouse=True)
def the_shared_service_ends() -> Iterator[None]:
    yield
    backend.close()


class Draw(random.Random):
    """Random arrays and sizes."""

    def floats(self, *dims: int) -> np.ndarray:
        return np.random.default_rng(self.getrandbits(30)).standard_normal(dims).astype(np.float32)

    def whole(self, low: int, high: int, *dims: int, dtype: str = "int64") -> np.ndarray:
        return np.random.default_rng(self.getrandbits(30)).integers(low, high, dims).astype(dtype)

    def sizes(self, count: int, low: int, high: int) -> list[int]:
        return [self.randint(low, high) for _ in range(count)]


def conv(draw: Draw) -> Drawn:
    rank, groups = draw.randint(1, 3), draw.choice([1, 1, 2, 3])
    taps, strides, dilations = (draw.sizes(rank, 1, most) for most in (3, 3, 2))
    spatial = [(tap - 1) * by + draw.randint(1, 6) for tap, by in zip(taps, dilations, strict=True)]
    attributes: dict[str, Any] = {"strides": strides, "dilations": dilations, "group": groups}
    if draw.random() < 0.5:
        attributes["pads"] = draw.sizes(2 * rank, 0, 2)
    else:
        attributes["auto_pad"] = draw.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])
    channels = draw.randint(1, 3)
    filters = groups * draw.randint(1, 3)
    x, w = draw.floats(2, channels * groups, *spatial), draw.floats(filters, channels, *taps)
    return "Conv", [x, w, draw.floats(filters)], attributes, 1


def conv_transpose(draw: Draw) -> Drawn:
    rank = draw.randint(1, 2)
    taps, strides, dilations = (draw.sizes(rank, 1, most) for most in (4, 3, 2))
    attributes: dict[str, Any] = {"strides": strides, "dilations": dilations}
    attributes["pads"] = [min(1, (tap - 1) * by) for tap, by in zip(taps, dilations, strict=True)] * 2
    x = draw.floats(1, draw.randint(1, 2), *draw.sizes(rank, 2, 5))
    return "ConvTranspose", [x, draw.floats(x.shape[1], draw.randint(1, 3), *taps)], attributes, 1


def deform_conv(draw: Draw) -> Drawn:
    groups, shared = draw.sizes(2, 1, 2)
    taps, strides, dilations = (draw.sizes(2, 1, most) for most in (3, 2, 2))
    spatial = [(tap - 1) * by + draw.randint(2, 4) for tap, by in zip(taps, dilations, strict=True)]
    pads = draw.sizes(4, 0, 1)
    out = [
        (size + pads[n] + pads[n + 2] - (taps[n] - 1) * dilations[n] - 1) // strides[n] + 1
        for n, size in enumerate(spatial)
    ]
    channels, count = groups * shared, taps[0] * taps[1]
    x, w = draw.floats(1, channels, *spatial), draw.floats(groups, shared, *taps)
    arrays = [x, w, 2 * draw.floats(1, shared * count * 2, *out)]
    arrays += [draw.floats(groups), draw.floats(1, shared * count, *out)][: draw.randint(0, 2)]
    attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": groups}
    return "DeformConv", [*arrays], attributes | {"offset_group": shared}, 1


def einsum(draw: Draw) -> Drawn:
    sizes = {letter: draw.randint(1, 4) for letter in "abcde"}
    terms = ["".join(draw.choices("abcde", k=draw.randint(1, 3))) for _ in range(draw.randint(1, 3))]
    letters = sorted(set("".join(terms)))
    result = "->" + "".join(draw.sample(letters, draw.randint(0, len(letters))))
    arrays: list[np.ndarray | None] = [draw.floats(*(sizes[letter] for letter in term)) for term in terms]
    return "Einsum", arrays, {"equation": ",".join(terms) + (result if draw.random() < 0.8 else "")}, 1


def gather(draw: Draw) -> Drawn:
    x = draw.floats(*draw.sizes(draw.randint(1, 4), 1, 5))
    axis = draw.randrange(x.ndim)
    indices = draw.whole(-x.shape[axis], x.shape[axis], *draw.sizes(draw.randint(0, 2), 1, 3))
    return "Gather", [x, np.asarray(indices)], {"axis": draw.choice([axis, axis - x.ndim])}, 1


def pad(draw: Draw) -> Drawn:
    x, mode = (
        draw.floats(*draw.sizes(draw.randint(1, 4), 3, 5)),
        draw.choice(["constant", "edge", "reflect", "wrap"]),
    )
    widths = draw.sizes(2 * x.ndim, 0, 2)
    value = np.array(draw.choice([1.5, -np.inf, np.nan]), np.float32)
    return "Pad", [x, np.array(widths), value], {"mode": mode}, 1


def reduction(draw: Draw) -> Drawn:
    x = draw.whole(-3, 4, *draw.sizes(3, 1, 4), dtype=draw.choice(["float32", "int32", "int64"]))
    axes = np.array(draw.sample(range(-3, 0), draw.randint(0, 3)), np.int64)
    op = draw.choice(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceProd", "ReduceL1", "ReduceL2"])
    return op, [x, axes], {"keepdims": draw.randint(0, 1), "noop_with_empty_axes": draw.randint(0, 1)}, 1


def resize(draw: Draw) -> Drawn:
    x, mode = draw.floats(1, 2, *draw.sizes(2, 1, 7)), draw.choice(["nearest", "linear", "cubic"])
    where = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric"]
    attributes: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": draw.choice(where)}
    if mode == "nearest":
        attributes["nearest_mode"] = draw.choice(["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
    return "Resize", [x, None, None, np.array([1, 2, *draw.sizes(2, 1, 12)])], attributes, 1


def roi_align(draw: Draw) -> Drawn:
    """Regions of any size, also outside of images; and a number of samples that follows from their sizes."""
    x, count = draw.floats(2, 2, *draw.sizes(2, 1, 6)), draw.randint(1, 3)
    corners = draw.floats(count, 2) * 4
    rois = np.concatenate([corners, corners + np.abs(draw.floats(count, 2)) * 4 - 1], axis=1)
    attributes = {
        "output_height": draw.randint(1, 3),
        "output_width": draw.randint(1, 3),
        "sampling_ratio": draw.choice([0, 0, 1, 2]),
        "spatial_scale": draw.choice([0.5, 1.0]),
        "mode": draw.choice(["avg", "max"]),
        "coordinate_transformation_mode": draw.choice(["half_pixel", "output_half_pixel"]),
    }
    return "RoiAlign", [x, rois, draw.whole(0, 2, count)], attributes, 1


def recurrent(draw: Draw) -> Drawn:
    op, gates = draw.choice([("RNN", 1), ("GRU", 3), ("LSTM", 4)])
    steps, batch, inputs, hidden = draw.sizes(4, 1, 3)
    arrays: list[np.ndarray | None] = [
        draw.floats(steps, batch, inputs),
        draw.floats(1, gates * hidden, inputs),
        draw.floats(1, gates * hidden, hidden),
        draw.floats(1, 2 * gates * hidden),
    ]
    attributes: dict[str, Any] = {"hidden_size": hidden}
    if op == "GRU":
        attributes["linear_before_reset"] = draw.randint(0, 1)
    return op, arrays, attributes, 2


def integers(draw: Draw) -> Drawn:
    op = draw.choice(["Add", "Sub", "Mul", "Div", "Mod", "Max", "Min"])
    dtype = draw.choice(["int8", "uint8", "int16", "int32", "int64", "uint32"])
    low = 0 if dtype.startswith("u") else -9
    a, b = (draw.whole(low, 9, *dims, dtype=dtype) for dims in ((2, 3, 4), (3, 1)))
    return op, [a, np.where(b == 0, np.array(2, b.dtype), b)], {}, 1


def quantised(draw: Draw) -> Drawn:
    axis = draw.randrange(3)
    scale = np.abs(draw.floats(3 + axis)) + np.float32(0.1)
    zero = draw.whole(0, 5, 3 + axis, dtype=draw.choice(["uint8", "int8", "int16"]))
    if draw.random() < 0.5:
        return "QuantizeLinear", [draw.floats(3, 4, 5) * 20, scale, zero], {"axis": axis}, 1
    return (
        "DequantizeLinear",
        [draw.whole(0, 99, 3, 4, 5, dtype=zero.dtype.name), scale, zero],
        {"axis": axis},
        1,
    )


@cases_in_one_test
@pytest.mark.parametrize(
    "family",
    [
        conv,
        conv_transpose,
        deform_conv,
        einsum,
        gather,
        pad,
        reduction,
        resize,
        roi_align,
        recurrent,
        integers,
        quantised,
    ],
    ids=lambda family: family.__name__,
)
def test_an_operator_gives_what_the_reference_gives(family: Callable[[Draw], Drawn]) -> None:
    for seed in range(_CASES):
        op, arrays, attributes, count = family(Draw(seed))
        model, inputs = of_node(op, arrays, attributes, count)
        with np.errstate(all="ignore"):
            wanted: Any = ReferenceEvaluator(model).run(None, inputs)
        for result, reference in zip(model.graph.output, wanted, strict=True):
            result.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(reference.dtype)
        for value, reference in zip(backend.run_model(model, inputs), wanted, strict=True):
            told = f"seed {seed}: {op} {attributes}"
            assert (value.dtype, value.shape) == (reference.dtype, reference.shape), told
            np.testing.assert_allclose(value, reference, rtol=2e-4, atol=2e-4, err_msg=told)


def of_node(
    op: str, arrays: list[np.ndarray | None], attributes: dict[str, Any], outputs: int
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node, and its inputs."""
    names = ["" if array is None else f"input{number}" for number, array in enumerate(arrays)]
    inputs = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    made = helper.make_node(op, names, [f"output{number}" for number in range(outputs)], **attributes)
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    results = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in made.output]
    graph = helper.make_graph([made], "node", declared, results)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)]), inputs
