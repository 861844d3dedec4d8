"""`cudnn-actor reproduce`: what an error names, run again."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.cli import graph_bench as graph_benches
from cudnn_actor.cli import main
from cudnn_actor.cli.agreement import allowed_error, relative_error
from cudnn_actor.cli.graph_bench import graph_bench, made_up_values
from cudnn_actor.cli.problem_form import read_problem
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.protocol import (
    AttentionBackward,
    BufferRef,
    GraphBuilder,
    GraphTensor,
    OperationGraph,
    Pointwise,
    PointwiseMode,
    RMSNorm,
    TensorRole,
    TensorSpec,
)
from cudnn_actor.protocol.graphs.reproduction import token
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.trials.chaos.computations import PROBLEMS, Computation, Problem, message

from ..engines.single_precision import SinglePrecision
from ..in_one_test import in_one_test
from .terminal import cudnn_actor_here

PROBLEM = "conv_fwd x=2x6x7x7 w=4x3x3x3 pad=1 groups=2 dtype=float16 layout=NHWC bias=yes beta=2"


@pytest.fixture(autouse=True)
def few_runs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in each round: else each test takes a fifth of a second for a time that none of them looks at."""
    monkeypatch.setattr(graph_benches, "_MEASURE_S", 0.0)


@pytest.mark.parametrize("form", [PROBLEM.split(), [PROBLEM], [token(read_problem(PROBLEM).graph)]])
def test_a_problem_runs_and_agrees_in_every_form(form: list[str]) -> None:
    done = cudnn_actor_here("reproduce", *form, "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("x: float16[2x6x7x7]", "cpu/conv_fwd/", "workspace:", "us a run", "agrees"):
        assert words in done.stdout


def test_a_graph_that_the_engine_cannot_run_is_shown_with_all_that_the_error_says() -> None:
    done = cudnn_actor_here("reproduce", "conv_bwd_data x=1x4x5x5 w=4x4x3x3 dtype=int8", "--device", "cpu")
    assert done.returncode == 1
    for words in ("UnsupportedGraph", "engine:", "digest:", "detail:"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("sing",), "is not a problem"),
        (("eNqtz0sKwjAUheGtyB07EEFw",), "is not an operation graph"),
        ((PROBLEM, "--device", "cuda:77"), "device='cuda:77'"),
        ((PROBLEM, "--device", "tpu"), "is not a device"),
    ],
)
def test_what_cannot_be_carried_out_is_one_line(words: tuple[str, ...], problem: str) -> None:
    done = cudnn_actor_here("reproduce", *words)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_what_does_not_fit_the_machine_is_refused_before_the_system_ends_us() -> None:
    problem = "conv_fwd x=1x1x1000x999999999 w=1x1x1x1 dtype=float64"
    done = cudnn_actor_here("reproduce", problem, "--device", "cpu")
    assert done.returncode == 2
    assert "GB of memory" in done.stderr


def test_the_same_seed_makes_the_same_values() -> None:
    graph = read_problem(PROBLEM).graph
    one, same, other = (made_up_values(graph, seed) for seed in (5, 5, 6))
    assert set(one) == {"x", "w", "bias", "y"}
    for name, values in one.items():
        assert np.array_equal(values, same[name])
        assert not np.array_equal(values, other[name])


def test_an_output_that_is_read_too_is_one_buffer() -> None:
    graph = read_problem("conv_fwd x=1x1x4x4 w=1x1x1x1 beta=2 dtype=float64").graph
    engine = CpuEngine(exact=True)
    engine.open()
    values = made_up_values(graph, seed=1)
    with graph_bench(engine, graph) as bench:
        bench.fill(values)
        once = bench.run(engine.build(graph, workspace_limit=None))["y"]
        twice = bench.run(engine.build(graph, workspace_limit=None))["y"]
    engine.close()
    beta = 0.75
    image = values["x"] * values["w"]
    np.testing.assert_allclose(once, image + beta * values["y"])
    np.testing.assert_allclose(twice, image + beta * once)


def test_results_that_differ_are_told_from_rounding() -> None:
    graph = read_problem(PROBLEM).graph
    wanted = np.random.default_rng(0).standard_normal((2, 4, 7, 7))
    (result,) = graph.results
    allowed = allowed_error(graph, result)
    assert relative_error(wanted.astype(np.float16), wanted) < allowed
    assert relative_error(wanted * 1.1, wanted) > allowed
    assert relative_error(np.full_like(wanted, np.nan), wanted) > allowed
    assert relative_error(np.full(3, np.inf), np.full(3, np.inf)) == 0


def test_whole_numbers_of_whole_numbers_are_exact() -> None:
    graph = read_problem("conv_fwd x=1x4x5x5 w=4x4x3x3 dtype=int8 out=int32").graph
    assert allowed_error(graph, graph.results[0]) == 0


# Other operations.

GRAPHS = {
    (type(operation).__name__, len(operation.reads) + len(operation.writes)): (problem, operation)
    for problem in PROBLEMS
    for operation in problem.forms
}


def graph_of(problem: Problem, operation: Computation) -> OperationGraph:
    refs = {
        name: BufferRef(slot=0, generation=0, spec=spec, device="cpu")
        for name, spec in problem.specs_of(operation).items()
    }
    return lower(message(operation, refs)).graph


@in_one_test("of", GRAPHS, ids=str)
def test_the_token_of_every_operation_runs_and_each_of_its_results_is_compared(
    of: tuple[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    problem, operation = GRAPHS[of]
    assert main(["reproduce", token(graph_of(problem, operation)), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    for name, _ in operation.named(operation.outputs):
        assert re.search(rf"error of {re.escape(name)}: .* agrees", shown)
    assert shown.count("agrees") == len(operation.writes)


def test_attention_whose_last_sample_has_no_keys_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("dy", "q", "k", "v", "y", "dq", "dk", "dv")
    specs = {name: TensorSpec.packed((2, 1, 3, 8)) for name in names}
    specs |= {"statistics": TensorSpec.packed((2, 1, 3, 1)), "lengths_kv": TensorSpec.packed((2,), "int32")}
    refs: Any = {
        name: BufferRef(slot=0, generation=0, spec=spec, device="cpu") for name, spec in specs.items()
    }
    graph = lower(AttentionBackward(**refs)).graph
    values = made_up_values(graph, seed=0)
    assert values["lengths_kv"][1] == 0
    assert np.isneginf(values["statistics"][1]).all()
    assert main(["reproduce", token(graph), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("agrees") == 3


@pytest.mark.parametrize(("epsilon", "status"), [(1e-5, 0), (0.1, 1)])
def test_what_is_left_of_terms_that_cancel_agrees_as_far_as_these_do(
    epsilon: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of a norm of rows of one element, in float32; and where the norm has another epsilon."""

    def changed(operation: Any) -> Any:
        return (
            msgspec.structs.replace(operation, epsilon=epsilon)
            if isinstance(operation, RMSNorm)
            else operation
        )

    engines = {"auto": lambda: SinglePrecision(changed), "cpu": CpuEngine}
    monkeypatch.setattr(
        graph_benches, "engine_for", lambda options: SimpleNamespace(make=engines[options.device])
    )
    g = GraphBuilder()
    x, scale, dy = g.input("x", (64, 1)), g.input("scale", (1,)), g.input("dy", (64, 1))
    graph = g.build(dx=g.grad(g.apply(RMSNorm(x=x, scale=scale)), x, dy))
    assert main(["reproduce", token(graph.body)]) == status


def test_made_up_indices_are_those_of_a_forward_pass() -> None:
    """Random ones are found nowhere, so that a gradient of zeros would agree."""
    graph = next(graph_of(*case) for (name, _), case in GRAPHS.items() if name == "MaxPoolBackward")
    values = made_up_values(graph, seed=1)
    engine = CpuEngine(exact=True)
    engine.open()
    with graph_bench(engine, graph) as bench:
        bench.fill(values)
        (dx,) = bench.run(engine.build(graph, workspace_limit=None)).values()
    engine.close()
    np.testing.assert_allclose(dx.sum(), values["dy"].sum(), rtol=1e-4)


def test_indices_must_agree_exactly_and_sums_within_the_rounding_of_their_length() -> None:
    graph = next(graph_of(*case) for (name, _), case in GRAPHS.items() if name == "MaxPool")
    y, index = graph.results if graph.tensor(graph.results[0]).dtype.is_floating else graph.results[::-1]
    assert allowed_error(graph, index) == 0
    assert 0 < allowed_error(graph, y) < 1e-3
    norm = next(graph_of(*case) for (name, _), case in GRAPHS.items() if name == "LayerNormBackward")
    longest = max(tensor.spec.nbytes // 4 for tensor in norm.tensors)
    assert all(allowed_error(norm, uid) > longest**0.5 * 2.0**-23 for uid in norm.results)


def test_a_token_of_42_kb_is_accepted() -> None:
    """It is one word of a command line, whatever the graph's size is."""
    chance, shape = random.Random(0), TensorSpec.packed((2, 3))
    count = 800
    names = [f"{chance.getrandbits(256):064x}" for _ in range(count)]
    names[0], names[-1] = "first", "last"
    tensors = [
        GraphTensor(
            uid=uid,
            dims=shape.dims,
            strides=shape.strides,
            dtype=shape.dtype,
            role=TensorRole.BOUND if name in ("first", "last") else TensorRole.VIRTUAL,
            name=name,
        )
        for uid, name in enumerate(names)
    ]
    steps = (Pointwise(mode=PointwiseMode.RELU, operands=(uid,), result=uid + 1) for uid in range(count - 1))
    text = token(OperationGraph(tensors=tuple(tensors), operations=tuple(steps)))
    assert len(text) > 42_000
    done = cudnn_actor_here("reproduce", text, "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert "error of last:  0.00e+00" in done.stdout
