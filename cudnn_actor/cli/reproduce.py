"""`cudnn-actor reproduce`: runs one operation graph, given by an error's token, directly on an engine."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from cudnn_actor.cli.agreement import allowed_error, relative_error
from cudnn_actor.cli.graph_bench import graph_bench, made_up_scalars, made_up_values, open_engine, tensor_name
from cudnn_actor.cli.problem_form import FORM, read_problem
from cudnn_actor.cli.user_error import whole_number
from cudnn_actor.engines import EngineFailure
from cudnn_actor.engines.cpu.exact.evaluation import exact
from cudnn_actor.engines.cuda.checking.evaluated_reference import OnHost, evaluate_graph, result_uncertainties
from cudnn_actor.protocol import CudnnActorError, OperationGraph, TensorRole

__all__ = ["add_arguments", "run"]

_FAILURES = (CudnnActorError, EngineFailure, MemoryError)


class Outcome(NamedTuple):
    """The outcome of a graph's runs; `outputs` by name, `microseconds` per run, averaged over many."""

    plan: str
    workspace: int
    outputs: Mapping[str, np.ndarray]
    microseconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "problem", nargs="+", metavar="PROBLEM", help=f"the token from an error, or a problem like {FORM}"
    )
    parser.add_argument("--device", default="auto", help='"cuda:0", "cpu" or "auto" (the default)')
    parser.add_argument("--seed", type=whole_number(), default=0, help="seed of the made-up inputs (0)")


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit status is 0 if the graph runs and its results agree with the CPU's."""
    console = Console(highlight=False, soft_wrap=True)
    graph = read_problem(" ".join(args.problem)).graph
    for line in _describe(graph):
        console.print(Text(line))
    values = made_up_values(graph, args.seed)
    try:
        outcome = _outcome(graph, values, args.device, measured=True)
    except _FAILURES as error:
        _show(console, _facts(error))
        return 1
    _show(console, {"plan": outcome.plan, "workspace": f"{outcome.workspace:,} bytes"})
    _show(console, {"time": f"{outcome.microseconds:.1f} us a run, of many in a row"})
    return _compare(console, graph, values, outcome)


def _outcome(
    graph: OperationGraph, values: Mapping[str, np.ndarray], device: str, *, measured: bool
) -> Outcome:
    with open_engine(device) as engine, graph_bench(engine, graph) as bench:
        bench.fill(values)
        plan = engine.build(graph, workspace_limit=None)
        outputs = bench.run(plan)
        return Outcome(plan.tag, plan.workspace, outputs, bench.measure(plan) if measured else 0.0)


def _compare(
    console: Console, graph: OperationGraph, values: Mapping[str, np.ndarray], outcome: Outcome
) -> int:
    try:
        wanted = _outcome(graph, values, "cpu", measured=False).outputs
    except _FAILURES as error:
        _show(console, {"no comparison": f"the CPU engine fails: {error}"})
        return 0
    differs = False
    for uid in graph.results:
        name, allowed = tensor_name(graph, uid), allowed_error(graph, uid)
        distance = relative_error(outcome.outputs[name], wanted[name])
        if distance > allowed:
            distance = relative_error(outcome.outputs[name], wanted[name], _uncertainties(graph, values)[uid])
        differs |= distance > allowed
        verdict = "DIFFERS" if distance > allowed else "agrees"
        _show(console, {f"error of {name}": f"{distance:.2e} of its norm, at most {allowed:.2e}: {verdict}"})
    return int(differs)


def _uncertainties(graph: OperationGraph, values: Mapping[str, np.ndarray]) -> dict[int, np.ndarray]:
    """For each result, the error of each element that is allowed because operations magnify roundings of
    their inputs."""
    how = graph, OnHost, lambda uid: exact(values[tensor_name(graph, uid)]), made_up_scalars(graph)
    return result_uncertainties(*how, evaluate_graph(*how))


def _describe(graph: OperationGraph) -> Iterator[str]:
    """The graph as lines of text: its operations and its tensors."""
    yield " -> ".join(type(operation).__name__ for operation in graph.operations) + f"  {graph.digest()[:8]}"
    tensors = {tensor_name(graph, uid): graph.tensor(uid) for uid in graph.bound}
    for name, tensor in tensors.items():  # an output that is also an input is listed once
        dims, strides = "x".join(map(str, tensor.dims)), ",".join(map(str, tensor.strides))
        yield f"    {name}: {tensor.dtype}[{dims}], strides {strides}"
    scalars = sum(tensor.role is TensorRole.SCALAR for tensor in graph.tensors)
    if scalars:
        yield f"    and {scalars} scalar{'s' if scalars > 1 else ''} given by value"


def _facts(error: Exception) -> dict[str, object]:
    """All fields of an error, its text first."""
    facts: dict[str, object] = {"failed": f"{type(error).__name__}: {error}"}
    if isinstance(error, CudnnActorError):
        facts |= {name: fact for name, fact in error.to_record().facts.items() if fact not in ("", None)}
    elif isinstance(error, EngineFailure):
        facts |= {"status": error.status, "detail": error.detail}
    return facts


def _show(console: Console, facts: Mapping[str, object]) -> None:
    for name, value in facts.items():
        console.print(Text(f"{name + ':':<15} {value}"))
