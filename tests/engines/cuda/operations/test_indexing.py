"""Kernels of gathers and scatters, run on the host: see `host_cuda`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cuda.operations import indexing
from cudnn_actor.protocol import (
    DType,
    Gather,
    GatherElements,
    GatherND,
    GraphTensor,
    Operation,
    Scatter,
    ScatterElements,
    ScatterND,
    ScatterReduction,
    TensorSpec,
)

from ....in_one_test import cases_in_one_test
from ... import host_cuda
from ...host_cuda import defined, launched
from ...workbench import spread

Specs = dict[str, TensorSpec]
I32, I64 = DType.INT32, DType.INT64
GATHERS: list[tuple[Any, tuple[int, ...], tuple[int, ...]]] = [
    (Gather(x="x", indices="indices", y="y"), (5, 4, 6), (3,)),
    (Gather(x="x", indices="indices", y="y", axis=1), (5, 4, 16), (2, 3)),
    (Gather(x="x", indices="indices", y="y", axis=2, batch_dims=1), (5, 4, 16), (5, 3)),
    (Gather(x="x", indices="indices", y="y", axis=1), (5, 4), ()),
    (Gather(x="x", indices="indices", y="y"), (300, 8), (90,)),
    (GatherElements(x="x", indices="indices", y="y", axis=1), (5, 4, 6), (3, 9, 2)),
    (GatherND(x="x", indices="indices", y="y"), (5, 4, 8), (7, 2)),
    (GatherND(x="x", indices="indices", y="y", batch_dims=1), (5, 4, 3), (5, 2, 6, 2)),
    (GatherND(x="x", indices="indices", y="y"), (4,), (1,)),
]


def problems() -> Iterator[tuple[Any, Specs]]:
    """Each packed and with gaps, of dtypes of all sizes."""
    dtypes = itertools.cycle(
        ((DType.FLOAT32, I64), (DType.BFLOAT16, I32), (DType.BOOL, I32), (DType.INT64, I64))
    )
    for (operation, x, indices), gaps in itertools.product(GATHERS, (False, True)):
        dtype, of_indices = next(dtypes)
        made = spread if gaps else TensorSpec.packed
        specs = {"x": made(x, dtype), "indices": made(indices, of_indices)}
        y = operation.infer(specs)["y"]
        yield operation, {**specs, "y": made(y.dims, y.dtype)}


SCATTERS: list[tuple[Any, tuple[int, ...], tuple[int, ...]]] = [
    (Scatter(x="x", indices="indices", updates="updates", y="y", axis=1), (5, 4, 6), (3, 5)),
    (Scatter(x="x", indices="indices", updates="updates", y="y"), (3,), (700,)),
    (Scatter(x="x", indices="indices", updates="updates", y="y", axis=1, batch_dims=1), (5, 4, 3), (5, 9)),
    (ScatterElements(x="x", indices="indices", updates="updates", y="y", axis=1), (5, 4, 6), (3, 9, 2)),
    (ScatterND(x="x", indices="indices", updates="updates", y="y"), (5, 4, 8), (30, 2)),
    (Scatter(x="x", indices="indices", updates="updates", y="y"), (4, 3, 16), (9,)),
    (ScatterND(x="x", indices="indices", updates="updates", y="y", batch_dims=1), (5, 4, 3), (5, 2, 6, 2)),
]


def scatters() -> Iterator[tuple[Any, Specs]]:
    dtypes = (DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.INT8, DType.UINT64, DType.BOOL, DType.INT64)
    kinds = itertools.cycle(zip(dtypes, itertools.cycle((I32, I64)), strict=False))
    for (operation, x, indices), reduction in itertools.product(SCATTERS, ScatterReduction):
        dtype, of_indices = next(kinds)
        made = spread if of_indices is I32 else TensorSpec.packed
        specs = {"x": made(x, dtype), "indices": made(indices, of_indices)}
        specs |= {"updates": made(operation.places(x, indices).dims, dtype), "y": made(x, dtype)}
        yield msgspec.structs.replace(operation, reduction=reduction), specs


PROBLEMS, WRITTEN = [*problems()], [*scatters()]


def tensors(operation: Operation[Any], specs: Specs) -> list[GraphTensor]:
    return [
        GraphTensor(uid=uid, dims=specs[name].dims, strides=specs[name].strides, dtype=specs[name].dtype)
        for uid, (name, _) in enumerate(operation.named())
    ]


def node(operation: Operation[Any]) -> Any:
    """With numbers for operands."""
    return operation.with_operands([name for name, _ in operation.named()].index)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    for problems in (WRITTEN, PROBLEMS):
        host_cuda.compile_for(problems)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host_cuda.use(monkeypatch)


@cases_in_one_test
@pytest.mark.parametrize(("operation", "specs"), PROBLEMS)
def test_gathers_move_the_bits_of_their_definition(operation: Any, specs: Specs) -> None:
    """With indices below 0 and out of range, too."""
    rng, x = np.random.default_rng(3), specs["x"]
    given = {
        "x": rng.integers(0, 2 if x.dtype is DType.BOOL else 100, x.dims).astype(x.dtype.numpy),
        "indices": rng.integers(-12, 12, specs["indices"].dims).astype(specs["indices"].dtype.numpy),
    }
    got, wanted = launched(operation, specs, given), defined(operation, specs, given)
    assert got["y"].tobytes() == wanted["y"].tobytes()


@cases_in_one_test
@pytest.mark.parametrize(("operation", "specs"), WRITTEN)
def test_scatters_compute_their_definition(operation: Any, specs: Specs) -> None:
    """Small whole numbers, so sums are exact; products may round."""
    rng, dtype = np.random.default_rng(3), specs["x"].dtype
    given = {
        name: rng.integers(0, 2 if dtype is DType.BOOL else 4, specs[name].dims).astype(dtype.numpy)
        for name in ("x", "updates")
    }
    given["indices"] = rng.integers(-6, 6, specs["indices"].dims).astype(specs["indices"].dtype.numpy)
    got, wanted = launched(operation, specs, given), defined(operation, specs, given)
    np.testing.assert_array_equal(got["y"].astype(np.float64), wanted["y"].astype(np.float64))


def test_sums_are_added_in_the_order_of_their_updates() -> None:
    """And so are the same each time: lists of writers begin in another order."""
    updates = np.random.default_rng(5).normal(size=3000).astype(np.float32)
    updates[::7] *= 1e6
    operation: Scatter[Any] = Scatter(
        x="x", indices="indices", updates="updates", y="y", reduction=ScatterReduction.ADD
    )
    specs = {"x": TensorSpec.packed((2,)), "indices": TensorSpec.packed((3000,), I64)}
    specs |= {"updates": TensorSpec.packed((3000,)), "y": TensorSpec.packed((2,))}
    indices = np.arange(3000) % 3 // 2
    got = launched(operation, specs, {"x": np.zeros(2, np.float32), "indices": indices, "updates": updates})
    wanted = np.zeros(2, np.float32)
    for place, update in zip(indices, updates, strict=True):
        wanted[place] += update
    assert got["y"].tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("x", "gap", "nbytes"), [((5, 4, 16), 0, 16), ((5, 7, 2), 0, 8), ((5, 3), 0, 4), ((5, 4, 16), 2, 8)]
)
def test_neighbours_with_the_same_indices_are_moved_together(
    x: tuple[int, ...], gap: int, nbytes: int
) -> None:
    """As many as divide rows and what lies between them, of 4 bytes each."""
    strides = TensorSpec.packed((*x[:-1], x[-1] + gap)).strides
    specs = {"x": TensorSpec.strided(x, strides), "indices": TensorSpec.packed((7,), I64)}
    operation: Gather[Any] = Gather(x="x", indices="indices", y="y")
    specs |= operation.infer(specs)
    assert indexing.describe_gather(node(operation), tensors(operation, specs)).nbytes == nbytes
    specs["indices"] = TensorSpec.packed((9,), I64)
    specs |= {"updates": TensorSpec.packed((9, *x[1:])), "y": TensorSpec.packed(x)}
    written: Scatter[Any] = Scatter(x="x", indices="indices", updates="updates", y="y")
    together = indexing.describe_scatter(node(written), tensors(written, specs)).together
    assert 4 * together == nbytes


def test_one_kernel_serves_many_shapes() -> None:
    found: set[str] = set()
    for rows, columns, count in ((5, 8, 3), (700, 1024, 90), (3, 4, 2)):
        specs = {"x": TensorSpec.packed((rows, columns)), "indices": TensorSpec.packed((count,), I64)}
        operation: Gather[Any] = Gather(x="x", indices="indices", y="y")
        specs |= operation.infer(specs)
        found.update(host_cuda.sources_of(operation, tensors(operation, specs)))
    assert len(found) == 1
