"""The fuzzer of operations and their cells of the support matrix, on the CPU engine; and what they notice."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan, Evaluation, NumPy, exact
from cudnn_actor.engines.cpu.rounding import clipped, rounding_to
from cudnn_actor.engines.cuda.operations import PARTLY
from cudnn_actor.protocol import DType, Layout, TensorSpec, UnsupportedGraph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    FUNCTIONS,
    OPERATIONS,
    AdaptiveWindow,
    ArgReduction,
    AvgPool,
    BatchNormTraining,
    Convolution,
    Coordinates,
    Gather,
    GatherND,
    GridPadding,
    GroupedMatMul,
    GroupedMatMulBackwardWeights,
    GroupNorm,
    LayerNorm,
    LocalResponseNorm,
    MatMul,
    MaxPool,
    NearestRounding,
    Node,
    Pointwise,
    PointwiseMode,
    RandomBernoulli,
    RandomNormal,
    RandomUniform,
    Reduction,
    ReductionMode,
    ScatterElements,
    ScatterReduction,
    Softmax,
    TopK,
    Window,
    alibi_slopes,
)

from ..gpu.families import CONVOLUTION, FAMILIES
from ..gpu.fuzz import fuzz
from ..gpu.operations import ROWS, channel_norms
from ..gpu.operations.cases import arrays, error_over_bound, run, truth
from ..gpu.operations.drawing import MOST_VALUES, cells, draw
from ..gpu.operations.rows import Row, Sizes, Values
from ..whole import pairwise, some
from .fused_attention import MISTAKES as ATTENTION_MISTAKES
from .fused_attention import fused
from .refusals import may_refuse
from .test_matmul import RESULTS

SEED = 20
"""Of the tests that look for a mistake: its cases are known to show each of them."""
POOLING, NORMALIZATION, ATTENTION, MATMUL = "pooling", "normalization", "attention", "matmul"
REDUCTION, SOFTMAX = "reduction", "softmax"
POINTWISE, MOVEMENT, RANDOM, INDEXING = "pointwise", "movement", "random", "indexing"
SORTING, RESAMPLING, GRIDS = "sorting", "resampling", "grid_sampling"
EXACT = (MOVEMENT, RANDOM, SORTING)
CHANNELS, RESPONSES = "channel_norms", "response_norm"
GROUPED_MATMUL, CTC_LOSS = "grouped_matmul", "ctc_loss"
NAMES = [name for name in FAMILIES if name != CONVOLUTION]
BOTH = (False, True)
each_family = pytest.mark.parametrize("family", NAMES)
each_row = pytest.mark.parametrize("row", ROWS, ids=[row.operation.kind for row in ROWS])


def test_every_operation_has_a_row_or_is_fuzzed_as_part_of_a_convolution() -> None:
    parts = {kind for kind in OPERATIONS if issubclass(kind, Convolution)}
    assert {row.operation for row in ROWS} | parts == set(OPERATIONS)


def test_a_run_begins_no_case_after_its_time() -> None:
    assert fuzz(opened(CpuEngine(exact=True)), 5, range(50), family="sorting", seconds=0.0).ran == 1


@each_family
def test_random_problems_are_computed_in_float64_and_rounded_once(family: str) -> None:
    count = some(100 if family != ATTENTION else 40)
    report = fuzz(opened(CpuEngine(exact=True)), secrets.randbelow(1 << 32), range(count), family=family)
    assert not report.failures, str(report)
    assert report.ran == count
    # The order of float64 sums depends on the layout, so the truth is off by that much at the most.
    assert all(error < 1e-6 for label, error in report.largest.items() if "float64" not in label)


@each_row
def test_every_cell_is_computed_right(row: Row) -> None:
    """Some as large as on a GPU."""
    engine = opened(CpuEngine(exact=True))
    own = [cell for cell in cells(row.family) if cell.row is row]
    for number, cell in enumerate(
        pairwise(own, lambda cell: (cell.dtype, cell.rank, cell.layout, cell.form))
    ):
        small = number % (23 if row.family == ATTENTION else 5)
        case = cell.case(SEED, Sizes.TINY if small else Sizes.ODD)
        assert error_over_bound(case, run(engine, case).values, truth(case)) <= 1.0, f"{cell.name}: {case}"


@each_family
def test_there_are_at_least_a_hundred_cells_and_each_has_a_name_of_its_own(family: str) -> None:
    assert len({cell.name for cell in cells(family)}) == len(cells(family)) >= 100


@each_family
def test_a_case_is_the_same_whatever_was_drawn_before_it(family: str) -> None:
    assert str(draw(family, SEED, 7)) == str(draw(family, SEED, 7))
    assert str(draw(family, SEED, 7)) != str(draw(family, SEED, 8))
    assert str(draw(family, SEED, 7)) != str(draw(family, SEED + 1, 7))


@each_family
def test_everything_that_a_request_can_say_is_drawn(family: str) -> None:
    rows = [row for row in ROWS if row.family == family]
    cases = [draw(family, SEED, number) for number in range(80 * len(rows))]
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
    drawn = [draw("pooling", SEED, number).operation.window for number in range(300)]  # type: ignore[attr-defined]
    windows = [window for window in drawn if isinstance(window, Window)]
    assert any(isinstance(window, AdaptiveWindow) for window in drawn)
    assert any(window.pre_padding != window.post_padding for window in windows)
    assert any(max(window.dilation) > 1 for window in windows)
    assert any(window.stride == window.size for window in windows)
    assert any(step < size for w in windows for step, size in zip(w.stride, w.size, strict=True))
    assert {window.spatial_dims for window in windows} == {1, 2, 3}


def test_every_kind_of_product_is_drawn() -> None:
    cases = [draw(MATMUL, SEED, number) for number in range(300)]
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
    cases = [draw(GROUPED_MATMUL, SEED, number) for number in range(300)]
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
    cases = [draw(CTC_LOSS, SEED, number) for number in range(300)]
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
    wanted = [truth(case).wanted["losses"] for case in cases[:60]]
    assert {bool(np.isinf(losses).any()) for losses in wanted} == {*BOTH}


def test_every_kind_of_reduction_is_drawn() -> None:
    cases = [draw(REDUCTION, SEED, number) for number in range(600)]
    operations: list[Any] = [case.operation for case in cases]
    reductions = [operation for operation in operations if isinstance(operation, Reduction)]
    assert {operation.mode for operation in reductions} == {*ReductionMode}
    assert {operation.axes is None for operation in reductions} == {True, False}
    assert {len(operation.axes or ()) for operation in reductions} >= {0, 1, 2, 3}
    assert any(min(operation.axes or (0,)) < 0 for operation in reductions)
    for name in ("keep_dims", "exclusive", "reverse"):
        assert {getattr(operation, name) for operation in operations if hasattr(operation, name)} == {*BOTH}
    assert any(case.specs["y"].dtype is not case.specs["x"].dtype for case in cases)
    softmax: list[Any] = [draw(SOFTMAX, SEED, number).operation for number in range(50)]
    assert {operation.log for operation in softmax} == {*BOTH}
    assert {operation.axis < 0 for operation in softmax} == {*BOTH}


def test_every_kind_of_random_number_is_drawn() -> None:
    cases = [draw(RANDOM, SEED, number) for number in range(400)]
    operations: list[Any] = [case.operation for case in cases]
    for name in ("low", "high", "mean", "deviation", "probability"):
        assert len({getattr(operation, name) for operation in operations if hasattr(operation, name)}) > 3
    states = np.array([arrays(case)["state"] for case in cases])
    assert {*states[:, 1] % 4} == {0, 1, 2, 3}
    assert {*np.sign(states[:, 0])} == {-1, 1}
    before = [(1 << 34) - int(start) for start in states[:, 1]]
    assert any(0 < left < case.specs["y"].size for left, case in zip(before, cases, strict=True))


def test_every_kind_of_attention_is_drawn() -> None:
    cases = [draw(ATTENTION, SEED, number) for number in range(400)]
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
    graphs = [draw(family, SEED, number).graph() for number in range(some(200))]
    refused = {engine for engine in ("cpu", "cuda") for graph in graphs if may_refuse(engine, graph)}
    kinds = {row.operation for row in ROWS if row.family == family}
    assert refused == ({"cuda"} if kinds <= PARTLY.keys() else set())
    assert any(cell.refused for cell in cells(family)) is ("cuda" in refused)


# What the fuzzer is there to notice.

Store = Callable[[np.ndarray, np.ndarray], None]


class ByDefinition(CpuEngine):
    """The CPU engine with other arithmetic.

    Parameters
    ----------
    change
        Changes an operation.
    single
        Compute in float32 what has no float64 operand.
    store
        Stores results in an array; None to round them.
    """

    def __init__(
        self,
        change: Callable[[Any], Any] = lambda operation: operation,
        *,
        single: bool = False,
        store: Store | None = None,
    ) -> None:
        super().__init__(exact=True)  # its own plans take little to build: another takes their place
        self._change, self._single, self._store = change, single, store

    def changes(self, operation: Any) -> bool:
        """Whether an operation is computed in another way than by its definition."""
        return self._single or self._store is not None or bool(self._change(operation) != operation)

    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Any:
        plan = super().build(graph, workspace_limit=workspace_limit)
        (operation,) = graph.operations
        other = _Other(plan.tag, graph)
        other.__dict__.update(changed=self._change(operation), single=self._single, store=self._store)
        return other


class _Other(EvaluatedPlan):
    changed: Node
    single: bool
    store: Store | None

    def bind(self, workspace: Any) -> Evaluation:
        return _OtherEvaluation(self.graph, (frozenset(),), self)


class _OtherEvaluation(Evaluation):
    def __init__(self, graph: OperationGraph, last: Any, plan: _Other) -> None:
        super().__init__(graph, last)
        self.__dict__["plan"] = plan

    def _run(self, xp: NumPy, operation: Node, bound: Any, values: dict[int, Any]) -> None:
        plan: _Other = self.__dict__["plan"]
        wide = any(bound[uid].dtype == np.float64 for uid in operation.reads)
        floats = np.float32 if plan.single and not wide else np.float64
        for uid in operation.reads:
            values[uid] = exact(bound[uid])
            if values[uid].dtype == np.float64:
                values[uid] = values[uid].astype(floats)
        for uid, result in self.graph.evaluate(xp, plan.changed, values).items():
            _store(bound[uid], np.array(result), plan.store)


def _store(into: np.ndarray, result: np.ndarray, store: Store | None) -> None:
    if into.dtype.kind in "iub":
        into[...] = clipped(result, into.dtype)
    else:
        (store or rounding_to(into.dtype))(into, result.astype(np.float64))


@each_family
def test_arithmetic_in_float32_is_within_the_bounds(family: str) -> None:
    """With one seed: NumPy's float32 functions may be off by more than CUDA's, once in ten thousand cases."""
    count = some(150 if family != ATTENTION else 50)
    report = fuzz(opened(ByDefinition(single=True)), SEED, range(count), family=family)
    assert not report.failures, str(report)
    assert family in EXACT or any(report.largest.values()), "everything was exact: it compares nothing"


@pytest.mark.parametrize("tile", [4, 64])
def test_attention_as_a_gpu_computes_it_is_within_the_bounds(tile: int) -> None:
    """Online softmax over tiles of keys, in float32, with weights and gradients rounded to half types."""
    report = fuzz(opened(ByDefinition(fused(tile), single=True)), SEED, range(some(50)), family=ATTENTION)
    assert not report.failures, str(report)
    assert max(report.largest.values()) > 0.1, "the bounds say nothing"


def test_parts_of_heads_that_overflow_are_no_mistake() -> None:
    """Heads share keys: their parts of dk become infinity and -infinity. dk is too large for float16, too."""
    report = fuzz(opened(ByDefinition(fused(4), single=True)), 3906391363, [16], family=ATTENTION)
    assert not report.failures, str(report)


class Misreading(CpuEngine):
    """The CPU engine with a mistake in what it reads back of results."""

    def __init__(self, mistake: Callable[[np.ndarray], None]) -> None:
        super().__init__(exact=True)
        self._mistake = mistake

    def read(self, src: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        values = super().read(src, into)
        if values.dtype != np.uint8 or values.ndim > 1:  # the bytes of a whole buffer
            self._mistake(values)
        return values


class Misrunning(CpuEngine):
    """The CPU engine, which does something else with the buffers."""

    def __init__(self, mistake: Callable[[Any, list[np.ndarray], Callable[..., None]], None]) -> None:
        super().__init__(exact=True)
        self._mistake = mistake

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        self._mistake(plan, [*buffers], lambda given: super(Misrunning, self).execute(plan, given, scalars))


class Refusing(CpuEngine):
    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Any:
        raise UnsupportedGraph(engine="cpu", digest=graph.digest(), detail="it will not")


def one_value_missing(values: np.ndarray) -> None:
    values.flat[values.size // 2] = 78 if values.dtype.kind in "iu" else np.nan


def computed_in_half(values: np.ndarray) -> None:
    if values.dtype in (np.float32, np.float64):
        with np.errstate(over="ignore"):
            values[...] = values.astype(np.float16)


def next_number(values: np.ndarray) -> None:
    """One unit in the last place too large."""
    if values.dtype.kind not in "iub" and values.dtype.itemsize == 2:
        values[...] = np.nextafter(values, np.full_like(values, np.inf))


def lazy(plan: Any, buffers: list[np.ndarray], execute: Callable[..., None]) -> None:
    del plan, buffers, execute


def inputs_swapped(plan: Any, buffers: list[np.ndarray], execute: Callable[..., None]) -> None:
    first, second = buffers[:2]
    if _inputs(plan, buffers) > 1 and (first.shape, first.dtype) == (second.shape, second.dtype):
        buffers[:2] = second, first
    execute(buffers)


def first_input_zeroed(plan: Any, buffers: list[np.ndarray], execute: Callable[..., None]) -> None:
    execute(buffers)
    buffers[0].fill(0)


def _inputs(plan: Any, buffers: list[np.ndarray]) -> int:
    """How many of the buffers are read. A pointwise operation's plan may not say: it has one result."""
    return len(plan.graph.operations[0].reads) if hasattr(plan, "graph") else len(buffers) - 1


def gaps_overwritten(plan: Any, buffers: list[np.ndarray], execute: Callable[..., None]) -> None:
    """As if each output were packed memory."""
    for number in range(_inputs(plan, buffers), len(buffers)):
        out = buffers[number]
        reach = sum((size - 1) * step for size, step in zip(out.shape, out.strides, strict=True))
        span = np.lib.stride_tricks.as_strided(out, (1 + reach // out.itemsize,), (out.itemsize,))
        span.fill(1)
    execute(buffers)


def transposed(plan: Any, buffers: list[np.ndarray], execute: Callable[..., None]) -> None:
    """An output's elements as they lie in memory, taken for another order of dims."""
    execute(buffers)
    for number in range(_inputs(plan, buffers), len(buffers)):
        out = buffers[number]
        out[...] = out.T.reshape(out.shape).copy()


def truncated(into: np.ndarray, result: np.ndarray) -> None:
    """Half types rounded towards zero: the upper half of a float32, say."""
    rounding_to(into.dtype)(into, result.copy())
    if into.dtype.itemsize == 2:
        away = np.abs(into.astype(np.float64)) > np.abs(result)
        into[away] = np.nextafter(into[away], np.zeros_like(into[away]))


def attribute(name: str, other: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Changes an attribute of the operations that have it."""

    def change(operation: Any) -> Any:
        if not hasattr(operation, name):
            return operation
        return msgspec.structs.replace(operation, **{name: other(getattr(operation, name))})

    return change


def moved(window: Any) -> Any:
    """Windows begin an element earlier, as many of them as before."""
    if isinstance(window, AdaptiveWindow) or not window.post_padding[0]:
        return window
    pre, post = window.pre_padding, window.post_padding
    return msgspec.structs.replace(
        window, pre_padding=(pre[0] + 1, *pre[1:]), post_padding=(post[0] - 1, *post[1:])
    )


class OnePassNorm(LayerNorm[int], frozen=True, kw_only=True):
    """The variance as the difference of two large numbers, in float32."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        x = values["x"].astype(np.float32)
        axes = tuple(range(self.axis % x.ndim, x.ndim))
        mean = x.mean(axis=axes, keepdims=True)
        variance = (x * x).mean(axis=axes, keepdims=True) - mean * mean
        inverse = 1 / np.sqrt(variance + self.epsilon)
        y = (x - mean) * inverse * values.get("scale", 1.0) + values.get("bias", 0.0)
        return {"y": y, "mean": mean, "inverse_deviation": inverse}


class NextGroup(GroupNorm[int], frozen=True, kw_only=True):
    """The scales of a group's channels in the wrong order."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        return super().evaluate(xp, {n: v[::-1] if v.ndim == 1 else v for n, v in values.items()}, specs)


class OtherSide(LocalResponseNorm[int], frozen=True, kw_only=True):
    """Of an even window, the larger half before a channel."""

    @property
    def reach(self) -> tuple[int, int]:
        before, after = super().reach
        return after, before


class LastOfEquals(MaxPool[int], frozen=True, kw_only=True):
    """The index of the last of a window's equal elements."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        best, window = values["x"], self.window
        index = np.arange(best.size).reshape(best.shape)
        for axis in reversed(range(window.spatial_dims)):
            count = specs["y"].dims[2 + axis]
            seen = (window.seen(xp, axis, a, v, count) for a, v in ((best, 0), (index, -1)))
            (best, index), *others = zip(*seen, strict=True)
            for value, place in others:
                taken = (place >= 0) & ((index < 0) | ~(value < best))
                best, index = np.where(taken, value, best), np.where(taken, place, index)
        return {"y": best, "index": index}


class NoNaN(MaxPool[int], frozen=True, kw_only=True):
    """NaN is smaller than any number."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        x = values["x"]
        return super().evaluate(
            xp, {"x": np.where(np.isnan(x), -math.inf, x) if x.dtype.kind == "f" else x}, specs
        )


class InHalf(AvgPool[int], frozen=True, kw_only=True):
    """Sums rounded to float16 before they are divided."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        whole = msgspec.structs.replace(self, include_padding=True)
        size = math.prod(self.window.size) if isinstance(self.window, Window) else 1
        counts = AvgPool.evaluate(self, xp, values, specs)["y"]
        sums = AvgPool.evaluate(whole, xp, values, specs)["y"] * size
        with np.errstate(all="ignore"):
            return {"y": np.where(sums == 0, counts, sums.astype(np.float16) * (counts / sums))}


class AsTheyAre(GroupedMatMul[int], frozen=True, kw_only=True):
    """Rows from one offset to the next, in any order of those; the last expert has all that are left."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        offsets = np.maximum.accumulate(values["offsets"])
        offsets[-1] = len(values["tokens"])
        return super().evaluate(xp, values | {"offsets": offsets}, specs)


class OtherRows(GroupedMatMulBackwardWeights[int], frozen=True, kw_only=True):
    """The rows of an expert that has none are those of the one before."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        found = super().evaluate(xp, values, specs)["dweights"]
        for expert in range(1, len(found)):
            if not found[expert].any():
                found[expert] = found[expert - 1]
        return {"dweights": found}


class ShortSums(MatMul[int], frozen=True, kw_only=True):
    """The last product of each sum is missing."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        cut = {"a": values["a"][..., :-1], "b": values["b"][..., :-1, :]}
        return super().evaluate(xp, cut, specs)


class InTF32(MatMul[int], frozen=True, kw_only=True):
    """Operands cut off to the 11 bits that TF32 has."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        def cut(values: Any) -> Any:
            bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
            return bits.view(np.float32).astype(np.float64)

        floats = values["a"].dtype.kind == "f"
        return super().evaluate(xp, {n: cut(v) if floats else v for n, v in values.items()}, specs)


class SumsInHalf(MatMul[int], frozen=True, kw_only=True):
    """Partial sums of two parts, each rounded to bfloat16."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        if values["a"].dtype.kind != "f":
            return super().evaluate(xp, values, specs)
        parts = ({"a": values["a"][..., part::2], "b": values["b"][..., part::2, :]} for part in range(2))
        sums = (super(SumsInHalf, self).evaluate(xp, part, specs)["y"] for part in parts)
        return {"y": sum(each.astype(DType.BFLOAT16.numpy).astype(np.float64) for each in sums)}


class FirstOfBatch(MatMul[int], frozen=True, kw_only=True):
    """All of a batch is multiplied with its first b."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        b = values["b"]
        first = b[(0,) * (b.ndim - 2)]
        return {
            "y": np.broadcast_to(super().evaluate(xp, values | {"b": first}, specs)["y"], specs["y"].dims)
        }


class LastOfEqualPlaces(ArgReduction[int], frozen=True, kw_only=True):
    """The last of equal elements."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        x = np.flip(values["x"], self.axis)
        found = super().evaluate(xp, {"x": x}, specs)["y"]
        return {"y": x.shape[self.axis] - 1 - found}


class LosingNaN(Reduction[int], frozen=True, kw_only=True):
    """The largest of what is no NaN, as `fmax` finds it."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        x = values["x"]
        if self.mode.selects and x.dtype.kind == "f":
            other = {ReductionMode.MIN: math.inf, ReductionMode.MAX: -math.inf}.get(self.mode, 0.0)
            x = np.where(np.isnan(x), other, x)
        return super().evaluate(xp, {"x": x}, specs)


class NextOffset(RandomUniform[int], frozen=True, kw_only=True):
    """The numbers one further."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        return super().evaluate(xp, {"state": values["state"] + np.array([0, 1])}, specs)


class Wrapping(Gather[int], frozen=True, kw_only=True):
    """An index out of range counts modulo the dim."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        size = values["x"].shape[self.axis]
        return super().evaluate(xp, values | {"indices": values["indices"] % size}, specs)


class FromTheStart(GatherND[int], frozen=True, kw_only=True):
    """No index counts from the end."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        return super().evaluate(xp, values | {"indices": np.maximum(values["indices"], 0)}, specs)


class FirstWins(ScatterElements[int], frozen=True, kw_only=True):
    """Of several updates of one element the first."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        if self.reduction is ScatterReduction.NONE:
            values = values | {name: np.flip(values[name], self.axis) for name in ("indices", "updates")}
        return super().evaluate(xp, values, specs)


class LastOfEqualElements(TopK[int], frozen=True, kw_only=True):
    """Of equal elements the higher place comes first."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        x = np.flip(values["x"], self.axis)
        found = super().evaluate(xp, {"x": x}, specs)
        return found | {"indices": x.shape[self.axis] - 1 - found["indices"]}


class NaNLast(TopK[int], frozen=True, kw_only=True):
    """NaN is the last of the largest, too."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        x = values["x"]
        if self.largest and x.dtype.kind == "f":
            x = np.where(np.isnan(x), -np.inf, x)
        return super().evaluate(xp, {"x": x}, specs)


def rounded_down(_: NearestRounding) -> NearestRounding:
    return NearestRounding.FLOOR


def elsewhere(coordinates: Coordinates) -> Coordinates:
    """Places that are often the same."""
    changed = {
        Coordinates.HALF_PIXEL_SYMMETRIC: Coordinates.HALF_PIXEL,
        Coordinates.PYTORCH_HALF_PIXEL: Coordinates.HALF_PIXEL,
        Coordinates.ASYMMETRIC: Coordinates.ALIGN_CORNERS,
    }
    return changed.get(coordinates, coordinates)


class InSingle(RandomNormal[int], frozen=True, kw_only=True):
    """Rounded to float32 first."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        y = super().evaluate(xp, values, specs)["y"]
        return {"y": y.astype(np.float32).astype(np.float64)}


class NoCarry(RandomBernoulli[int], frozen=True, kw_only=True):
    """Blocks of 32 bits."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        state = values["state"] & np.array([-1, (1 << 34) - 1])
        return super().evaluate(xp, {"state": state}, specs)


class Unshifted(Softmax[int], frozen=True, kw_only=True):
    """Exponentials of the elements themselves, which overflow, and vanish."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        powers = np.exp(values["x"].astype(np.float32))
        y = powers / powers.sum(axis=self.axis, keepdims=True)
        return {"y": np.log(y) if self.log else y}


def other_modes(operation: Any) -> Any:
    """Functions of the same operands that are nearly the same."""
    swapped = {
        PointwiseMode.MOD: PointwiseMode.FMOD,
        PointwiseMode.GE: PointwiseMode.GT,
        PointwiseMode.GELU: PointwiseMode.GELU_TANH,
        PointwiseMode.CEIL: PointwiseMode.ROUND,
        PointwiseMode.LOGICAL_XOR: PointwiseMode.LOGICAL_OR,
        PointwiseMode.EXPM1: PointwiseMode.EXP,
        PointwiseMode.SINH: PointwiseMode.ASINH,
    }
    return msgspec.structs.replace(operation, mode=swapped.get(operation.mode, operation.mode))


class Saturating(Pointwise[int], frozen=True, kw_only=True):
    """Bits that are cut off saturate the result, and min and max ignore NaN."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        floats = any(value.dtype.kind == "f" for value in values.values())
        if floats and self.mode in (PointwiseMode.MIN, PointwiseMode.MAX):
            values = dict(zip(values, np.broadcast_arrays(*values.values()), strict=True))
            a, b = values.values()
            values = {"a": np.where(a == a, a, b), "b": np.where(b == b, b, a)}  # noqa: PLR0124
        if not FUNCTIONS[self.mode].bits:
            return super().evaluate(xp, values, specs)
        wide = {"result": TensorSpec.packed(specs["result"].dims, DType.INT64)}
        return super().evaluate(xp, values, wide)


def other_reduction(reduction: ScatterReduction) -> ScatterReduction:
    """Sums for the largest, and updates for sums."""
    changed = {
        ScatterReduction.MAX: ScatterReduction.ADD,
        ScatterReduction.ADD: ScatterReduction.NONE,
        ScatterReduction.MUL: ScatterReduction.NONE,
    }
    return changed.get(reduction, reduction)


def instead(kind: type[Any], other: type[Any]) -> Callable[[Any], Any]:
    """One class of operations computed as another."""

    def change(operation: Any) -> Any:
        if type(operation) is not kind:
            return operation
        return other(**{name: getattr(operation, name) for name in kind.__struct_fields__})

    return change


MISTAKES: list[tuple[str, str, Callable[[], CpuEngine], int, int]] = [
    ("one value missing", POOLING, lambda: Misreading(one_value_missing), 40, 38),
    ("one value missing", NORMALIZATION, lambda: Misreading(one_value_missing), 40, 33),
    ("computed in half", POOLING, lambda: Misreading(computed_in_half), 40, 4),
    ("computed in half", NORMALIZATION, lambda: Misreading(computed_in_half), 40, 14),
    ("the next number", POOLING, lambda: Misreading(next_number), 40, 10),
    ("the next number", NORMALIZATION, lambda: Misreading(next_number), 40, 10),
    ("lazy", POOLING, lambda: Misrunning(lazy), 40, 38),
    ("lazy", NORMALIZATION, lambda: Misrunning(lazy), 40, 34),
    ("inputs swapped", NORMALIZATION, lambda: Misrunning(inputs_swapped), 40, 14),
    ("an input overwritten", POOLING, lambda: Misrunning(first_input_zeroed), 40, 36),
    ("an input overwritten", NORMALIZATION, lambda: Misrunning(first_input_zeroed), 40, 37),
    ("gaps overwritten", POOLING, lambda: Misrunning(gaps_overwritten), 40, 7),
    ("gaps overwritten", NORMALIZATION, lambda: Misrunning(gaps_overwritten), 40, 5),
    ("transposed", POOLING, lambda: Misrunning(transposed), 40, 18),
    ("transposed", NORMALIZATION, lambda: Misrunning(transposed), 40, 9),
    ("truncated", POOLING, lambda: ByDefinition(store=truncated), 40, 3),
    ("truncated", NORMALIZATION, lambda: ByDefinition(store=truncated), 40, 6),
    ("refusing", POOLING, Refusing, 10, 10),
    ("refusing", NORMALIZATION, Refusing, 10, 10),
    ("windows moved", POOLING, lambda: ByDefinition(attribute("window", moved)), 40, 6),
    ("padding counts", POOLING, lambda: ByDefinition(attribute("include_padding", lambda on: not on)), 40, 3),
    ("another exponent", POOLING, lambda: ByDefinition(attribute("p", lambda p: 1.01 * p)), 40, 3),
    ("last of equals", POOLING, lambda: ByDefinition(instead(MaxPool, LastOfEquals)), 150, 6),
    ("NaN ignored", POOLING, lambda: ByDefinition(instead(MaxPool, NoNaN)), 200, 1),
    ("sums in half", POOLING, lambda: ByDefinition(instead(AvgPool, InHalf)), 150, 8),
    (
        "another epsilon",
        NORMALIZATION,
        lambda: ByDefinition(attribute("epsilon", lambda e: 1.01 * e)),
        150,
        20,
    ),
    ("one pass", NORMALIZATION, lambda: ByDefinition(instead(LayerNorm, OnePassNorm)), 150, 7),
    ("one value missing", CHANNELS, lambda: Misreading(one_value_missing), 40, 37),
    ("computed in half", CHANNELS, lambda: Misreading(computed_in_half), 40, 17),
    ("computed in half", RESPONSES, lambda: Misreading(computed_in_half), 40, 9),
    ("the next number", CHANNELS, lambda: Misreading(next_number), 40, 13),
    ("the next number", RESPONSES, lambda: Misreading(next_number), 40, 24),
    ("lazy", CHANNELS, lambda: Misrunning(lazy), 40, 37),
    ("inputs swapped", CHANNELS, lambda: Misrunning(inputs_swapped), 40, 13),
    ("inputs swapped", RESPONSES, lambda: Misrunning(inputs_swapped), 40, 12),
    ("gaps overwritten", CHANNELS, lambda: Misrunning(gaps_overwritten), 40, 10),
    ("transposed", CHANNELS, lambda: Misrunning(transposed), 40, 22),
    ("truncated", CHANNELS, lambda: ByDefinition(store=truncated), 40, 11),
    ("another epsilon", CHANNELS, lambda: ByDefinition(attribute("epsilon", lambda e: 1.01 * e)), 100, 13),
    ("another momentum", CHANNELS, lambda: ByDefinition(attribute("momentum", lambda m: 1 - m)), 150, 6),
    ("another variance", CHANNELS, lambda: ByDefinition(attribute("unbiased", lambda on: not on)), 150, 3),
    ("other groups", CHANNELS, lambda: ByDefinition(instead(GroupNorm, NextGroup)), 100, 4),
    ("another size", RESPONSES, lambda: ByDefinition(attribute("size", lambda size: size + 1)), 40, 28),
    ("another side", RESPONSES, lambda: ByDefinition(instead(LocalResponseNorm, OtherSide)), 80, 8),
    ("one value missing", ATTENTION, lambda: Misreading(one_value_missing), 10, 8),
    ("computed in half", ATTENTION, lambda: Misreading(computed_in_half), 10, 4),
    ("the next number", ATTENTION, lambda: Misreading(next_number), 10, 4),
    ("lazy", ATTENTION, lambda: Misrunning(lazy), 10, 8),
    ("an input overwritten", ATTENTION, lambda: Misrunning(first_input_zeroed), 10, 8),
    ("gaps overwritten", ATTENTION, lambda: Misrunning(gaps_overwritten), 24, 3),
    ("transposed", ATTENTION, lambda: Misrunning(transposed), 10, 7),
    ("truncated", ATTENTION, lambda: ByDefinition(store=truncated), 16, 3),
    ("refusing", ATTENTION, Refusing, 10, 10),
    *((name, ATTENTION, partial(ByDefinition, change), 24, 2) for name, change in ATTENTION_MISTAKES.items()),
    ("one value missing", MATMUL, lambda: Misreading(one_value_missing), 40, 35),
    ("computed in half", MATMUL, lambda: Misreading(computed_in_half), 40, 6),
    ("the next number", MATMUL, lambda: Misreading(next_number), 40, 4),
    ("lazy", MATMUL, lambda: Misrunning(lazy), 40, 38),
    ("inputs swapped", MATMUL, lambda: Misrunning(inputs_swapped), 150, 2),
    ("an input overwritten", MATMUL, lambda: Misrunning(first_input_zeroed), 40, 38),
    ("gaps overwritten", MATMUL, lambda: Misrunning(gaps_overwritten), 40, 8),
    ("transposed", MATMUL, lambda: Misrunning(transposed), 40, 18),
    ("truncated", MATMUL, lambda: ByDefinition(store=truncated), 100, 2),
    ("refusing", MATMUL, Refusing, 10, 10),
    ("a product missing", MATMUL, lambda: ByDefinition(instead(MatMul, ShortSums)), 40, 30),
    ("TF32", MATMUL, lambda: ByDefinition(instead(MatMul, InTF32)), 40, 6),
    ("sums in half", MATMUL, lambda: ByDefinition(instead(MatMul, SumsInHalf)), 40, 8),
    ("the first of a batch", MATMUL, lambda: ByDefinition(instead(MatMul, FirstOfBatch)), 40, 7),
    ("one value missing", CTC_LOSS, lambda: Misreading(one_value_missing), 40, 30),
    ("computed in half", CTC_LOSS, lambda: Misreading(computed_in_half), 40, 15),
    ("the next number", CTC_LOSS, lambda: Misreading(next_number), 40, 5),
    ("lazy", CTC_LOSS, lambda: Misrunning(lazy), 40, 30),
    ("gaps overwritten", CTC_LOSS, lambda: Misrunning(gaps_overwritten), 40, 5),
    ("another blank", CTC_LOSS, lambda: ByDefinition(attribute("blank", lambda blank: blank // 2)), 40, 10),
    (
        "other infinities",
        CTC_LOSS,
        lambda: ByDefinition(attribute("zero_infinity", lambda on: not on)),
        40,
        9,
    ),
    ("one value missing", GROUPED_MATMUL, lambda: Misreading(one_value_missing), 40, 36),
    ("computed in half", GROUPED_MATMUL, lambda: Misreading(computed_in_half), 40, 10),
    ("the next number", GROUPED_MATMUL, lambda: Misreading(next_number), 40, 6),
    ("an input overwritten", GROUPED_MATMUL, lambda: Misrunning(first_input_zeroed), 40, 36),
    ("gaps overwritten", GROUPED_MATMUL, lambda: Misrunning(gaps_overwritten), 40, 5),
    ("transposed", GROUPED_MATMUL, lambda: Misrunning(transposed), 40, 14),
    ("truncated", GROUPED_MATMUL, lambda: ByDefinition(store=truncated), 40, 3),
    ("as they are", GROUPED_MATMUL, lambda: ByDefinition(instead(GroupedMatMul, AsTheyAre)), 60, 7),
    (
        "other rows",
        GROUPED_MATMUL,
        lambda: ByDefinition(instead(GroupedMatMulBackwardWeights, OtherRows)),
        60,
        5,
    ),
    ("one value missing", REDUCTION, lambda: Misreading(one_value_missing), 40, 38),
    ("one value missing", SOFTMAX, lambda: Misreading(one_value_missing), 40, 38),
    ("computed in half", REDUCTION, lambda: Misreading(computed_in_half), 40, 6),
    ("computed in half", SOFTMAX, lambda: Misreading(computed_in_half), 40, 12),
    ("the next number", REDUCTION, lambda: Misreading(next_number), 40, 5),
    ("the next number", SOFTMAX, lambda: Misreading(next_number), 40, 15),
    ("lazy", REDUCTION, lambda: Misrunning(lazy), 40, 38),
    ("lazy", SOFTMAX, lambda: Misrunning(lazy), 40, 38),
    ("inputs swapped", SOFTMAX, lambda: Misrunning(inputs_swapped), 40, 15),
    ("an input overwritten", REDUCTION, lambda: Misrunning(first_input_zeroed), 40, 38),
    ("gaps overwritten", REDUCTION, lambda: Misrunning(gaps_overwritten), 40, 5),
    ("gaps overwritten", SOFTMAX, lambda: Misrunning(gaps_overwritten), 40, 3),
    ("transposed", REDUCTION, lambda: Misrunning(transposed), 40, 10),
    ("transposed", SOFTMAX, lambda: Misrunning(transposed), 40, 14),
    ("truncated", REDUCTION, lambda: ByDefinition(store=truncated), 40, 2),
    ("truncated", SOFTMAX, lambda: ByDefinition(store=truncated), 40, 11),
    ("refusing", REDUCTION, Refusing, 10, 10),
    ("refusing", SOFTMAX, Refusing, 10, 10),
    ("forwards", REDUCTION, lambda: ByDefinition(attribute("reverse", lambda on: not on)), 60, 10),
    ("inclusive", REDUCTION, lambda: ByDefinition(attribute("exclusive", lambda on: not on)), 60, 15),
    ("last of equals", REDUCTION, lambda: ByDefinition(instead(ArgReduction, LastOfEqualPlaces)), 100, 15),
    ("NaN lost", REDUCTION, lambda: ByDefinition(instead(Reduction, LosingNaN)), 600, 4),
    ("no logarithm", SOFTMAX, lambda: ByDefinition(attribute("log", lambda on: not on)), 40, 36),
    ("another axis", SOFTMAX, lambda: ByDefinition(attribute("axis", lambda _: 0)), 40, 17),
    ("unshifted", SOFTMAX, lambda: ByDefinition(instead(Softmax, Unshifted)), 100, 12),
    ("one value missing", RANDOM, lambda: Misreading(one_value_missing), 40, 35),
    ("computed in half", RANDOM, lambda: Misreading(computed_in_half), 40, 6),
    ("the next number", RANDOM, lambda: Misreading(next_number), 40, 6),
    ("lazy", RANDOM, lambda: Misrunning(lazy), 40, 35),
    ("an input overwritten", RANDOM, lambda: Misrunning(first_input_zeroed), 40, 35),
    ("gaps overwritten", RANDOM, lambda: Misrunning(gaps_overwritten), 40, 3),
    ("truncated", RANDOM, lambda: ByDefinition(store=truncated), 40, 4),
    ("refusing", RANDOM, Refusing, 10, 10),
    ("the next offset", RANDOM, lambda: ByDefinition(instead(RandomUniform, NextOffset)), 40, 6),
    ("in single", RANDOM, lambda: ByDefinition(instead(RandomNormal, InSingle)), 60, 2),
    ("blocks of 32 bits", RANDOM, lambda: ByDefinition(instead(RandomBernoulli, NoCarry)), 60, 3),
    ("another deviation", RANDOM, lambda: ByDefinition(attribute("deviation", lambda d: d + 0.01)), 60, 6),
    ("one value missing", INDEXING, lambda: Misreading(one_value_missing), 40, 30),
    ("lazy", INDEXING, lambda: Misrunning(lazy), 40, 30),
    ("an input overwritten", INDEXING, lambda: Misrunning(first_input_zeroed), 40, 30),
    ("gaps overwritten", INDEXING, lambda: Misrunning(gaps_overwritten), 60, 3),
    ("transposed", INDEXING, lambda: Misrunning(transposed), 40, 5),
    ("refusing", INDEXING, Refusing, 10, 10),
    ("wrapping", INDEXING, lambda: ByDefinition(instead(Gather, Wrapping)), 250, 3),
    ("the first wins", INDEXING, lambda: ByDefinition(instead(ScatterElements, FirstWins)), 250, 2),
    ("no reduction", INDEXING, lambda: ByDefinition(attribute("reduction", other_reduction)), 40, 5),
    ("from the start", INDEXING, lambda: ByDefinition(instead(GatherND, FromTheStart)), 120, 4),
    ("one value missing", SORTING, lambda: Misreading(one_value_missing), 40, 30),
    ("lazy", SORTING, lambda: Misrunning(lazy), 40, 30),
    ("an input overwritten", SORTING, lambda: Misrunning(first_input_zeroed), 40, 30),
    ("gaps overwritten", SORTING, lambda: Misrunning(gaps_overwritten), 60, 3),
    ("transposed", SORTING, lambda: Misrunning(transposed), 40, 5),
    ("refusing", SORTING, Refusing, 10, 10),
    ("the other end", SORTING, lambda: ByDefinition(attribute("largest", lambda on: not on)), 40, 20),
    ("by place", SORTING, lambda: ByDefinition(attribute("in_order", lambda _: False)), 40, 10),
    ("last of equals", SORTING, lambda: ByDefinition(instead(TopK, LastOfEqualElements)), 40, 5),
    ("NaN last", SORTING, lambda: ByDefinition(instead(TopK, NaNLast)), 150, 1),
    ("one value missing", RESAMPLING, lambda: Misreading(one_value_missing), 40, 30),
    ("computed in half", RESAMPLING, lambda: Misreading(computed_in_half), 40, 5),
    ("the next number", RESAMPLING, lambda: Misreading(next_number), 40, 4),
    ("lazy", RESAMPLING, lambda: Misrunning(lazy), 40, 30),
    ("an input overwritten", RESAMPLING, lambda: Misrunning(first_input_zeroed), 40, 30),
    ("gaps overwritten", RESAMPLING, lambda: Misrunning(gaps_overwritten), 60, 3),
    ("transposed", RESAMPLING, lambda: Misrunning(transposed), 40, 5),
    ("truncated", RESAMPLING, lambda: ByDefinition(store=truncated), 40, 2),
    ("refusing", RESAMPLING, Refusing, 10, 10),
    (
        "other coordinates",
        RESAMPLING,
        lambda: ByDefinition(attribute("coordinates", elsewhere)),
        60,
        5,
    ),
    ("aliased", RESAMPLING, lambda: ByDefinition(attribute("antialias", lambda _: False)), 60, 4),
    ("outside", RESAMPLING, lambda: ByDefinition(attribute("exclude_outside", lambda on: not on)), 60, 5),
    (
        "rounded down",
        RESAMPLING,
        lambda: ByDefinition(attribute("rounding", rounded_down)),
        60,
        3,
    ),
    ("one value missing", GRIDS, lambda: Misreading(one_value_missing), 40, 30),
    ("computed in half", GRIDS, lambda: Misreading(computed_in_half), 40, 5),
    ("lazy", GRIDS, lambda: Misrunning(lazy), 40, 30),
    ("gaps overwritten", GRIDS, lambda: Misrunning(gaps_overwritten), 60, 3),
    ("other corners", GRIDS, lambda: ByDefinition(attribute("align_corners", lambda on: not on)), 40, 20),
    ("always zeros", GRIDS, lambda: ByDefinition(attribute("padding", lambda _: GridPadding.ZEROS)), 40, 10),
    ("one value missing", POINTWISE, lambda: Misreading(one_value_missing), 40, 39),
    ("computed in half", POINTWISE, lambda: Misreading(computed_in_half), 40, 5),
    ("the next number", POINTWISE, lambda: Misreading(next_number), 40, 16),
    ("lazy", POINTWISE, lambda: Misrunning(lazy), 40, 39),
    ("inputs swapped", POINTWISE, lambda: Misrunning(inputs_swapped), 100, 3),
    ("an input overwritten", POINTWISE, lambda: Misrunning(first_input_zeroed), 40, 39),
    ("gaps overwritten", POINTWISE, lambda: Misrunning(gaps_overwritten), 40, 13),
    ("transposed", POINTWISE, lambda: Misrunning(transposed), 40, 17),
    ("truncated", POINTWISE, lambda: ByDefinition(store=truncated), 40, 6),
    ("refusing", POINTWISE, Refusing, 10, 10),
    ("other modes", POINTWISE, lambda: ByDefinition(other_modes), 150, 11),
    ("saturating bits", POINTWISE, lambda: ByDefinition(instead(Pointwise, Saturating)), 250, 3),
    (
        "weights in bfloat16",
        ATTENTION,
        lambda: ByDefinition(fused(64, weights=DType.BFLOAT16), single=True),
        40,
        2,
    ),
]
"""Of each: the family, how many cases are run, and how many of them show it at least."""


NOTICED_HERE = pairwise(MISTAKES, lambda mistake: mistake[:2], together=1)
"""Each mistake in a family that has it, and each family with a mistake: all share what compares."""


@pytest.mark.parametrize(
    ("family", "engine", "count", "least"),
    [mistake[1:] for mistake in NOTICED_HERE],
    ids=[f"{name}, {family}" for name, family, *_ in NOTICED_HERE],
)
def test_a_mistake_is_noticed(family: str, engine: Callable[[], CpuEngine], count: int, least: int) -> None:
    """Of the cases, those with an operation that the mistake is about: nothing is wrong with the others."""
    made, numbers = opened(engine()), [*range(count)]
    if isinstance(made, ByDefinition):
        numbers = [number for number in numbers if made.changes(draw(family, SEED, number).operation)]
    report = fuzz(made, SEED, numbers, family=family)
    assert len(report.failures) >= least
    number, text = next(iter(report.failures.items()))
    again = f"python -m tests.gpu.fuzz --seed {SEED} --only {number} --engine cpu --operations {family}"
    assert again in text
    assert all(any(word in text for word in NOTICED) for text in report.failures.values()), str(report)


NOTICED = ("times its bound", "where it must not", "refused: it will not")
"""What is said of a mistake; anything else would be a mistake of this test."""


def opened(engine: CpuEngine) -> CpuEngine:
    engine.open()
    return engine


def test_norms_of_no_samples_round_nothing() -> None:
    operation: Any = BatchNormTraining(x="x", y="y")
    specs = dict.fromkeys(("x", "y"), TensorSpec.packed((0, 2, 3), "float32"))
    found = channel_norms._of_forward(operation, {"x": np.zeros((0, 2, 3))}, specs)
    assert {name: error.shape for name, error in found.items()} == {"y": (0, 2, 3)}
