"""Operators of ONNX Runtime's own, beside ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import helper

from cudnn_actor.errors import UnsupportedModel
from cudnn_actor.onnx import OnnxModel, backend
from cudnn_actor.onnx.runtime_schemas import MICROSOFT, SCHEMAS

from .onnx_runtime import answers
from .small_models import FLOAT, model_of, node

rng = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def the_shared_service_ends() -> Iterator[None]:
    yield
    backend.close()


class Case(NamedTuple):
    """A node: inputs, of which those of `weights` are constants; attributes; how many outputs there are."""

    op: str
    inputs: list[Any]
    attributes: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    outputs: tuple[int, ...] = (0,)
    dtypes: tuple[type, ...] = (np.float32,)
    tolerance: float = 2e-5


def f4(*dims: int) -> np.ndarray:
    return rng.standard_normal(dims).astype(np.float32)


def u1(*dims: int) -> np.ndarray:
    return rng.integers(0, 256, dims).astype(np.uint8)


def i1(*dims: int) -> np.ndarray:
    """Of 7 bits: some processors saturate sums of products of ONNX Runtime's full bytes."""
    return rng.integers(-64, 64, dims).astype(np.int8)


def one(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def byte(value: int) -> np.ndarray:
    return np.array(value, np.uint8)


HIDDEN = f4(2, 5, 8)
QKV = [f4(2, 5, 8), f4(2, 7, 8), f4(2, 7, 8)]
QUANTISED = [u1(2, 3, 6, 6), one(0.02), byte(120), one(0.03), byte(100)]
TWO = [u1(2, 3, 4), one(0.02), byte(120), u1(3, 1), one(0.01), byte(7), one(0.05), byte(99)]
U1: dict[str, Any] = {"dtypes": (np.uint8,), "tolerance": 1}
IDS = rng.integers(0, 9, (2, 5)).astype(np.int32)
BYTES, ZERO = [u1(3, 4), one(0.1), byte(9)], np.array(0, np.int8)
CLIPPED = {"activation": "HardSigmoid", "activation_params": [0.3, 0.4]}
EMBED = [f4(9, 8), f4(6, 8), f4(2, 8), f4(8), f4(8)]
LSTM = [f4(3, 1, 4), i1(2, 4, 12), i1(2, 3, 12), f4(2, 24) / 4, None, f4(2, 1, 3), f4(2, 1, 3), None]
LSTM += [np.full(2, 0.005, np.float32), np.zeros(2, np.int8)] * 2

CASES = [
    Case("Attention", [HIDDEN, f4(8, 24), f4(24)], {"num_heads": 2}),
    Case("Attention", [HIDDEN, f4(8, 24), f4(24), np.array([3, 5], np.int32)], {"num_heads": 4}),
    Case("Attention", [HIDDEN, f4(8, 24), f4(24)], {"num_heads": 2, "unidirectional": 1}),
    Case(
        "Attention",
        [HIDDEN, f4(8, 24), f4(24), np.array([[1] * 6 + [0] * 2, [1] * 8], np.int32), f4(2, 2, 2, 3, 4)],
        {"num_heads": 2},
        (0, 1),
        (np.float32, np.float32),
    ),
    Case("Attention", [HIDDEN, f4(8, 20), f4(20)], {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 4]}),
    Case("BiasGelu", [f4(2, 3, 4), f4(4)]),
    Case("DequantizeLinear", [u1(2, 3), one(0.5), byte(9)]),
    Case(
        "DynamicQuantizeLSTM",
        LSTM,
        {"hidden_size": 3, "direction": "bidirectional"},
        (0, 1, 2),
        (np.float32,) * 3,
    ),
    Case("DynamicQuantizeMatMul", [f4(2, 3, 6), i1(6, 5), one(0.03), np.array(3, np.int8), f4(5)]),
    Case("DynamicQuantizeMatMul", [f4(3, 6), u1(6, 5), np.abs(f4(5)) / 99, u1(5)]),
    Case(
        "EmbedLayerNormalization",
        [IDS, IDS % 2, *EMBED, np.array([[1, 1, 1, 0, 0], [1] * 5], np.int32)],
        {"epsilon": 1e-12},
        (0, 1),
        (np.float32, np.int32),
    ),
    Case(
        "EmbedLayerNormalization",
        [IDS, None, *EMBED[:2], None, *EMBED[3:], None, IDS % 6],
        {},
        (0, 1),
        (np.float32, np.int32),
    ),
    Case("FastGelu", [f4(2, 3, 4), f4(4)]),
    Case("FastGelu", [f4(2, 3)]),
    Case("FusedConv", [f4(1, 2, 5, 5), f4(4, 2, 3, 3), f4(4)], {"activation": "Relu", "pads": [1] * 4}),
    Case(
        "FusedConv",
        [f4(1, 2, 5, 5), f4(4, 2, 3, 3), f4(4), f4(1, 4, 3, 3)],
        {"activation": "LeakyRelu", "activation_params": [0.2]},
    ),
    Case("FusedConv", [f4(1, 2, 5), f4(4, 2, 3)], {"activation": "Clip", "activation_params": [-0.5, 0.75]}),
    Case(
        "FusedConv",
        [f4(1, 2, 5), f4(4, 2, 3)],
        CLIPPED,
    ),
    Case("FusedGemm", [f4(3, 4), f4(5, 4), f4(5)], {"transB": 1, "alpha": 0.5, "activation": "Tanh"}),
    Case("FusedGemm", [f4(3, 4), f4(4, 5)], {"activation": "LeakyRelu", "activation_alpha": 0.1}),
    Case("FusedMatMul", [f4(2, 3, 4), f4(2, 5, 4)], {"transB": 1, "alpha": 0.25}),
    Case("FusedMatMul", [f4(3, 2, 4), f4(2, 4, 5)], {"transBatchA": 1}),
    Case("FusedMatMul", [f4(4, 2, 3), f4(2, 4, 5)], {"transBatchA": 1, "transA": 1}),
    Case("Gelu", [f4(2, 3)]),
    Case("MatMulIntegerToFloat", [u1(3, 6), i1(6, 5), one(0.1), np.abs(f4(5)), byte(9), i1(5), f4(5)]),
    *(
        Case(
            "MatMulNBits",
            [
                f4(2, 3, 40),
                u1(6, 3, 16 * bits // 8),
                f4(18),
                *([u1(6 * -(-3 * bits // 8))] if points else []),
            ],
            {"K": 40, "N": 6, "bits": bits, "block_size": 16},
            tolerance=2e-4,
        )
        for bits in (2, 4, 8)
        for points in (False, True)
    ),
    Case("MultiHeadAttention", QKV, {"num_heads": 2}),
    Case(
        "MultiHeadAttention",
        [*QKV, f4(24), np.array([[1] * 4 + [0] * 3, [1] * 7], np.int32), f4(1, 2, 5, 7)],
        {"num_heads": 2, "scale": 0.3},
    ),
    Case(
        "MultiHeadAttention",
        [QKV[0], QKV[1][:, :5], QKV[2][:, :5], None, None, None, f4(2, 2, 3, 4), f4(2, 2, 3, 4)],
        {"num_heads": 2, "unidirectional": 1},
        (0, 1, 2),
        (np.float32,) * 3,
    ),
    Case("NhwcMaxPool", [u1(1, 6, 5, 3)], {"kernel_shape": [2, 2], "strides": [2, 1]}, **U1),
    Case(
        "QAttention",
        [u1(2, 5, 8), i1(8, 24), f4(24), one(0.02), one(0.01), None, byte(128), np.array(0, np.int8)],
        {"num_heads": 2},
        tolerance=1e-4,
    ),
    Case(
        "QGemm",
        [u1(3, 4), one(0.1), byte(9), i1(4, 5), one(0.2), np.array(0, np.int8), None, one(2), byte(80)],
        **U1,
    ),
    Case("QGemm", [*BYTES, i1(5, 4), one(0.2), ZERO], {"transB": 1}),
    Case("QLinearAdd", TWO, **U1),
    Case("QLinearAveragePool", QUANTISED, {"kernel_shape": [2, 3], "pads": [1, 1, 0, 0]}, **U1),
    Case("QLinearConcat", [one(0.5), byte(9), *TWO[:3], TWO[0], one(0.3), byte(2)], {"axis": 1}, **U1),
    Case(
        "QLinearConv",
        [u1(1, 5, 5, 2), one(0.1), byte(9), u1(4, 2, 3, 3), one(0.1), byte(3), one(9), byte(100)],
        {"channels_last": 1},
        **U1,
    ),
    Case("QLinearGlobalAveragePool", QUANTISED, {"channels_last": 1}, **U1),
    Case("QLinearGlobalAveragePool", QUANTISED, **U1),
    Case("QLinearLeakyRelu", QUANTISED, {"alpha": 0.2}, **U1),
    Case("QLinearMul", TWO, **U1),
    Case("QLinearSigmoid", [*QUANTISED[:3], one(1 / 256), byte(0)], **U1),
    Case("QLinearSoftmax", [*QUANTISED[:3], one(1 / 256), byte(0)], {"axis": 1, "opset": 13}, **U1),
    Case("QLinearSoftmax", [*QUANTISED[:3], one(1 / 256), byte(0)], {"axis": 1, "opset": 12}, **U1),
    Case("QuantizeLinear", [f4(2, 3) * 99, one(0.5), byte(90)], **U1),
    Case("QuickGelu", [f4(2, 3)], {"alpha": 1.5}),
    Case("SimplifiedLayerNormalization", [f4(2, 3, 8), f4(8)], {"epsilon": 1e-5}),
    Case("SkipLayerNormalization", [HIDDEN, f4(2, 5, 8), f4(8), f4(8), f4(8)], {}, (0, 3), (np.float32,) * 2),
    Case("SkipLayerNormalization", [HIDDEN, f4(5, 8), f4(8)], {"epsilon": 1e-3}),
    Case("SkipSimplifiedLayerNormalization", [HIDDEN, f4(2, 5, 8), f4(8)], {}, (0, 3), (np.float32,) * 2),
    Case("TransposeMatMul", [f4(4, 3), f4(4, 5)], {"transA": 1}),
    Case("Trilu", [f4(4, 3), np.array(1)], {"upper": 0}),
]
NOT_ON_ITS_CPU = {"BiasAdd"}
"""Operators that ONNX Runtime has for other devices only."""


def model(case: Case) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    names = ["-" if array is None else f"i{number}" for number, array in enumerate(case.inputs)]
    arrays = {f"i{number}": array for number, array in enumerate(case.inputs) if array is not None}
    outputs = [f"o{n}" if n in case.outputs else "-" for n in range(max(case.outputs) + 1)]
    domain = "" if ("", case.op) in SCHEMAS else MICROSOFT
    made = node(case.op, " ".join(names), " ".join(outputs), domain=domain, **case.attributes)
    types = {name: (helper.np_dtype_to_tensor_dtype(each.dtype), each.shape) for name, each in arrays.items()}
    codes = [helper.np_dtype_to_tensor_dtype(np.dtype(each)) for each in case.dtypes]
    results = {f"o{n}": (code, None) for n, code in zip(case.outputs, codes, strict=True)}
    first = {name: types[name] for name in list(types)[:1]}
    tensors = {name: array for name, array in arrays.items() if name not in first}
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    proto = model_of([made], first, results, tensors, opset_imports=imports, ir_version=9)
    return proto, {name: arrays[name] for name in first}


@pytest.fixture(scope="module")
def wanted() -> list[list[np.ndarray]]:
    """What ONNX Runtime gives for each case."""
    pytest.importorskip("onnxruntime")
    return answers([model(case) for case in CASES])


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.op for case in CASES])
def test_an_operator_of_onnx_runtime_gives_what_it_gives(number: int, wanted: list[list[np.ndarray]]) -> None:
    near = CASES[number].tolerance
    for value, reference in zip(backend.run_model(*model(CASES[number])), wanted[number], strict=True):
        assert (value.dtype, value.shape) == (reference.dtype, reference.shape)
        of = np.float64 if value.dtype.kind in "iu" else value.dtype
        np.testing.assert_allclose(value.astype(of), reference.astype(of), rtol=near, atol=near)


def quantised(x: np.ndarray) -> tuple[np.ndarray, float]:
    """As `DynamicQuantizeLinear`: bytes minus their zero point, and their scale."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = (high - low) / 255 or 1.0
    zero = np.rint(-low / scale)
    return np.clip(np.rint(x / scale) + zero, 0, 255) - zero, scale


def lstm(x: np.ndarray, w: np.ndarray, r: np.ndarray, bias: np.ndarray, by: np.ndarray) -> np.ndarray:
    """`LSTM` of one direction, whose input as a whole, and whose states at each step, are quantised.

    The weights w and r are of dims (inputs, gates) and (hidden, gates), and by is the scale of both.
    """
    hidden = r.shape[0]
    codes, scale = quantised(x)
    parts = codes @ w * (scale * by) + bias[: 4 * hidden] + bias[4 * hidden :]
    state, cell, found = np.zeros((x.shape[1], hidden)), np.zeros((x.shape[1], hidden)), []
    for part in parts:
        codes, scale = quantised(state)
        gates = part + codes @ r * (scale * by)
        i, o, f, c = (gates[:, n * hidden : (n + 1) * hidden] for n in range(4))
        i, o, f = (1 / (1 + np.exp(-each)) for each in (i, o, f))
        cell = f * cell + i * np.tanh(c)
        state = o * np.tanh(cell)
        found.append(state)
    return np.stack(found)


@pytest.mark.parametrize("each", [False, True], ids=["one scale", "a scale for each column"])
def test_an_lstm_quantises_its_input_and_its_states(each: bool) -> None:
    """Weights are full bytes, whose sums ONNX Runtime saturates on some processors; there are 3 samples."""
    draw = np.random.default_rng(11)
    w, r = (draw.integers(-128, 128, dims).astype(np.int8) for dims in ((1, 16, 32), (1, 8, 32)))
    x, bias = (draw.standard_normal(dims).astype(np.float32) for dims in ((9, 3, 16), (1, 64)))
    by = draw.uniform(0.001, 0.004, (1, 32) if each else (1,)).astype(np.float32)
    zeros = np.zeros(by.shape, np.int8)
    given = Case("DynamicQuantizeLSTM", [x, w, r, bias, None, None, None, None, by, zeros, by, zeros])
    of_node = given._replace(attributes={"hidden_size": 8})
    (y,) = backend.run_model(*model(of_node))
    wanted = lstm(x.astype(float), w[0].astype(float), r[0].astype(float), bias[0], by[0].astype(float))
    np.testing.assert_allclose(y[:, 0], wanted, rtol=1e-5, atol=1e-6)


def test_each_operator_of_onnx_runtime_that_runs_here_is_compared() -> None:
    assert {case.op for case in CASES} | NOT_ON_ITS_CPU == {op for _, op in SCHEMAS}


def test_others_are_refused_with_what_can_be_done() -> None:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    beam = node("NGramRepeatBlock", "x x", "y", domain=MICROSOFT, ngram_size=3)
    proto = model_of([beam], {"x": (FLOAT, ["N"])}, {"y": (FLOAT, None)}, opset_imports=imports)
    with pytest.raises(UnsupportedModel, match=r"ONNX Runtime's optimiser .* export the model without"):
        OnnxModel(proto)


def test_parts_of_them_that_do_not_run_here_are_refused() -> None:
    odd = Case("FusedConv", [f4(1, 2, 5), f4(4, 2, 3)], {"activation": "Elu"})
    with pytest.raises(UnsupportedModel, match=r"com.microsoft.FusedConv\): the activation Elu"):
        backend.run_model(*model(odd))
    mean = Case("SkipLayerNormalization", [HIDDEN, f4(5, 8), f4(8)], {}, (0, 1), (np.float32,) * 2)
    with pytest.raises(UnsupportedModel, match="gives the mean or the deviation"):
        backend.run_model(*model(mean))
