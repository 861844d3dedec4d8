"""Which threads reduce what, how much is read at a time, and what cuDNN and a plan are given for it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cudnn_actor.engines.cuda.kernels.lines import Form, Lines, lines_of
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS, Implementation, Launcher
from cudnn_actor.engines.cuda.operations.reduction import matrix_of, reduction_lines, reduction_workspace
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running.recipe import Buffer, OperationStep, Scratch
from cudnn_actor.protocol import DType, GraphTensor, Layout, OperationGraph, TensorSpec
from cudnn_actor.protocol.operations import Reduction, ReductionMode

from ....in_one_test import cases_in_one_test
from ... import host_cuda

F32, F16 = DType.FLOAT32, DType.FLOAT16


def lines(
    dims: tuple[int, ...], axes: tuple[int, ...], dtype: DType = F32, strides: tuple[int, ...] = ()
) -> Lines:
    """Those of a tensor that is read along its lines."""
    strides = strides or TensorSpec.packed(dims, dtype).strides
    return lines_of(dims, [strides], axes, [dtype], vectors=[0])


@cases_in_one_test
@pytest.mark.parametrize(
    ("dims", "axes", "form", "vector"),
    [
        ((6, 40), (1,), Form.WARP, 4),
        ((6, 41), (1,), Form.WARP, 1),
        ((6, 516), (1,), Form.BLOCK, 4),
        ((6, 512), (1,), Form.WARP, 4),
        ((6, 40), (0,), Form.COLUMN, 1),
        ((2, 6, 40), (0, 2), Form.WARP, 4),
        ((2, 3, 4, 5), (1,), Form.COLUMN, 1),
        ((2, 3), (), Form.COLUMN, 1),
        ((), (), Form.WARP, 1),
        ((1000, 1), (0,), Form.BLOCK, 4),
    ],
)
def test_the_form_follows_from_where_neighbours_lie(
    dims: tuple[int, ...], axes: tuple[int, ...], form: Form, vector: int
) -> None:
    found = lines(dims, axes)
    assert (found.form, found.vector) == (form, vector)
    assert found.total * found.length == TensorSpec.packed(dims).size


@pytest.mark.parametrize("step", [1 << 30, 1 << 33])
def test_elements_that_lie_far_apart_have_the_form_of_others(step: int) -> None:
    reduced, kept = lines((5,), (0,), strides=(step,)), lines((5,), (), strides=(step,))
    assert (reduced.form, kept.form) == (Form.WARP, Form.COLUMN)
    assert reduced.wide
    assert kept.wide
    assert (reduced.threads().block, kept.threads().block) == ((256,), (32, 1))


def test_sixteen_bytes_are_read_at_a_time_if_all_of_them_are_aligned() -> None:
    assert lines((4, 64), (1,), F16).vector == 8
    assert lines((4, 64), (1,), F16, (72, 1)).vector == 8
    assert lines((4, 64), (1,), F16, (65, 1)).vector == 1
    assert lines((4, 64), (1,), F16, (128, 2)).vector == 1
    both = lines_of((4, 64), [(64, 1), (1, 4)], [1], [F16, F16], vectors=[0, 1])
    assert both.vector == 1


def test_dims_that_lie_one_after_the_other_are_one_axis() -> None:
    assert lines((2, 3, 4, 5), (2, 3)).along == ((20, (1,)),)
    assert lines((2, 3, 4, 5), (2, 3)).across == ((6, (20,)),)
    assert lines((2, 3, 4, 5), (1, 3)).along == ((3, (20,)), (5, (1,)))


@pytest.mark.parametrize(
    ("dims", "columns", "rows"),
    [
        ((10_000, 64), 32, 32),
        ((10_000, 8), 8, 128),
        ((10_000, 3), 4, 256),
        ((100, 3), 8, 128),
        ((3, 2), 32, 4),
    ],
)
def test_a_block_takes_no_more_columns_than_lie_side_by_side(
    dims: tuple[int, ...], columns: int, rows: int
) -> None:
    """Unless they are so short that it would have few threads."""
    assert lines(dims, (0,)).threads().block == (columns, rows)


@pytest.mark.parametrize(("strides", "wide"), [((1 << 14, 1), False), ((1 << 31, 1), True)])
def test_offsets_have_64_bits_where_they_need_them(strides: tuple[int, ...], wide: bool) -> None:
    assert lines((2, 8), (1,), F32, strides).wide is wide


def tensor(uid: int, spec: TensorSpec) -> GraphTensor:
    return GraphTensor(uid=uid, dims=spec.dims, strides=spec.strides, dtype=spec.dtype)


def summed(
    dims: tuple[int, ...], axes: tuple[int, ...] | None, layout: Layout = Layout.NCHW, **more: Any
) -> tuple[Reduction[int], list[GraphTensor]]:
    operation: Reduction[int] = Reduction(x=0, y=1, mode=ReductionMode.SUM, axes=axes, **more)
    x = TensorSpec.packed(dims, F32, layout)
    return operation, [tensor(0, x), tensor(1, operation.infer({"x": x})["y"])]


@pytest.mark.parametrize(
    ("dims", "axes", "layout", "x", "y"),
    [
        ((6, 40), (1,), Layout.NCHW, [6, 40], [6, 1]),
        ((6, 40), (0,), Layout.NCHW, [6, 40], [1, 40]),
        ((6, 40), None, Layout.NCHW, [1, 240], [1, 1]),
        ((2, 3, 4, 5), (2, 3), Layout.NCHW, [6, 20], [6, 1]),
        ((2, 3, 4, 5), (1,), Layout.NHWC, [40, 3], [40, 1]),
        ((2, 3, 4, 5), (0, 2, 3), Layout.NHWC, [40, 3], [1, 3]),
    ],
)
def test_cudnn_gets_a_matrix(
    dims: tuple[int, ...], axes: tuple[int, ...] | None, layout: Layout, x: list[int], y: list[int]
) -> None:
    for keep_dims in (False, True):
        found = matrix_of(reduction_lines(*summed(dims, axes, layout, keep_dims=keep_dims)))
        assert found is not None
        for (given, strides), (rows, columns) in zip(found, (x, y), strict=True):
            assert given == [rows, columns, 1, 1]
            assert strides == [columns, 1, columns, columns]


def test_what_is_no_matrix_is_not_given_to_cudnn() -> None:
    for dims, axes in (((2, 3, 4), (1,)), ((0, 3), None), ((4, 5), ()), ((2, 3, 4), (0, 2))):
        assert matrix_of(reduction_lines(*summed(dims, axes))) is None
    for axis in (0, 1):
        operation, (x, y) = summed((6, 40), (axis,))
        with_gaps = msgspec.structs.replace(x, strides=(48, 1))
        assert matrix_of(reduction_lines(operation, [with_gaps, y])) is None


@pytest.mark.parametrize(
    ("dims", "axes", "cut"),
    [
        ((2, 9000), (1,), True),
        ((2, 8000), (1,), False),
        ((9000, 40), (0,), True),
        ((600, 9000), (1,), False),
        ((1 << 20,), None, True),
    ],
)
def test_a_few_long_lines_are_cut_into_parts(
    dims: tuple[int, ...], axes: tuple[int, ...] | None, cut: bool
) -> None:
    operation, tensors = summed(dims, axes)
    assert (reduction_workspace(operation, tensors) > 0) is cut
    assert len(host_cuda.sources_of(operation, tensors)) == 1 + cut


def test_a_launcher_gets_its_workspace_after_its_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(lambda *_: lambda *_: None, workspace=lambda *_: 1000)
    implementations: dict[Any, Any] = IMPLEMENTATIONS
    monkeypatch.setitem(implementations, Reduction, Implementation(launchers={"kernel": launcher}))
    operation, tensors = summed((2, 9000), (1,))
    recipe = compile_split(OperationGraph(tensors=tuple(tensors), operations=(operation,)), None, None).recipe
    (step,) = recipe.steps
    assert isinstance(step, OperationStep)
    assert step.sources == (Buffer(0), Buffer(1), Scratch(0, 1000))
    assert recipe.scratch == 1024
