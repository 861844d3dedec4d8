"""The fuzzer of operations and their cells of the support matrix, on the CPU engine."""

from __future__ import annotations

import functools
import itertools
import secrets
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cuda.operations import PARTLY
from cudnn_actor.protocol import Layout, TensorSpec
from cudnn_actor.protocol.operations import (
    OPERATIONS,
    AdaptiveWindow,
    BatchNormTraining,
    Convolution,
    Reduction,
    ReductionMode,
    Window,
    alibi_slopes,
)

from ...gpu.families import CONVOLUTION, FAMILIES
from ...gpu.fuzz import fuzz
from ...gpu.operations import ROWS, channel_norms
from ...gpu.operations.cases import OperationCase, arrays, error_over_bound, run, truth
from ...gpu.operations.drawing import MOST_VALUES, cells, draw
from ...gpu.operations.rows import Row, Sizes, Values
from ...in_one_test import cases_in_one_test
from ...whole import WHOLE, pairwise, some
from ..mistakes import opened
from ..operations.test_matmul import RESULTS
from ..refusals import may_refuse

SEED = 20
"""Of the tests that look for a mistake: its cases are known to show each of them."""
POOLING, NORMALIZATION, ATTENTION, MATMUL = "pooling", "normalization", "attention", "matmul"
REDUCTION, SOFTMAX = "reduction", "softmax"
POINTWISE, MOVEMENT, RANDOM, INDEXING = "pointwise", "movement", "random", "indexing"
GROUPED_MATMUL, CTC_LOSS = "grouped_matmul", "ctc_loss"
NAMES = [name for name in FAMILIES if name != CONVOLUTION]
BOTH = (False, True)
each_family = pytest.mark.parametrize("family", NAMES)
each_row = pytest.mark.parametrize("row", ROWS, ids=[row.operation.kind for row in ROWS])


@functools.cache
def case_of(family: str, number: int) -> OperationCase:
    """A case that several tests look at. It is drawn once."""
    return draw(family, SEED, number)


def test_every_operation_has_a_row_or_is_fuzzed_as_part_of_a_convolution() -> None:
    parts = {kind for kind in OPERATIONS if issubclass(kind, Convolution)}
    assert {row.operation for row in ROWS} | parts == set(OPERATIONS)


def test_a_run_begins_no_case_after_its_time() -> None:
    assert fuzz(opened(CpuEngine(exact=True)), 5, range(50), family="sorting", seconds=0.0).ran == 1


@each_family
def test_random_problems_are_computed_in_float64_and_rounded_once(family: str) -> None:
    count = some(60 if family != ATTENTION else 30)
    report = fuzz(opened(CpuEngine(exact=True)), secrets.randbelow(1 << 32), range(count), family=family)
    assert not report.failures, str(report)
    assert report.ran == count
    # The order of float64 sums depends on the layout, so the truth is off by that much at the most.
    assert all(error < 1e-6 for label, error in report.largest.items() if "float64" not in label)


@cases_in_one_test
@each_row
def test_every_cell_is_computed_right(row: Row) -> None:
    """Some as large as on a GPU. Of each value some, since definitions are evaluated: see `tests.whole`."""
    engine = opened(CpuEngine(exact=True))
    own = [cell for cell in cells(row.family) if cell.row is row]
    for number, cell in enumerate(
        pairwise(own, lambda cell: (cell.dtype, cell.rank, cell.layout, cell.form), together=1)
    ):
        small = number % (23 if row.family == ATTENTION or not WHOLE else 5)
        case = cell.case(SEED, Sizes.TINY if small else Sizes.ODD)
        assert error_over_bound(case, run(engine, case).values, truth(case)) <= 1.0, f"{cell.name}: {case}"


@cases_in_one_test
@each_family
def test_there_are_at_least_a_hundred_cells_and_each_has_a_name_of_its_own(family: str) -> None:
    assert len({cell.name for cell in cells(family)}) == len(cells(family)) >= 100


@cases_in_one_test
@each_family
def test_a_case_is_the_same_whatever_was_drawn_before_it(family: str) -> None:
    assert str(draw(family, SEED, 7)) == str(draw(family, SEED, 7))
    assert str(draw(family, SEED, 7)) != str(draw(family, SEED, 8))
    assert str(draw(family, SEED, 7)) != str(draw(family, SEED + 1, 7))


@cases_in_one_test
@each_family
def test_everything_that_a_request_can_say_is_drawn(family: str) -> None:
    rows = [row for row in ROWS if row.family == family]
    cases = [case_of(family, number) for number in range(80 * len(rows))]
    for row in rows:
        drawn = [case for case in cases if case.row is row]
        firsts = [case.first for case in drawn]
        assert {spec.dtype for spec in firsts} == {*row.dtypes}
        assert {spec.rank for spec in firsts} == {*row.ranks, *row.more_ranks}
        images = any(3 <= rank <= 5 for rank in row.ranks)
        assert {spec.layout for spec in firsts} == {*Layout} - (set() if images else {Layout.NHWC})
        assert {case.values for case in drawn} == {*Values}
        assert {case.special for case in drawn} == {bool(row.specials), False}
        for name in row.operation.optional:
            assert {name in case.specs for case in drawn} == {True, False}
        assert any(spec.size == 1 for spec in firsts)
        assert 10_000 < max(spec.size for case in drawn for spec in case.specs.values()) <= MOST_VALUES


def test_every_kind_of_window_is_drawn() -> None:
    drawn = [case_of("pooling", number).operation.window for number in range(300)]  # type: ignore[attr-defined]
    windows = [window for window in drawn if isinstance(window, Window)]
    assert any(isinstance(window, AdaptiveWindow) for window in drawn)
    assert any(window.pre_padding != window.post_padding for window in windows)
    assert any(max(window.dilation) > 1 for window in windows)
    assert any(window.stride == window.size for window in windows)
    assert any(step < size for w in windows for step, size in zip(w.stride, w.size, strict=True))
    assert {window.spatial_dims for window in windows} == {1, 2, 3}


def test_every_kind_of_product_is_drawn() -> None:
    cases = [case_of(MATMUL, number) for number in range(300)]
    specs = [(case.specs["a"], case.specs["b"], case.specs["y"]) for case in cases]
    assert {(a.dtype, y.dtype) for a, _, y in specs} == {*RESULTS}
    assert {a.strides[-2] < a.strides[-1] for a, *_ in specs} == {True, False}
    assert {b.strides[-2] < b.strides[-1] for _, b, _ in specs} == {True, False}
    ranks = {(min(2, a.rank - 2), (b.rank > a.rank) - (b.rank < a.rank)) for a, b, _ in specs}
    assert ranks == {*itertools.product(range(3), (-1, 0, 1))} - {(0, -1)}
    ways = {a.size // a.dims[-1] // a.dims[-2] < y.size // y.dims[-1] // y.dims[-2] for a, _, y in specs}
    assert ways == {True, False}
    assert any(min(a.dims[-2], a.dims[-1], b.dims[-1]) > 64 for a, b, _ in specs)
    assert any(a.dims[-1] > 5000 for a, *_ in specs)


def test_every_kind_of_grouped_product_is_drawn() -> None:
    cases = [case_of(GROUPED_MATMUL, number) for number in range(300)]
    offsets = [arrays(case)["offsets"] for case in cases]
    rows = [case.specs["tokens"].dims[0] for case in cases]
    assert {bool((np.diff(ends) < 0).any()) for ends in offsets} == {*BOTH}
    assert any(min(ends) < 0 for ends in offsets)
    assert any(max(ends) > count for ends, count in zip(offsets, rows, strict=True))
    assert any(0 < max(ends) < count for ends, count in zip(offsets, rows, strict=True))
    assert any((np.diff(ends) == 0).any() for ends in offsets)
    assert {len(ends) > count for ends, count in zip(offsets, rows, strict=True)} == {*BOTH}
    assert max(rows) > 3 * 128
    strides = [case.specs["tokens"].strides for case in cases]
    assert {step[0] < step[1] for step in strides} == {*BOTH}
    assert any(step[1] == 1 and step[0] % 8 == 0 for step in strides)


def test_every_kind_of_ctc_loss_is_drawn() -> None:
    cases = [case_of(CTC_LOSS, number) for number in range(300)]
    given = [arrays(case) for case in cases]
    frames, labels = ([each[name] for each in given] for name in ("input_lengths", "target_lengths"))
    most = [(case.specs["log_probs"].dims[0], case.specs["targets"].dims[1]) for case in cases]
    for lengths, size in ((frames, [t for t, _ in most]), (labels, [s for _, s in most])):
        assert any(min(each) < 0 for each in lengths)
        assert any((each == 0).any() for each in lengths)
        assert any((each == n).any() for each, n in zip(lengths, size, strict=True))
        assert any(max(each) > n for each, n in zip(lengths, size, strict=True))
    assert {case.specs["targets"].dims[1] == 0 for case in cases} == {*BOTH}
    assert {case.specs["log_probs"].dims[2] == 1 for case in cases} == {*BOTH}
    operations: list[Any] = [case.operation for case in cases]
    assert {operation.blank > 0 for operation in operations} == {*BOTH}
    impossible = (bool(np.isinf(truth(case).wanted["losses"]).any()) for case in cases[:60])
    assert (not next(impossible)) in impossible


def test_every_kind_of_reduction_is_drawn() -> None:
    cases = [case_of(REDUCTION, number) for number in range(600)]
    operations: list[Any] = [case.operation for case in cases]
    reductions = [operation for operation in operations if isinstance(operation, Reduction)]
    assert {operation.mode for operation in reductions} == {*ReductionMode}
    assert {operation.axes is None for operation in reductions} == {True, False}
    assert {len(operation.axes or ()) for operation in reductions} >= {0, 1, 2, 3}
    assert any(min(operation.axes or (0,)) < 0 for operation in reductions)
    for name in ("keep_dims", "exclusive", "reverse"):
        assert {getattr(operation, name) for operation in operations if hasattr(operation, name)} == {*BOTH}
    assert any(case.specs["y"].dtype is not case.specs["x"].dtype for case in cases)
    softmax: list[Any] = [case_of(SOFTMAX, number).operation for number in range(50)]
    assert {operation.log for operation in softmax} == {*BOTH}
    assert {operation.axis < 0 for operation in softmax} == {*BOTH}


def test_every_kind_of_random_number_is_drawn() -> None:
    cases = [case_of(RANDOM, number) for number in range(400)]
    operations: list[Any] = [case.operation for case in cases]
    for name in ("low", "high", "mean", "deviation", "probability"):
        assert len({getattr(operation, name) for operation in operations if hasattr(operation, name)}) > 3
    states = np.array([arrays(case)["state"] for case in cases])
    assert {*states[:, 1] % 4} == {0, 1, 2, 3}
    assert {*np.sign(states[:, 0])} == {-1, 1}
    before = [(1 << 34) - int(start) for start in states[:, 1]]
    assert any(0 < left < case.specs["y"].size for left, case in zip(before, cases, strict=True))


def test_every_kind_of_attention_is_drawn() -> None:
    cases = [case_of(ATTENTION, number) for number in range(400)]
    operations: list[Any] = [case.operation for case in cases]
    assert {operation.causal for operation in operations} == {True, False}
    assert any(operation.scale is not None for operation in operations)
    specs = [case.specs for case in cases]
    assert {of["q"].dims[1] > of["k"].dims[1] for of in specs} == {True, False}
    assert {of["q"].dims[3] % 8 == of["v"].dims[3] % 8 == 0 for of in specs} == {True, False}
    biases = [of for of in specs if "bias" in of]
    assert len({tuple(size > 1 for size in of["bias"].dims[:3]) for of in biases}) == 8
    assert any(of["bias"].dtype is not of["q"].dtype for of in biases)
    assert {1, 63, 64, 65, 127, 128, 129} <= {of[name].dims[2] for of in specs for name in "qk"}
    kinds = {tuple(name in of for name in ("lengths_q", "lengths_kv")) for of in specs}
    assert kinds == set(itertools.product((True, False), repeat=2))
    for name in ("window_left", "window_right"):
        assert {getattr(operation, name) for operation in operations} >= {None, 0, 1, 40}
    slopes = {operation.slopes for operation in operations if operation.slopes is not None}
    assert {of == alibi_slopes(len(of)) for of in slopes} == {*BOTH}
    assert {operation.dropout for operation in operations} == {0.0, 0.1, 0.5, 0.9}
    lengths = [arrays(case)["lengths_kv"] for case in cases if "lengths_kv" in case.specs]
    assert min(map(np.min, lengths)) < 0
    assert max(map(np.max, lengths)) > 1000
    (cell,) = (c for c in cells(ATTENTION) if c.name == "attention-float16-rank_4-strided-heads_side_by_side")
    _, heads, _, features = cell.case(SEED).specs["q"].dims
    assert cell.case(SEED).specs["q"].strides[1:] == (features, heads * features, 1)


@each_family
def test_nothing_that_is_drawn_may_be_refused_but_what_cuda_refuses_by_name(family: str) -> None:
    graphs = [case_of(family, number).graph() for number in range(some(200))]
    refused = {engine for engine in ("cpu", "cuda") for graph in graphs if may_refuse(engine, graph)}
    kinds = {row.operation for row in ROWS if row.family == family}
    assert refused == ({"cuda"} if kinds <= PARTLY.keys() else set())
    chosen = pairwise(
        cells(family), lambda cell: (cell.row.operation, cell.dtype, cell.rank, cell.layout, cell.form)
    )
    assert any(cell.refused for cell in chosen) is ("cuda" in refused)


def test_norms_of_no_samples_round_nothing() -> None:
    operation: Any = BatchNormTraining(x="x", y="y")
    specs = dict.fromkeys(("x", "y"), TensorSpec.packed((0, 2, 3), "float32"))
    found = channel_norms._of_forward(operation, {"x": np.zeros((0, 2, 3))}, specs)
    assert {name: error.shape for name, error in found.items()} == {"y": (0, 2, 3)}
