"""Convolutions and their gradients in the fast CPU engine, against their definitions in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from cudnn_actor.engines.cpu.blas import threads_of_blas
from cudnn_actor.engines.cpu.fast.convolution import make
from cudnn_actor.engines.cpu.fast.convolution_data_by_tap import BackwardDataByTap
from cudnn_actor.engines.cpu.fast.group_rows import GroupRows
from cudnn_actor.engines.cpu.fast.kernels import Step, of_calls
from cudnn_actor.engines.cpu.geometry import ConvGeometry
from cudnn_actor.engines.cpu.scratch import Scratch, aligned_bytes
from cudnn_actor.protocol import ConvSpec, DType, TensorSpec
from cudnn_actor.protocol.operations import (
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
)

from ....in_one_test import cases_in_one_test
from ...problems import PROBLEMS, Problem
from ...remembered import read_only
from .kernel_runs import LANES, run_kernel

LAYOUTS = ("packed", "channels last", "mixed", "channels last with a packed filter", "with gaps")
LARGER = {
    "one block": Problem((1, 30, 14, 14), (40, 30, 3, 3), ConvSpec.symmetric(2, pad=1)),
    "several blocks": Problem((2, 40, 23, 19), (16, 40, 3, 3), ConvSpec.symmetric(2, pad=1)),
    "parts of the filters": Problem((1, 70, 7, 7), (150, 70, 3, 3), ConvSpec.symmetric(2, pad=1)),
    "pointwise": Problem((2, 40, 23, 23), (130, 40, 1, 1), ConvSpec.symmetric(2)),
    "first layer": Problem((1, 3, 94, 92), (6, 3, 7, 7), ConvSpec.symmetric(2, pad=3, stride=2)),
    "groups": Problem((1, 24, 34, 33), (32, 6, 3, 3), ConvSpec.symmetric(2, pad=1, groups=4)),
    "few filters in a group": Problem((2, 12, 33, 40), (9, 4, 5, 3), ConvSpec.symmetric(2, (2, 1), groups=3)),
    "few filters, strided along rows": Problem(
        (1, 6, 30, 47), (6, 3, 3, 5), ConvSpec.symmetric(2, (1, 2), (1, 2), dilation=(2, 1), groups=2)
    ),
    "few filters, blocks of rows": Problem((1, 12, 96, 95), (2, 12, 9, 9), ConvSpec.symmetric(2, 4)),
    "few filters of volumes": Problem(
        (1, 4, 6, 20, 30), (4, 2, 2, 3, 3), ConvSpec.symmetric(3, 1, (2, 1, 1), groups=2)
    ),
    "a large filter": Problem((1, 33, 20, 20), (8, 33, 11, 11), ConvSpec.symmetric(2, 5)),
    "a filter as large as the image": Problem((2, 6, 13, 14), (5, 6, 13, 14), ConvSpec.symmetric(2, 6)),
    "a filter of more taps than outputs": Problem(
        (2, 6, 13, 29), (4, 3, 9, 21), ConvSpec.symmetric(2, (0, 2), (1, 3), dilation=(1, 1), groups=2)
    ),
    "a dilated filter of more taps than outputs": Problem(
        (2, 3, 70), (4, 3, 30), ConvSpec.symmetric(1, 5, 4, dilation=2)
    ),
    "taps far apart": Problem(
        (2, 6, 40, 50), (4, 3, 2, 3), ConvSpec.symmetric(2, (20, 7), (3, 1), dilation=(37, 21), groups=2)
    ),
    "many taps far apart": Problem((1, 3, 2000), (4, 3, 150), ConvSpec.symmetric(1, 2, 100, dilation=13)),
    "long rows": Problem((1, 8, 3300), (8, 8, 9), ConvSpec.symmetric(1, pad=4)),
    "volumes": Problem((1, 9, 7, 13, 14), (6, 9, 3, 3, 3), ConvSpec.symmetric(3, pad=1)),
    "depthwise, strided": Problem((2, 33, 40, 41), (33, 1, 3, 3), ConvSpec.symmetric(2, 1, 2, groups=33)),
    "depthwise, channels in blocks": Problem(
        (1, 600, 7, 7), (600, 1, 5, 5), ConvSpec.symmetric(2, 2, groups=600)
    ),
    "depthwise, several pixels in a run": Problem(
        (1, 20, 44, 48), (20, 1, 3, 3), ConvSpec.symmetric(2, 1, groups=20)
    ),
    "depthwise, long rows": Problem(
        (2, 11, 37, 91), (11, 1, 4, 3), ConvSpec.symmetric(2, (2, 1), 2, dilation=(3, 1), groups=11)
    ),
    "depthwise, long rows in two phases": Problem(
        (2, 6, 33, 64), (6, 1, 5, 5), ConvSpec.symmetric(2, 2, 2, groups=6)
    ),
    "depthwise, phases": Problem(
        (2, 5, 19, 147), (5, 1, 3, 4), ConvSpec.symmetric(2, (1, 3), (2, 3), dilation=(1, 2), groups=5)
    ),
    "depthwise, phases of distant taps": Problem(
        (1, 5, 19, 147), (5, 1, 3, 4), ConvSpec.symmetric(2, 0, 2, dilation=3, groups=5)
    ),
    "depthwise, taps in the padding": Problem(
        (1, 3, 4, 36), (3, 1, 3, 3), ConvSpec.symmetric(2, (1, 40), 1, dilation=(1, 40), groups=3)
    ),
    "depthwise, long lines": Problem(
        (1, 17, 1200), (17, 1, 9), ConvSpec.symmetric(1, 8, dilation=2, groups=17)
    ),
    "depthwise, long lines in pieces": Problem(
        (1, 2, 9000), (2, 1, 130), ConvSpec.symmetric(1, 64, groups=2)
    ),
    "depthwise, a large filter": Problem((1, 2, 2000), (2, 1, 1200), ConvSpec.symmetric(1, 600, groups=2)),
    "depthwise, many taps": Problem((2, 7, 30, 44), (7, 1, 7, 7), ConvSpec.symmetric(2, 3, groups=7)),
    "depthwise, many taps, strided": Problem(
        (1, 5, 23, 45), (5, 1, 7, 8), ConvSpec.symmetric(2, (3, 2), 2, groups=5)
    ),
    "depthwise, products in pieces": Problem(
        (1, 2, 112, 120), (2, 1, 9, 9), ConvSpec.symmetric(2, 4, groups=2)
    ),
    "depthwise volumes": Problem((1, 5, 6, 8, 33), (5, 1, 3, 3, 3), ConvSpec.symmetric(3, 1, groups=5)),
    "depthwise volumes, strided": Problem(
        (1, 4, 6, 9, 34), (4, 1, 2, 3, 3), ConvSpec.symmetric(3, 1, 2, groups=4)
    ),
}
ALL = PROBLEMS | LARGER
LARGE_FILTERS = {
    "31x31": Problem((1, 64, 128, 128), (64, 64, 31, 31), ConvSpec.symmetric(2, 15)),
    "15x15": Problem((1, 64, 64, 64), (64, 64, 15, 15), ConvSpec.symmetric(2, 7)),
    "depthwise, 63x63": Problem((1, 64, 128, 128), (64, 1, 63, 63), ConvSpec.symmetric(2, 31, groups=64)),
    "depthwise, 127x127": Problem((1, 64, 128, 128), (64, 1, 127, 127), ConvSpec.symmetric(2, 63, groups=64)),
}


@pytest.fixture(autouse=True)
def _one_thread_of_blas() -> Iterator[None]:
    """As in a lane of the engine."""
    with threads_of_blas(1):
        yield


def _operations(conv: ConvSpec) -> tuple[Any, ...]:
    return (
        ConvolutionForward(x="x", w="w", y="y", conv=conv),
        ConvolutionBackwardData(dy="dy", w="w", dx="dx", conv=conv),
        ConvolutionBackwardFilter(x="x", dy="dy", dw="dw", conv=conv),
    )


def _specs(operation: Any, problem: Problem, layout: str, dtype: DType = DType.FLOAT32) -> Any:
    """The specs of an operation's tensors: those with the dims of x, of w and of y."""
    last = {
        "packed": (),
        "rows apart": (),
        "mixed": (1, 2),
        "channels last with a packed filter": (0, 2),
    }.get(layout, (0, 1, 2))
    found = {}
    for number, (name, dims) in enumerate(
        zip(operation.shape, (problem.x, problem.w, problem.y), strict=True)
    ):
        axes = [0, *range(2, len(dims)), 1] if number in last else [*range(len(dims))]
        strides, step = [0] * len(dims), 3 if layout == "with gaps" else 1
        for axis in reversed(axes):
            strides[axis] = step
            step *= dims[axis] + (3 if layout == "rows apart" else 0)
        found[name] = TensorSpec.strided(dims, strides, dtype)
    return found


def _values(operation: Any, specs: Mapping[str, TensorSpec], seed: int = 38) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(specs[name].dims).astype(specs[name].dtype.numpy)
        for name in operation.inputs
    }


def _exact(operation: Any, specs: Any, values: Mapping[str, np.ndarray]) -> np.ndarray:
    (name,) = operation.outputs
    floats = {name: array.astype(np.float64) for name, array in values.items()}
    result: np.ndarray = operation.evaluate(np, floats, {name: specs[name]})[name]
    return result


class _Known(NamedTuple):
    """Values of an operation's inputs, its exact result, and that of the values' magnitudes."""

    values: Mapping[str, np.ndarray]
    wanted: np.ndarray
    magnitudes: np.ndarray


@functools.lru_cache(
    maxsize=3
)  # the three operations of a problem: its layouts are tested one after the other
def _known(problem: Problem, operation: Any, dtype: DType) -> _Known:
    specs = _specs(operation, problem, "packed", dtype)
    values = _values(operation, specs)
    magnitudes = _exact(operation, specs, {name: np.abs(array) for name, array in values.items()})
    return _Known(*read_only((values, _exact(operation, specs, values), magnitudes)))


@functools.lru_cache(maxsize=12)  # all that a test asks of a problem: layouts are tested one after the other
def _of_seed(problem: Problem, operation: Any, seed: int = 38, special: Any = None) -> Any:
    """Values of float32 for an operation's inputs, and the exact result.

    `special`: an operand, and what its last element is.
    """
    specs = _specs(operation, problem, "packed")
    values = _values(operation, specs, seed)
    if special is not None:
        operand, element = special
        values[operand][(-1,) * values[operand].ndim] = element
    with np.errstate(invalid="ignore"):
        return read_only((values, _exact(operation, specs, values)))


def _check(problem: Problem, layout: str, dtype: DType) -> None:
    for operation in _operations(problem.conv):
        specs, known = _specs(operation, problem, layout, dtype), _known(problem, operation, dtype)
        (name,) = operation.outputs
        found = [run_kernel(make, operation, specs, known.values, lanes)[name] for lanes in LANES]
        assert all(np.array_equal(each, found[0]) for each in found), operation
        terms = math.prod(problem.w[1:]) + math.prod(problem.y[2:]) * problem.y[0]
        bound = 4 * math.sqrt(terms) * (2.0**-53 if dtype is DType.FLOAT64 else 2.0**-24) * known.magnitudes
        assert np.all(np.abs(found[0] - known.wanted) <= bound), operation


@cases_in_one_test
@pytest.mark.parametrize("layout", LAYOUTS)  # of one problem after the other: see `_known`
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_results_are_right_and_do_not_depend_on_the_lanes(problem: Problem, layout: str) -> None:
    _check(problem, layout, DType.FLOAT32)


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS[:3])
@pytest.mark.parametrize("problem", LARGER.values(), ids=LARGER.keys())
def test_results_of_several_lanes_are_right_too(problem: Problem, layout: str) -> None:
    _check(problem, layout, DType.FLOAT32)


@pytest.mark.parametrize("name", [name for name in LARGER if name.startswith("depthwise, long")])
def test_there_may_be_gaps_between_long_rows(name: str) -> None:
    _check(LARGER[name], "rows apart", DType.FLOAT32)


@pytest.mark.parametrize("name", [name for name in LARGER if name.startswith("few filters")])
def test_few_filters_are_multiplied_row_by_row(name: str) -> None:
    problem = LARGER[name]
    rows = GroupRows(ConvGeometry(problem.x, problem.w, problem.y, problem.conv), np.float32)
    x, y = (np.empty(dims, np.float32) for dims in (problem.x, problem.y))
    assert rows.takes(x, y)
    assert not rows.takes(np.moveaxis(x, -1, 1), y), "its columns are copied"


def test_few_filters_of_one_large_image_are_for_several_lanes() -> None:
    problem = Problem((1, 16, 112, 112), (8, 16, 3, 3), ConvSpec.symmetric(2, 1))
    rows = GroupRows(ConvGeometry(problem.x, problem.w, problem.y, problem.conv), np.float32)
    assert rows.fits
    x, w, y = (np.zeros(dims, np.float32) for dims in (problem.x, problem.w, problem.y))
    lanes = [Scratch(aligned_bytes(rows.footprint())) for _ in range(4)]
    (step,) = rows.bind((x, w), y, lanes)
    assert len(step) == len(lanes)


def test_phases_of_a_large_filter_have_enough_scratch() -> None:
    _check(
        Problem((1, 2, 2000), (2, 1, 1100), ConvSpec.symmetric(1, 549, 2, groups=2)), "packed", DType.FLOAT32
    )


@pytest.mark.parametrize("problem", ["strided", "grouped", "depthwise", "pointwise"])
def test_float64_is_computed_in_float64(problem: str) -> None:
    _check(PROBLEMS[problem], "packed", DType.FLOAT64)


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("problem", ["pointwise_padded", "grouped", "depthwise", "depthwise, strided"])
@pytest.mark.parametrize("special", [math.nan, math.inf])
def test_nan_and_infinity_go_where_they_go_in_the_definition(
    problem: str, layout: str, special: float
) -> None:
    for operation in _operations(ALL[problem].conv):
        specs = _specs(operation, ALL[problem], layout)
        for operand in operation.inputs:
            values, wanted = _of_seed(ALL[problem], operation, special=(operand, special))
            (name,) = operation.outputs
            found = run_kernel(make, operation, specs, values, 2)[name]
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3)


@cases_in_one_test
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("problem", ["padded", "pointwise", "grouped", "depthwise", "few filters in a group"])
def test_what_is_bound_reads_its_operands_in_each_run(problem: str, layout: str) -> None:
    for operation in _operations(ALL[problem].conv):
        specs = _specs(operation, ALL[problem], layout)
        arrays = {name: _array(spec) for name, spec in specs.items()}
        (output,) = operation.outputs
        kernel = make(operation, specs)
        assert kernel is not None
        memory = aligned_bytes(kernel.footprint(1))
        given = {name: arrays[name] for name in operation.inputs}
        steps = kernel.bind(given, {output: arrays[output]}, [Scratch(memory)])
        for seed in (1, 2):
            values, wanted = _of_seed(ALL[problem], operation, seed)
            for name, array in values.items():
                arrays[name][...] = array
            _run(steps)
            np.testing.assert_allclose(arrays[output], wanted, rtol=0, atol=1e-4)


def _by_tap(operation: Any, specs: Mapping[str, TensorSpec]) -> BackwardDataByTap:
    x, w, y = (specs[name].dims for name in operation.shape)
    return BackwardDataByTap(ConvGeometry(x, w, y, operation.conv), np.float32)


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name",
    [
        *PROBLEMS,
        *("several blocks", "groups", "volumes", "a filter as large as the image"),
        *("a filter of more taps than outputs", "a dilated filter of more taps than outputs"),
    ],
)
def test_gradients_by_data_are_right_tap_by_tap(name: str, layout: str) -> None:
    problem = ALL[name]
    operation = _operations(problem.conv)[1]
    specs = _specs(operation, problem, layout)
    values, wanted = _of_seed(problem, operation)
    found, other = (run_kernel(_by_tap, operation, specs, values, lanes)["dx"] for lanes in (1, 2))
    np.testing.assert_array_equal(found, other)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * math.prod(problem.w) ** 0.5 * 4)
    values, wanted = _of_seed(problem, operation, special=("w", math.inf))
    infinite = run_kernel(_by_tap, operation, specs, values, 2)["dx"]
    np.testing.assert_array_equal(np.isfinite(infinite), np.isfinite(wanted))


def _array(spec: TensorSpec) -> np.ndarray:
    size = 1 + sum((n - 1) * step for n, step in zip(spec.dims, spec.strides, strict=True))
    memory = np.full(size, math.nan, np.float32)
    return np.lib.stride_tricks.as_strided(memory, spec.dims, [4 * step for step in spec.strides])


def _run(steps: Sequence[Step]) -> None:
    for step in steps:
        for call in step:
            call()


def test_scratch_for_a_large_image_is_a_few_blocks() -> None:
    problem = Problem((1, 64, 512, 512), (64, 64, 3, 3), ConvSpec.symmetric(2, pad=1))
    for operation in _operations(problem.conv):
        for layout in LAYOUTS:
            kernel = make(operation, _specs(operation, problem, layout))
            assert kernel is not None
            assert kernel.footprint(2) < 8 << 20


@pytest.mark.parametrize(
    "problem",
    [
        Problem((1, 4, 1 << 12), (4, 4, 3), ConvSpec.symmetric(1, 1 << 30, dilation=1 << 30)),
        Problem((1, 4, 1 << 12), (4, 1, 3), ConvSpec.symmetric(1, 1 << 30, dilation=1 << 30, groups=4)),
        Problem((1, 2, 1 << 26), (2, 2, 3), ConvSpec.symmetric(1, 0, 1 << 23)),
        Problem((1, 2, 1 << 20), (2, 2, 1 << 20), ConvSpec.symmetric(1, 1 << 10)),
    ],
    ids=["dilation", "dilation of a depthwise filter", "stride", "filter"],
)
def test_scratch_is_bounded_whatever_is_large(problem: Problem) -> None:
    for operation in _operations(problem.conv):
        kernel = make(operation, _specs(operation, problem, "packed"))
        assert kernel is not None
        assert kernel.footprint(1) <= 32 << 20, operation


@pytest.mark.parametrize("result", [1, 2])
def test_scratch_of_gradients_is_bounded_for_many_filters(result: int) -> None:
    problem = Problem((1, 1, 1200, 1200), (4096, 1, 3, 3), ConvSpec.symmetric(2, 1))
    operation = _operations(problem.conv)[result]
    kernel = make(operation, _specs(operation, problem, "packed"))
    assert kernel is not None
    assert kernel.footprint(1) <= 32 << 20


def test_a_small_convolution_takes_one_lane() -> None:
    problem = PROBLEMS["padded"]
    for operation in _operations(problem.conv):
        specs = _specs(operation, problem, "packed")
        arrays = {name: _array(spec) for name, spec in specs.items()}
        kernel = make(operation, specs)
        assert kernel is not None
        memory = [Scratch(aligned_bytes(kernel.footprint(2))) for _ in range(2)]
        results = {name: arrays[name] for name in operation.outputs}
        assert all(len(step) == 1 for step in kernel.bind(arrays, results, memory))


def test_integers_have_no_kernel() -> None:
    operation = _operations(PROBLEMS["padded"].conv)[0]
    assert make(operation, _specs(operation, PROBLEMS["padded"], "packed", DType.INT8)) is None


@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("problem", LARGE_FILTERS.values(), ids=LARGE_FILTERS.keys())
def test_calls_and_scratch_do_not_grow_with_large_filters(problem: Problem, layout: str) -> None:
    for operation in _operations(problem.conv):
        specs = _specs(operation, problem, layout)
        kernel = make(operation, specs)
        assert kernel is not None
        assert kernel.footprint(1) <= 64 << 20, operation
        assert _count_calls(kernel, operation, specs) <= 20_000, operation


def _count_calls(kernel: Any, operation: Any, specs: Mapping[str, TensorSpec]) -> int:
    """How many calls are bound, to memory that is not touched."""
    arrays = {name: _untouched(spec) for name, spec in specs.items()}
    results = {name: arrays[name] for name in operation.outputs}
    steps = kernel.bind(arrays, results, [Scratch(aligned_bytes(kernel.footprint(1)))])
    return sum(len(of_calls(call)) for step in steps for call in step)


def _untouched(spec: TensorSpec) -> np.ndarray:
    size = 1 + sum((n - 1) * step for n, step in zip(spec.dims, spec.strides, strict=True))
    strides = [4 * step for step in spec.strides]
    return np.lib.stride_tricks.as_strided(np.empty(size, np.float32), spec.dims, strides)
