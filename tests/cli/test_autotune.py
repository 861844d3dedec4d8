"""`cudnn-actor autotune`: measured, shown, kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cudnn_actor.cli.autotune import Tuned, Tuner, tune_all
from cudnn_actor.cli.problem_form import Problem, read_problem
from cudnn_actor.engines.base import Effort, Plan, ProgressCallback, unheard
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cpu.exact.compiler import compile_plan
from cudnn_actor.plan_store.store import PlanStore
from cudnn_actor.protocol import (
    BufferRef,
    GraphBuilder,
    LayerNormBackward,
    MaxPoolBackward,
    Operation,
    OperationGraph,
    UnsupportedGraph,
)
from cudnn_actor.protocol.graphs.reproduction import token
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.trials.chaos.computations import PROBLEMS, message

from ..plain_builder import PlainBuilder
from .terminal import cudnn_actor_here

PROBLEM = "conv_fwd x=1x4x6x6 w=4x4x3x3"
UNSUPPORTED = "conv_bwd_data x=1x4x6x6 w=4x4x3x3 dtype=int8"


class ThreeWays(PlainBuilder):
    """A builder of real CPU plans that offers each thrice; it stands for a library that has a choice."""

    fingerprint = "three ways"

    def __init__(self) -> None:
        self.measured = 0

    def build(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback = unheard,
        effort: Effort = "best",
    ) -> Plan:
        return compile_plan(graph, workspace_limit)

    def tune(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback,
    ) -> Plan:
        plan = compile_plan(graph, workspace_limit)
        for done in range(3):
            progress(done, 3, f"way {done}")
        self.measured += 1
        return plan

    def export(self, plan: object) -> bytes:
        return b"the only way"

    def restore(self, graph: OperationGraph, data: bytes) -> Plan:
        assert data == b"the only way"
        return compile_plan(graph, None)


@pytest.fixture
def engine() -> Iterator[CpuEngine]:
    engine = CpuEngine(exact=True)
    engine.open()
    yield engine
    engine.close()


def tuned(engine: CpuEngine, builder: ThreeWays, store: Path, *problems: str) -> list[Tuned]:
    with Tuner(engine, builder, PlanStore(store), workspace_limit=None) as tuner:
        return tune_all(tuner, [read_problem(problem) for problem in problems])


def test_a_problem_is_measured_once_and_kept(engine: CpuEngine, tmp_path: Path) -> None:
    builder = ThreeWays()
    for _ in range(2):
        (result,) = tuned(engine, builder, tmp_path / "store", PROBLEM)
        assert (result.problem, result.error) == (PROBLEM, "")
        assert result.plan.startswith("cpu/conv_fwd/")
        assert result.heuristic_us > 0
        assert result.tuned_us > 0
    assert builder.measured == 1
    assert list((tmp_path / "store").glob("*.plan"))


@pytest.mark.parametrize("kind", [LayerNormBackward, MaxPoolBackward])
def test_a_problem_of_any_operation_is_given_by_its_token(
    engine: CpuEngine, tmp_path: Path, kind: type[Operation[str]]
) -> None:
    problem, operation = next((p, each) for p in PROBLEMS for each in p.forms if type(each) is kind)
    refs = {
        name: BufferRef(slot=0, generation=0, spec=spec, device="cpu")
        for name, spec in problem.specs_of(operation).items()
    }
    text = token(lower(message(operation, refs)).graph)
    for _ in range(2):  # measured, then kept
        (result,) = tuned(engine, ThreeWays(), tmp_path / "store", text)
        assert (result.problem, result.error) == (text, "")
        assert result.plan.startswith(f"cpu/{operation.kind}/")
        assert result.tuned_us > 0


def test_a_graph_is_given_by_its_token(engine: CpuEngine, tmp_path: Path) -> None:
    g = GraphBuilder()
    x, mean = g.input("x", (4, 6)), g.input("mean", (4, 6))
    graph = g.build(y=g.softmax(x - mean), z=x @ mean.T, updates={"mean": mean * 0.5 + x})
    builder = ThreeWays()
    for _ in range(2):  # measured, then kept
        (result,) = tuned(engine, builder, tmp_path / "store", token(graph.body))
        assert (result.error, result.tuned_us > 0) == ("", True)
    assert builder.measured == 1


def test_a_problem_that_fails_does_not_stop_the_others(engine: CpuEngine, tmp_path: Path) -> None:
    bad, good = tuned(engine, ThreeWays(), tmp_path / "store", UNSUPPORTED, PROBLEM)
    assert UnsupportedGraph.__name__ in bad.error
    assert good.error == ""


def test_a_winner_that_could_not_be_kept_is_an_error(engine: CpuEngine, tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    (result,) = tuned(engine, ThreeWays(), tmp_path / "store", PROBLEM)
    assert "could not be stored" in result.error


def test_progress_is_told_to_whoever_asks(engine: CpuEngine, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    problem: Problem = read_problem(PROBLEM)
    with Tuner(engine, ThreeWays(), PlanStore(tmp_path / "store"), workspace_limit=None) as tuner:
        tuner.tune(problem, lambda *step: told.append(step))
    assert told == [(0, 3, "way 0"), (1, 3, "way 1"), (2, 3, "way 2")]


# The command.


def test_on_the_cpu_there_is_nothing_to_tune(tmp_path: Path) -> None:
    done = cudnn_actor_here(
        "autotune", "--store", str(tmp_path / "store"), "--device", "cpu", *PROBLEM.split()
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is nothing to tune" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("# none\n", "contains no problem"),
        ("\nsing\n", "line 2: 'sing' is not a problem"),
    ],
)
def test_a_bad_file_is_one_line(content: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "problems.txt"
    if content is not None:
        path.write_text(content)
    done = cudnn_actor_here("autotune", "--store", str(tmp_path / "store"), str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_word_that_is_neither_a_problem_nor_a_file_is_told_so(tmp_path: Path) -> None:
    done = cudnn_actor_here("autotune", "--store", str(tmp_path / "store"), "problems.txt")
    assert done.returncode == 2
    assert "'problems.txt' is not a problem" in done.stderr
    assert "no file of that name" in done.stderr


def test_a_store_that_others_may_write_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    done = cudnn_actor_here("autotune", "--store", str(tmp_path / "store"), PROBLEM)
    assert done.returncode == 2
    assert "choose a directory that you can write" in done.stderr


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    done = cudnn_actor_here("autotune", "--store", str(tmp_path / "store"), PROBLEM)
    assert done.returncode == 2
    assert "cannot be created" in done.stderr
