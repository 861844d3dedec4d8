"""Kernels of our own, launched as the engine launches them, but on the host: see `host_cuda`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cuda.operations import attention, norm_kernels, random
from cudnn_actor.protocol import (
    Attention,
    AttentionBackward,
    DType,
    LayerNorm,
    LayerNormBackward,
    Operation,
    RandomBernoulli,
    RandomIntegers,
    RandomNormal,
    RandomUniform,
    RMSNorm,
    RMSNormBackward,
    TensorSpec,
    alibi_slopes,
)
from cudnn_actor.protocol.operations.random import STATE

from .host_cuda import defined, launched, use
from .problems import normal
from .workbench import spread

Arrays = dict[str, np.ndarray]
F64, F32, BF16 = DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16
BEGIN = np.array([0x0123456789ABCDEF, (1 << 34) - 5])


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, attention, norm_kernels, random)


DRAWN: list[tuple[Any, DType, dict[str, Any]]] = [
    (RandomUniform, F64, {"low": -0.3, "high": 1.7}),
    (RandomUniform, F32, {"low": -0.3, "high": 1.7}),
    (RandomUniform, DType.FLOAT16, {"low": 1.0, "high": 2.0}),
    (RandomNormal, F64, {"mean": 0.25, "deviation": 3.5}),
    (RandomNormal, BF16, {}),
    (RandomBernoulli, DType.BOOL, {"probability": 0.3}),
    (RandomBernoulli, BF16, {"probability": 0.9}),
    (RandomIntegers, DType.INT8, {"low": -100, "high": 100}),
    (RandomIntegers, DType.INT64, {"low": -(1 << 63), "high": 1 << 63}),
    (RandomIntegers, DType.UINT64, {"low": 5, "high": (1 << 64) - 1}),
]


@pytest.mark.parametrize(("kind", "dtype", "of"), DRAWN)
def test_random_numbers_have_the_same_bits(kind: Any, dtype: DType, of: dict[str, Any]) -> None:
    dims = (9, 7, 11)
    operation = kind(state="state", y="y", dims=dims, dtype=dtype, **of)
    for spec, state in itertools.product(
        (TensorSpec.packed(dims, dtype), spread(dims, dtype)), (BEGIN, BEGIN * 0 - 1, BEGIN * 0)
    ):
        specs, given = {"state": STATE, "y": spec}, {"state": state}
        got = launched(operation, specs, given)["y"]
        assert got.tobytes() == defined(operation, specs, given)["y"].tobytes()


ROWS: list[tuple[Any, dict[str, int]]] = [
    (LayerNorm, {"mean": 1, "inverse_deviation": 1, "scale": 2, "bias": 2, "y": 0}),
    (RMSNorm, {"inverse_rms": 1, "scale": 2, "y": 0}),
    (LayerNormBackward, {"mean": 1, "inverse_deviation": 1, "scale": 2, "dx": 0, "dscale": 2, "dbias": 2}),
    (RMSNormBackward, {"inverse_rms": 1, "scale": 2, "dx": 0, "dscale": 2}),
]
"""Norms with their operands: of x's dims, one for each row, or one for each element of a row."""


@pytest.mark.parametrize(
    ("kind", "parts", "dims"), [*((*row, (6, 40)) for row in ROWS), (*ROWS[2], (2, 9000))]
)
def test_norms_of_rows_are_computed(kind: Any, parts: dict[str, int], dims: tuple[int, ...]) -> None:
    operands = {**dict.fromkeys(kind.inputs[: 2 if "dy" in kind.inputs else 1], 0), **parts}
    shapes = dims, (dims[0], 1), dims[1:]
    specs = {name: TensorSpec.packed(shapes[part], F32) for name, part in operands.items()}
    operation = kind(**{name: name for name in operands})
    names = [name for name, _ in operation.named(operation.inputs)]
    given = {name: normal(specs[name].dims, F32, seed) for seed, name in enumerate(names)}
    for name, wanted in defined(operation, specs, given).items():
        got = launched(operation, specs, given)[name]
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-3)


ATTENDED: list[dict[str, Any]] = [
    {"causal": True, "bias": (2, 4, 9)},
    {"window_left": 2, "window_right": 3, "lengths_kv": (13, 4), "lengths_q": (9, 5), "bias": (1, 4, 9)},
    {"window_left": 3, "rows": 17, "columns": 5, "slopes": alibi_slopes(4), "scale": 0.3},
    {"dropout": 0.3, "bias": (1, 4, 1), "lengths_kv": (13, 0), "slopes": (0.5, 0.0, -1.0, 0.1)},
    {"dropout": 0.5, "window_left": 35, "window_right": 3, "rows": 39, "columns": 41},
]


@pytest.mark.parametrize("problem", ATTENDED, ids=[str(n) for n in range(len(ATTENDED))])
def test_attention_and_its_gradients(problem: dict[str, Any]) -> None:
    options = dict(problem)
    rows, columns = options.pop("rows", 9), options.pop("columns", 13)
    specs = {
        "q": spread((2, 4, rows, 8), F64),
        "k": TensorSpec.packed((2, 2, columns, 8), F64),
        "v": TensorSpec.packed((2, 2, columns, 12), F64),
        "dy": TensorSpec.packed((2, 4, rows, 12), F64),
    }
    if "bias" in options:
        specs["bias"] = TensorSpec.packed((*options.pop("bias"), columns), F64)
    given = {name: normal(spec.dims, F64, seed) for seed, (name, spec) in enumerate(specs.items())}
    for name in ("lengths_q", "lengths_kv"):
        if name in options:
            specs[name], given[name] = (
                TensorSpec.packed((2,), DType.INT32),
                np.array(options.pop(name), np.int32),
            )
    if "dropout" in options:
        specs["state"], given["state"] = STATE, BEGIN
    operands: dict[str, Any] = {name: name for name in specs if name != "dy"}
    statistics: dict[str, Any] = {"y": "y", "statistics": "statistics"}
    forward: Attention[Any] = Attention(**operands, **statistics, **options)
    specs |= forward.infer({name: specs[name] for name in operands})
    given |= compared(forward, specs, given)
    results: dict[str, Any] = {f"d{name}": f"d{name}" for name in ("q", "k", "v", "bias") if name in operands}
    backward: AttentionBackward[Any] = AttentionBackward(
        dy="dy", **operands, **statistics, **results, **options
    )
    specs |= backward.infer({name: specs[name] for name, _ in backward.named(backward.inputs)})
    compared(backward, specs, given)


def compared(operation: Operation[Any], specs: dict[str, TensorSpec], given: Arrays) -> Arrays:
    """What is defined; the kernels have given the same."""
    of = {name: specs[name] for name, _ in operation.named()}
    got, wanted = launched(operation, of, given), defined(operation, of, given)
    for name, array in wanted.items():
        finite = np.isfinite(array)
        np.testing.assert_array_equal(got[name][~finite], array[~finite])
        np.testing.assert_allclose(got[name], array, rtol=1e-12, atol=1e-13 * np.abs(array[finite]).max())
    return wanted
