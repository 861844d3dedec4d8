"""The fuzzer of graphs on the CPU engine: it passes, it notices what it is there for, and shows it small."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing.resource_tracker
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cpu.exact.evaluation import NumPy, exact
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.protocol import DType, GraphBuilder, Layout, TensorRole
from cudnn_actor.protocol.operations import (
    Attention,
    AttentionBackward,
    AvgPool,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    Cumulative,
    LayerNorm,
    Pointwise,
    PointwiseMode,
    Randomness,
    Reduction,
    ReductionMode,
    RMSNorm,
    Slice,
    Softmax,
)

from ...gpu.choices import Choices
from ...gpu.graphs import fuzzing
from ...gpu.graphs.bounds import Truth, error_over_bound, truth
from ...gpu.graphs.drawing import MOST_OPERATIONS, draw
from ...gpu.graphs.fuzzing import GraphReport, fuzz_graphs, fuzz_in_process, fuzz_in_processes
from ...gpu.graphs.moves import (
    DRAWN,
    FUNCTION_NAMES,
    OF_OTHER_MOVES,
    argument_of,
    operation_of,
    parameters_of,
)
from ...gpu.graphs.programs import Built, Call, Input, Of, Program, operands_of
from ...gpu.graphs.running import run
from ...gpu.graphs.shrinking import shrunk
from ...gpu.graphs.sketch import Refused, Sketch
from ...gpu.operations import ROWS
from ...gpu.operations.cases import OperationCase
from ...gpu.operations.drawing import draw as draw_operation
from ...gpu.operations.rows import Row
from ...in_one_test import cases_in_one_test
from ...whole import some
from ..mistakes import attribute
from ..remembered import read_only
from ..single_precision import SinglePrecision

SEED = 38
"""Of the tests that look for a mistake: its graphs are known to show each of them."""


@pytest.fixture(scope="module", autouse=True)
def resource_tracker() -> None:
    """Of multiprocessing; it stays as long as the interpreter, so it is there before leaks are looked for."""
    multiprocessing.resource_tracker.ensure_running()


def opened(engine: CpuEngine) -> CpuEngine:
    engine.open()
    return engine


@functools.cache
def program_of(number: int) -> Program:
    return draw(SEED, number)


@functools.cache
def built_of(number: int) -> Built:
    built = program_of(number).build()
    return built._replace(values=read_only(built.values))


@functools.cache
def truth_of(number: int) -> Truth:
    graph, values, _ = built_of(number)
    return Truth(*read_only(truth(graph, values)))


ENOUGH = range(100)
"""Programs that have everything that can be drawn."""


def programs() -> list[Program]:
    return [*map(program_of, ENOUGH)]


def test_the_cpu_engine_computes_what_the_operations_define() -> None:
    count = some(45)
    report = fuzz_graphs(opened(CpuEngine(exact=True)), secrets.randbelow(1 << 32), range(count))
    assert not report.failures, str(report)
    assert report.ran == count
    assert report.exact > 0.6 * count, "but for sums of float64 in another order"
    assert report.compared / report.ran > 0.7


def test_arithmetic_in_float32_is_within_the_bounds() -> None:
    """With one seed: NumPy's float32 functions may be off by more than CUDA's, once in a thousand graphs."""
    count = some(40)
    report = fuzz_graphs(opened(SinglePrecision()), SEED, range(count), shrinks=False)
    assert not report.failures, str(report)
    assert 0 < report.exact < count
    assert 0 < report.largest < 0.5


def test_the_pieces_of_a_graph_are_not_cut_again() -> None:
    """Builds rely on it: they do not try."""
    pieces = 0
    for number in range(20):
        parts = cut(built_of(number).graph.body)
        for piece in () if parts is None else parts.pieces:
            pieces += 1
            assert cut(piece.graph) is None, str(program_of(number))
    assert pieces > 50


# What is drawn.


def test_a_graph_is_the_same_whatever_was_drawn_before_it() -> None:
    assert str(draw(SEED, 7)) == str([draw(SEED, number) for number in range(8)][7])
    assert str(draw(SEED, 7)) != str(draw(SEED, 8))
    assert str(draw(SEED, 7)) != str(draw(SEED + 1, 7))


def test_every_function_of_the_builder_can_be_drawn() -> None:
    """A parameter of a new kind is one more row of `ARGUMENTS`."""
    assert {"matmul", "softmax", "exp", "add", "where", "argmax"} <= set(FUNCTION_NAMES)
    for name in FUNCTION_NAMES:
        for parameter in parameters_of(name):
            assert callable(argument_of(parameter)), name


def test_inputs_that_follow_from_a_tensor_are_drawn_for_any_rank() -> None:
    for name in FUNCTION_NAMES:
        for parameter in parameters_of(name):
            for rank in range(6):
                sketch = Sketch(Choices(np.random.default_rng(SEED)))
                x = sketch.input((2,) * rank, DType.FLOAT32)
                with contextlib.suppress(Refused):
                    argument_of(parameter)(sketch, x)


@cases_in_one_test
@pytest.mark.parametrize("row", DRAWN, ids=[row.operation.__name__ for row in DRAWN])
def test_every_operation_is_drawn_that_a_builder_takes(row: Row) -> None:
    knows = issubclass(row.operation, Randomness)  # its only input is a state
    drawn = False
    for number in range(60):
        sketch = Sketch(Choices(np.random.default_rng([SEED, number])))
        sketch.input((2, 3, 4, 4), DType.FLOAT32)
        if not sketch.attempt(lambda one: operation_of(one, row)):
            continue
        drawn = True
        calls = [each for each in sketch.statements if isinstance(each, Call)]
        applied = [each.arguments[0] for each in calls if each.function == "apply"]
        assert {type(operation) for operation in applied} == {row.operation}
        if knows or any(0 in operands_of(each) for each in calls):
            return
    assert not drawn, "it never reads a tensor that is known"
    # A builder's operations have only outputs whose dims follow from the inputs.
    case = draw_case(row.family, row)
    assert not {*case.outputs} - row.operation.optional <= {*case.operation.infer(case.inputs)}


def test_gradients_of_attention_are_drawn_with_what_the_forward_pass_gives() -> None:
    """Also where nothing is seen, so that y and the statistics do not show that they follow from q."""
    (row,) = (row for row in ROWS if row.operation is AttentionBackward)
    for number in range(some(150)):
        sketch = Sketch(Choices(np.random.default_rng([SEED, number])))
        sketch.input((2, 1, 4, 4), DType.FLOAT32)
        if not sketch.attempt(lambda one: operation_of(one, row)):
            continue
        (call,) = (c for c in sketch.statements if isinstance(c, Call) and c.function == "apply")
        (operation,) = call.arguments
        given = {name: exact(sketch.values[of.number]) for name, of in operation.named(operation.inputs)}
        forward: Attention[int] = Attention(q=0, k=1, v=2, y=3, **operation.options)
        with np.errstate(all="ignore"):
            for name, wanted in forward.evaluate(NumPy(), given, {}).items():
                np.testing.assert_allclose(given[name], wanted, rtol=0.01, atol=0.01, err_msg=str(number))


def draw_case(family: str, row: Row) -> OperationCase:
    return next(case for n in range(1000) if (case := draw_operation(family, SEED, n)).row is row)


def test_everything_that_a_graph_can_have_is_drawn() -> None:
    built = [*map(built_of, ENOUGH)]
    bodies = [one.graph.body for one in built]
    forward = [body for body, program in zip(bodies, programs(), strict=True) if not gradients(program)]
    assert {len(body.operations) for body in forward} > {*range(1, MOST_OPERATIONS + 1)}
    assert 0.7 < len(forward) / len(bodies) < 0.8
    tensors = [tensor for body in bodies for tensor in body.tensors]
    assert {tensor.dtype for tensor in tensors} == {*DType}
    assert {tensor.role for tensor in tensors} == {*TensorRole} - {TensorRole.SCALAR}
    assert {port.spec.layout for one in built for port in one.graph.ports} == {*Layout}
    assert {len(tensor.dims) for tensor in tensors} >= {*range(6)}
    assert max(len(one.graph.outputs) for one in built) > 4
    assert {body.pure for body in bodies} == {True, False}
    assert {body.numerics.deterministic for body in bodies} == {True, False}
    names = [[name for name, _ in program.outputs] for program in programs()]
    assert any("again" in outputs for outputs in names)
    calls = [each for program in programs() for each in program.statements if isinstance(each, Call)]
    assert any(len(set(read)) < len(read) for read in map(operands_of, calls)), "one operand twice"
    assert {each.function for each in calls} >= OF_OTHER_MOVES


def gradients(program: Program) -> list[Call]:
    calls = [each for each in program.statements if isinstance(each, Call)]
    return [each for each in calls if each.function == "grad"]


def test_gradients_are_drawn_of_results_by_inputs_and_by_results() -> None:
    by_inputs = set()
    for program in programs():
        for call in gradients(program):
            assert program.statements[-1] is call
            inputs = {Of(number) for number, each in program.given() if isinstance(each, Input)}
            _, wrt, upstream = call.arguments
            assert inputs.issuperset(upstream)
            by_inputs |= {of in inputs for of in (wrt if isinstance(wrt, tuple) else (wrt,))}
    assert by_inputs == {True, False}


def test_a_program_prints_as_python_that_builds_its_graph() -> None:
    compared = 0
    for number in range(40):
        program, built = program_of(number), built_of(number)
        names: dict[str, Any] = {}
        exec(str(program), names)
        for name, values in built.values.items():
            found = names["values"][name].astype(values.dtype)
            np.testing.assert_array_equal(exact(found), exact(values))
        if not program.strided:
            assert names["graph"].digest() == built.graph.digest()
            compared += 1
    assert compared > 15


def test_what_cannot_be_drawn_is_a_failure_and_all_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def draws(seed: int, number: int) -> Program:
        if number == 1:
            raise ValueError("no dims")
        return draw(seed, number)

    monkeypatch.setattr(fuzzing, "draw", draws)
    report = fuzz_graphs(opened(CpuEngine(exact=True)), SEED, range(3))
    assert (report.ran, [*report.failures]) == (2, [1])
    assert "no dims" in report.failures[1]


def test_a_tensor_without_elements_may_lie_in_any_way() -> None:
    specs = [Choices(np.random.default_rng(n)).spec((3, 0, 2), DType.INT8, Layout.STRIDED) for n in range(20)]
    assert {spec.dims for spec in specs} == {(3, 0, 2)}


# What may be wrong with a result.


def judged(build: Callable[[GraphBuilder, Any], Any], x: Sequence[float], got: Any) -> float:
    """The error, in terms of its bound, of a graph's result `y` of x, which is float32."""
    g = GraphBuilder()
    values = np.array(x, np.float32)
    graph = g.build(y=build(g, g.input("x", values.shape)))
    (port,) = graph.outputs
    result = np.array(got).astype(port.spec.dtype.numpy)
    return error_over_bound(graph, {"y": result}, truth(graph, {"x": values}))[0]


def test_what_no_error_reaches_is_exact() -> None:
    assert judged(lambda g, x: x[::-1] > 2.0, [1, 2, 3], [True, False, False]) == 0
    assert judged(lambda g, x: x[::-1] > 2.0, [1, 2, 3], [True, True, False]) > 1
    assert judged(lambda g, x: g.argmax(x * x, 0), [1, -3, 2], 1) == 0
    assert judged(lambda g, x: g.argmax(x * x, 0), [1, -3, 2], 2) > 1
    assert judged(lambda g, x: x * 2.0, [1, 2], [2, 4.000002]) > 1


def test_errors_grow_where_values_cancel_and_only_there() -> None:
    """exp(1) is 2.718281828..., and a float32 of that size is a multiple of 2.4e-7."""
    off = 4e-7
    assert judged(lambda g, x: g.exp(x), [1.0], [2.7182817 + off]) <= 1
    assert judged(lambda g, x: g.exp(x) - 2.75, [1.0], [2.7182817 - 2.75 + off]) <= 1
    assert judged(lambda g, x: (g.exp(x) - 2.75) * 0.0 + x, [1.0], [1.0 + off]) > 1
    assert judged(lambda g, x: (g.exp(x) - 2.75) * 1000.0, [1.0], [-31.718172 + 1000 * off]) <= 1


NEAR = float(np.nextafter(np.float32(np.e), np.float32(3)))
"""Not exp(1), but a float32 that its error may make of it."""


@cases_in_one_test
@pytest.mark.parametrize(
    "step",
    [
        lambda g, y: y == NEAR,
        lambda g, y: y != NEAR,
        lambda g, y: y >= NEAR,
        lambda g, y: g.floor(y - NEAR),
        lambda g, y: g.sign(y - NEAR),
        lambda g, y: g.logical_not(y - NEAR),
        lambda g, y: g.logical_and(y - NEAR, 1.0),
        lambda g, y: (y - NEAR).astype("bool"),
        lambda g, y: g.where(y - NEAR, 5.0, 6.0),
        lambda g, y: g.round(y - NEAR + 0.5).astype("int8"),
    ],
)
def test_where_an_error_decides_either_side_of_a_step_is_right(step: Any) -> None:
    g = GraphBuilder()
    graph = g.build(y=step(g, g.exp(g.input("x", (3,)))))
    right = truth(graph, {"x": np.array([1.0, 2.0, 0.3], np.float32)})
    assert right.bounds["y"][0] >= 1
    assert (right.bounds["y"][1:] < 1e-3).all()


def test_where_errors_make_values_equal_the_first_of_them_is_a_right_place() -> None:
    """Of many: at random, no sample would have the first as the largest."""
    g = GraphBuilder()
    x = g.input("x", (200,))
    graph = g.build(y=g.argmax(g.exp(x), 0) > 0)
    right = truth(graph, {"x": np.linspace(1, np.nextafter(np.float32(1), np.float32(2)), 200)})
    assert right.bounds["y"] >= 1


def test_what_overflows_in_some_samples_is_not_compared() -> None:
    assert judged(lambda g, x: x * 1.0, [np.inf, np.nan], [np.inf, np.nan]) == 0
    assert judged(lambda g, x: x * 1.0, [np.inf, 1.0], [np.inf, np.nan]) > 1
    assert judged(lambda g, x: g.sqrt(g.log(g.exp(x)) - x), [3.0], [np.nan]) == 0
    assert judged(lambda g, x: g.prod(x), [1e30, 1e30, 0.0], np.nan) == 0, "a part of it overflows"
    assert judged(lambda g, x: g.prod(x), [1e3, 1e3, 0.0], np.nan) > 1


def test_integers_that_are_computed_with_in_float32_lose_digits() -> None:
    """As they are where a bound is not whole. Around 2**30, two float32 numbers are 64 or 128 apart."""
    g = GraphBuilder()
    graph = g.build(y=g.clip(g.input("x", (3,), "int64"), -0.75).astype("int64"))
    right = truth(graph, {"x": np.array([-3, 0, 2**30 + 64])})
    assert error_over_bound(graph, {"y": np.array([-1, 0, 2**30])}, right)[0] <= 1
    assert error_over_bound(graph, {"y": np.array([-1, 0, 2**30 + 1024])}, right)[0] > 1
    assert error_over_bound(graph, {"y": np.array([0, 0, 2**30])}, right)[0] > 1


def test_a_graph_that_magnifies_errors_is_said_to_be_hardly_compared() -> None:
    def found(factor: float) -> Truth:
        g = GraphBuilder()
        x = g.input("x", (50,))
        graph = g.build(y=g.sin(g.exp(x) * factor))
        return truth(graph, {"x": np.linspace(0, 1, 50, dtype=np.float32)})

    assert found(1.0).compared == 1
    assert found(1e7).compared < 0.1


# What the fuzzer is there to notice.


def of(kind: type[Any], change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda operation: change(operation) if isinstance(operation, kind) else operation


def other_mode(wrong: Any, right: Any) -> Callable[[Any], Any]:
    def change(operation: Any) -> Any:
        return msgspec.structs.replace(operation, mode=wrong) if operation.mode is right else operation

    return change


def padded_before(operation: Any) -> Any:
    """All of the padding before the tensor."""
    conv = operation.conv
    total = tuple(map(sum, zip(conv.pre_padding, conv.post_padding, strict=True)))
    none = (0,) * len(total)
    other = msgspec.structs.replace(conv, pre_padding=total, post_padding=none)
    return msgspec.structs.replace(operation, conv=other)


MISTAKES: list[tuple[type[Any], Callable[[Any], Any]]] = [
    (Pointwise, other_mode(PointwiseMode.MAX, PointwiseMode.MIN)),
    (Pointwise, other_mode(PointwiseMode.GT, PointwiseMode.GE)),
    (Softmax, attribute("log", lambda on: not on)),
    (Reduction, other_mode(ReductionMode.MIN, ReductionMode.MAX)),
    (Cumulative, attribute("reverse", lambda on: not on)),
    (LayerNorm, attribute("epsilon", lambda value: 2 * value + 1e-3)),
    (RMSNorm, attribute("epsilon", lambda value: 2 * value + 1e-3)),
    (AvgPool, attribute("include_padding", lambda on: not on)),
    (Slice, attribute("starts", lambda starts: tuple(0 for _ in starts))),
    (ConvolutionForward, padded_before),
    (ConvolutionBackwardFilter, padded_before),  # which only gradients have
]


@pytest.mark.parametrize(("kind", "change"), MISTAKES, ids=lambda one: getattr(one, "__name__", ""))
def test_a_mistake_is_found_and_shown_as_the_one_call_that_has_it_or_its_gradient(
    kind: type[Any], change: Callable[[Any], Any]
) -> None:
    engine = opened(SinglePrecision(of(kind, change)))

    def is_wrong(built: Built, right: Truth) -> bool:
        error, _ = error_over_bound(built.graph, run(engine, built).values, right)
        return not error <= 1

    def fails(program: Program) -> bool:
        built = program.build()
        return is_wrong(built, truth(built.graph, built.values))

    changed = (number for number in itertools.count() if _is_changed(number, of(kind, change)))
    failing = next(number for number in changed if is_wrong(built_of(number), truth_of(number)))
    small = shrunk(program_of(failing), fails)
    (call,) = (each for each in small.statements if isinstance(each, Call) and each.function != "grad")
    assert any(isinstance(operation, kind) for operation in small.build().graph.body.operations), call
    assert kind is not ConvolutionBackwardFilter or gradients(small)
    values = [each.values.size for each in small.statements if isinstance(each, Input)]
    assert max(values) <= 32, str(small)


def _is_changed(number: int, change: Callable[[Any], Any]) -> bool:
    return any(change(operation) != operation for operation in built_of(number).graph.body.operations)


class Misrunning(CpuEngine):
    """Runs plans in another way."""

    def __init__(self, execute: Callable[[Sequence[np.ndarray], Callable[[], None]], None]) -> None:
        super().__init__(exact=True)
        self._execute = execute

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        once = super().execute
        self._execute(buffers, lambda: once(plan, buffers, scalars))


def twice(buffers: Sequence[np.ndarray], run: Callable[[], None]) -> None:
    run()
    run()


def never(buffers: Sequence[np.ndarray], run: Callable[[], None]) -> None:
    pass


def input_zeroed(buffers: Sequence[np.ndarray], run: Callable[[], None]) -> None:
    run()
    buffers[0][...] = 0


@pytest.mark.parametrize(
    ("execute", "least", "words"),
    [(never, 9, "times its bound"), (input_zeroed, 6, "where it must not"), (twice, 1, "times its bound")],
    ids=["never", "an input overwritten", "an update made twice"],
)
def test_other_mistakes_are_noticed(execute: Any, least: int, words: str) -> None:
    updates = (number for number in range(24) if not built_of(number).graph.body.pure)
    numbers = [*updates] if execute is twice else [*range(10)]
    report = fuzz_graphs(opened(Misrunning(execute)), SEED, numbers, shrinks=False)
    assert len(report.failures) >= least
    number, text = next((n, text) for n, text in report.failures.items() if words in text)
    assert f"python -m tests.gpu.fuzz --graphs --seed {SEED} --only {number} --engine cpu" in text


def test_what_is_shown_runs_and_is_a_graph_in_json() -> None:
    change = of(Softmax, attribute("log", lambda on: not on))
    engine = opened(SinglePrecision(change))
    numbers = (number for number in itertools.count() if _is_changed(number, change))
    found = (fuzz_graphs(engine, SEED, [number]).failures for number in numbers)
    (text,) = next(filter(None, found)).values()  # not every change can be seen in the results
    lines = [line.strip() for line in text.splitlines()]
    names: dict[str, Any] = {}
    exec("\n".join(line[4:] for line in text.splitlines() if line.startswith("    ")), names)
    (shown,) = (line.removeprefix("# ") for line in lines if line.startswith("# {"))
    assert type(names["graph"]).from_json(shown).digest() == names["graph"].digest()
    assert [type(operation) for operation in names["graph"].body.operations] == [Softmax]


# Several processes.


def test_several_processes_run_the_same_graphs() -> None:
    here = fuzz_graphs(opened(CpuEngine(exact=True)), SEED, range(10))
    there = fuzz_in_processes("cpu", SEED, range(10), 2)
    assert (there.ran, there.operations, there.failures) == (10, here.operations, {})


def dying(seed: int, numbers: Sequence[int]) -> GraphReport:
    """Graph 3 kills its process."""
    if 3 in numbers:
        os._exit(1)
    return fuzz_in_process(seed, numbers)


def test_a_graph_that_kills_its_process_is_named_and_all_others_run() -> None:
    report = fuzz_in_processes("cpu", SEED, range(2, 4), 1, run_part=dying)
    assert (report.ran, [*report.failures]) == (1, [3])
    assert "graph 3: its process died" in report.failures[3]
