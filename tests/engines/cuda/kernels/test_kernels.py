"""Kernels of our own, launched as the engine launches them, but on the host: see `host_cuda`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import (
    DType,
    LayerNorm,
    LayerNormBackward,
    RandomBernoulli,
    RandomIntegers,
    RandomNormal,
    RandomUniform,
    RMSNorm,
    RMSNormBackward,
    TensorSpec,
)
from cudnn_actor.protocol.operations.random import STATE

from ....in_one_test import cases_in_one_test
from ...host_cuda import compile_for, defined, launched, use
from ...problems import normal
from ...workbench import spread

F64, F32, BF16 = DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16
BEGIN = np.array([0x0123456789ABCDEF, (1 << 34) - 5])


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


ROWS: list[tuple[Any, dict[str, int]]] = [
    (LayerNorm, {"mean": 1, "inverse_deviation": 1, "scale": 2, "bias": 2, "y": 0}),
    (RMSNorm, {"inverse_rms": 1, "scale": 2, "y": 0}),
    (LayerNormBackward, {"mean": 1, "inverse_deviation": 1, "scale": 2, "dx": 0, "dscale": 2, "dbias": 2}),
    (RMSNormBackward, {"inverse_rms": 1, "scale": 2, "dx": 0, "dscale": 2}),
]
"""Norms with their operands: of x's dims, one for each row, or one for each element of a row."""
NORMS = [*((*row, (6, 40)) for row in ROWS), (*ROWS[2], (2, 9000))]
Specs = dict[str, TensorSpec]


def numbers(kind: Any, dtype: DType, of: dict[str, Any]) -> Iterator[tuple[Any, Specs]]:
    """What draws random numbers, packed and with gaps."""
    dims = (9, 7, 11)
    for spec in (TensorSpec.packed(dims, dtype), spread(dims, dtype)):
        yield kind(state="state", y="y", dims=dims, dtype=dtype, **of), {"state": STATE, "y": spec}


def norm(kind: Any, parts: dict[str, int], dims: tuple[int, ...]) -> tuple[Any, Specs]:
    operands = {**dict.fromkeys(kind.inputs[: 2 if "dy" in kind.inputs else 1], 0), **parts}
    shapes = dims, (dims[0], 1), dims[1:]
    specs = {name: TensorSpec.packed(shapes[part], F32) for name, part in operands.items()}
    return kind(**{name: name for name in operands}), specs


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    drawn = itertools.chain.from_iterable(itertools.starmap(numbers, DRAWN))
    compile_for([*drawn, *itertools.starmap(norm, NORMS)])


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)


@cases_in_one_test
@pytest.mark.parametrize(("kind", "dtype", "of"), DRAWN)
def test_random_numbers_have_the_same_bits(kind: Any, dtype: DType, of: dict[str, Any]) -> None:
    for operation, specs in numbers(kind, dtype, of):
        for state in (BEGIN, BEGIN * 0 - 1, BEGIN * 0):
            got = launched(operation, specs, {"state": state})["y"]
            assert got.tobytes() == defined(operation, specs, {"state": state})["y"].tobytes()


@pytest.mark.parametrize(("kind", "parts", "dims"), NORMS)
def test_norms_of_rows_are_computed(kind: Any, parts: dict[str, int], dims: tuple[int, ...]) -> None:
    operation, specs = norm(kind, parts, dims)
    names = [name for name, _ in operation.named(operation.inputs)]
    given = {name: normal(specs[name].dims, F32, seed) for seed, name in enumerate(names)}
    got = launched(operation, specs, given)
    for name, wanted in defined(operation, specs, given).items():
        np.testing.assert_allclose(got[name], wanted, rtol=1e-4, atol=1e-3)
