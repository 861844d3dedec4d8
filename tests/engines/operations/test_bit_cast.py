"""Bits read as another dtype, against NumPy's view; and the kernel that it is on CUDA."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from cudnn_actor.protocol import BitCast, DType, GraphBuilder, InvalidRequest, Layout, TensorSpec

from ...in_one_test import cases_in_one_test
from .. import host_cuda
from ..differences import computed
from ..workbench import Workbench, spread

PAIRS = [
    (source, dtype)
    for source, dtype in itertools.product(DType, DType)
    if source.itemsize == dtype.itemsize and source is not dtype is not DType.BOOL
]
SPECIAL = (0.0, -0.0, 1.5, -2.25, 1e-7, np.inf, -np.inf, np.nan)


def numbers(dtype: DType) -> np.ndarray:
    """Numbers of each sign and size, and those that are special."""
    if dtype.is_floating:
        return np.array(SPECIAL, dtype.numpy)
    if dtype is DType.BOOL:
        return np.array([True, False] * 4)
    limits = np.iinfo(dtype.value)
    given = [0, 1, 77, limits.max, limits.min, limits.max // 3, limits.min // 5, limits.max - 1]
    return np.array(given, dtype.numpy)


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize(("source", "dtype"), PAIRS)
def test_each_bit_is_kept(bench: Workbench, source: DType, dtype: DType) -> None:
    x = numbers(source).reshape(2, 1, 4)
    for spec in (TensorSpec.packed(x.shape, source, Layout.NHWC), spread(x.shape, source)):
        out = bench.empty(TensorSpec.packed(x.shape, dtype))
        operation = BitCast(x=bench.place(x, spec), y=out, source=source, dtype=dtype)
        got, wanted = bench.run(operation), x.view(dtype.numpy)
        numbers_only = ~np.isnan(wanted.astype(np.float64))
        assert got[numbers_only].tobytes() == wanted[numbers_only].tobytes()
        assert np.isnan(got[~numbers_only].astype(np.float64)).all()


def launches(source: DType, dtype: DType) -> Iterator[tuple[BitCast[str], dict[str, TensorSpec]]]:
    dims = (2, 4)
    for spec in (TensorSpec.packed(dims, source), spread(dims, source)):
        specs = {"x": spec, "y": TensorSpec.packed(dims, dtype)}
        yield BitCast(x="x", y="y", source=source, dtype=dtype), specs


@pytest.fixture(scope="module")
def kernels() -> None:
    host_cuda.compile_for(itertools.chain.from_iterable(itertools.starmap(launches, PAIRS)))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("source", "dtype"), PAIRS)
def test_the_kernel_copies_bits(monkeypatch: pytest.MonkeyPatch, source: DType, dtype: DType) -> None:
    host_cuda.use(monkeypatch)
    x = numbers(source).reshape(2, 4)
    for operation, specs in launches(source, dtype):
        got = host_cuda.launched(operation, specs, {"x": x})["y"]
        assert got.tobytes() == x.view(dtype.numpy).tobytes()


def test_bits_go_there_and_back_in_a_graph() -> None:
    """The sign of a float is cleared as an integer's highest bit."""
    g = GraphBuilder()
    x = g.input("x", (8,))
    bits = g.bit_cast(x + 1.0, "int32")
    graph = g.build(y=g.bit_cast(g.bitwise_and(bits, 0x7FFFFFFF), "float32"), same=g.bit_cast(x, "float32"))
    given = np.linspace(-4, 3, 8, dtype=np.float32)
    found = computed(graph, {"x": given})
    np.testing.assert_array_equal(found["y"], np.abs(given + 1))
    np.testing.assert_array_equal(found["same"], given)


@pytest.mark.parametrize("dtype", [DType.INT16, DType.FLOAT64, DType.BOOL])
def test_other_sizes_and_bool_are_refused(dtype: DType) -> None:
    g = GraphBuilder()
    x = g.input("x", (3,), DType.UINT8 if dtype is DType.BOOL else DType.FLOAT32)
    with pytest.raises(InvalidRequest, match="is no dtype that the bits of") as caught:
        g.bit_cast(x, dtype)
    assert caught.value.field == "dtype"


def test_the_source_is_the_dtype_of_x(bench: Workbench) -> None:
    x = bench.place(np.zeros(3, np.float32))
    out = bench.empty(TensorSpec.packed((3,), DType.INT32))
    with pytest.raises(InvalidRequest, match="x="):
        bench.run(BitCast(x=x, y=out, source=DType.UINT32, dtype=DType.INT32))
