"""Buffers of 0 to 8 dims, also of none of elements."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from cudnn_actor.protocol import (
    DType,
    InvalidRequest,
    Layout,
    TensorSpec,
)
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.operations import (
    OPERATIONS,
    Pointwise,
    PointwiseMode,
)

from ...in_one_test import cases_in_one_test, in_one_test
from ..shared_memory import shared_memory
from ..workbench import Workbench, spread
from .test_shared import settle

DIMS = [
    (),
    (0,),
    (1,),
    (5,),
    (0, 3),
    (3, 0, 4),
    (2, 3, 0, 5),
    (0, 0, 0, 0, 0),
    (2, 1, 3, 1, 2, 3),
    (2, 3, 2, 1, 2, 3, 2),
    (2, 1, 3, 2, 1, 2, 2, 3),
    (2, 3, 2, 2, 2, 2, 0, 3),
    (1,) * 8,
    (4, 3, 5, 4, 3, 2, 5, 3),
]
SPECS = [
    spec
    for number, dims in enumerate(DIMS)
    for layout in Layout
    if layout is not Layout.NHWC or 3 <= len(dims) <= 5
    for dtype in [list(DType)[number % len(DType)]]
    for spec in [spread(dims, dtype) if layout is Layout.STRIDED else TensorSpec.packed(dims, dtype, layout)]
]
each_spec = in_one_test("spec", SPECS, ids=lambda spec: f"{spec}, strides {spec.strides}")


def values_of(spec: TensorSpec) -> np.ndarray:
    values = np.arange(spec.size).reshape(spec.dims) % 113
    return values.astype(spec.dtype.numpy)


@each_spec
def test_values_are_written_copied_filled_and_read(bench: Workbench, spec: TensorSpec) -> None:
    values = values_of(spec)
    src, dst = bench.place(values, spec), bench.empty(TensorSpec.packed(spec.dims, spec.dtype))
    bench.engine.copy(bench.binding(src), bench.binding(dst))
    for ref in (src, dst):
        got = bench.read(ref)
        assert (got.shape, got.dtype, got.flags.c_contiguous) == (spec.dims, spec.dtype.numpy, True)
        np.testing.assert_array_equal(got, values)
    bench.engine.fill(bench.binding(src), 1)
    assert (bench.read(src) == 1).all()


@pytest.mark.parametrize("pinned", [False, True], ids=["unpinned", "pinned"])
@each_spec
def test_values_go_to_shared_memory_and_come_from_there(
    bench: Workbench, spec: TensorSpec, pinned: bool
) -> None:
    values = values_of(spec)
    with shared_memory(bench.engine, pinned=pinned) as shared:
        ref = bench.empty(spec)
        bench.engine.write(bench.binding(ref), shared.holding(values, spec))
        for into in (shared.room(spec), shared.room(spec)):
            assert bench.engine.read(bench.binding(ref), into) is into
            np.testing.assert_array_equal(into, values)
            into[...] = np.zeros((), into.dtype)
            answer = bench.engine.fetch(bench.binding(ref), into)
            settle(bench.engine)
            assert answer is not None
            assert answer() is into
            np.testing.assert_array_equal(into, values)
        del into, answer
        gc.collect()


@each_spec
def test_a_download_without_a_target_is_an_array_of_the_same_dims(bench: Workbench, spec: TensorSpec) -> None:
    ref = bench.place(values_of(spec), spec)
    answer = bench.engine.fetch(bench.binding(ref))
    settle(bench.engine)
    assert answer is not None
    np.testing.assert_array_equal(answer(), values_of(spec))


@each_spec
def test_a_view_has_the_dims(bench: Workbench, spec: TensorSpec) -> None:
    ref = bench.place(values_of(spec), spec)
    settle(bench.engine)
    view = bench.engine.view(bench.binding(ref), object())
    assert (view.shape, view.dtype, view.size) == (spec.dims, spec.dtype.numpy, spec.size)
    del view


@pytest.mark.parametrize("dims", [(), (0,), (2, 0, 3), (1,) * 8])
def test_values_of_other_dims_are_refused_even_if_there_are_none(
    bench: Workbench, dims: tuple[int, ...]
) -> None:
    ref = bench.empty(TensorSpec.packed(dims))
    for other in ((1,), (0, 0), (0, 1)):
        with pytest.raises(InvalidRequest, match="other dims"):
            bench.engine.write(bench.binding(ref), np.zeros(other, np.float32))


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@pytest.mark.parametrize("dims", [(), (1,), (0,), (3, 0), (2, 0, 3, 1), (2, 1, 3, 1, 2, 3, 2, 2)])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT8])
def test_a_function_of_each_element_of_any_rank(
    bench: Workbench, dims: tuple[int, ...], dtype: DType
) -> None:
    spec = TensorSpec.packed(dims, dtype)
    x = np.random.default_rng(0).integers(-5, 6, dims).astype(dtype.numpy)
    a, b, y = bench.place(x, spec), bench.place(x, spec), bench.empty(spec)
    adds = Pointwise(mode=PointwiseMode.ADD, operands=(a, b), result=y)
    plan = bench.engine.build(lower(adds).graph, workspace_limit=None)
    for _ in range(6):  # also as a CUDA graph
        bench.execute(plan, adds)
    np.testing.assert_array_equal(bench.read(y), x + x)


def test_no_elements_are_broadcast_to_none(bench: Workbench) -> None:
    a, b = bench.place(np.ones((3, 1), np.float32)), bench.place(np.ones((1, 0), np.float32))
    y = bench.empty(TensorSpec.packed((3, 0)))
    assert bench.run(Pointwise(mode=PointwiseMode.ADD, operands=(a, b), result=y)).shape == (3, 0)
    wrong = bench.empty(TensorSpec.packed((3, 1)))
    with pytest.raises(InvalidRequest) as caught:
        lower(Pointwise(mode=PointwiseMode.ADD, operands=(a, b), result=wrong))
    assert caught.value.field == "result"


def test_an_operation_takes_tensors_without_elements_if_those_of_its_family_do() -> None:
    """As functions of each element do, or of all along some dims, of which there may be none; and movement.

    Results of the others are numbers: see `test_empty_tensors`.
    """
    takes: dict[str, set[bool]] = {}
    for operation in OPERATIONS:
        takes.setdefault(operation.__module__, set()).add(operation.takes_empty)
    assert {family: len(kinds) for family, kinds in takes.items()} == dict.fromkeys(takes, 1)
