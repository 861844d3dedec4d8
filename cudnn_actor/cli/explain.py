"""`cudnn-actor explain`: says how an engine runs a graph that `Graph.to_json` has written, and draws the
graph."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from cudnn_actor.cli.cpu_options import add_cpu_arguments, cpu_options
from cudnn_actor.cli.graph_bench import open_engine
from cudnn_actor.cli.user_error import UserError, whole_number, writing
from cudnn_actor.engines import EngineFailure
from cudnn_actor.execution.executor import describe_error
from cudnn_actor.protocol import Graph, InvalidRequest
from cudnn_actor.protocol.errors import OperationError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("graph", type=Path, metavar="GRAPH.json", help="what Graph.to_json wrote")
    parser.add_argument("--device", default="auto", help='"cuda:0", "cpu" or "auto" (the default)')
    parser.add_argument(
        "--workspace-limit", type=whole_number(least=1), metavar="BYTES", help="as in spawn(workspace_limit=)"
    )
    parser.add_argument("--profile", action="store_true", help="run it, too, and time each piece")
    parser.add_argument("--plans", action="store_true", help="list the plans that may run each piece")
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write what is said as JSON")
    parser.add_argument("--dot", type=Path, metavar="FILE", help="write the graph for Graphviz")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="write the graph as a picture")
    add_cpu_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit status is 0 if the engine has a plan for the graph."""
    graph = _read(args.graph)
    if args.picture is not None and args.picture.suffix != ".svg":
        raise UserError(
            f"--picture writes SVG, not {args.picture.suffix or 'a file without an ending'}; "
            f"use {args.picture.with_suffix('.svg')}, or convert what --dot writes: dot -Tpng"
        )
    with open_engine(args.device, **cpu_options(args)) as engine:
        try:
            plan = engine.build(graph.body, workspace_limit=args.workspace_limit)
            explanation = plan.explain(graph.body)
            if args.plans:
                explanation = engine.with_candidates(plan, explanation, graph.body, args.workspace_limit)
            if args.profile:
                explanation = explanation.with_times(graph.body, engine.measure(plan, graph.body))
        except OperationError as error:
            raise describe_error(error, graph.body) from error
        except EngineFailure as error:
            print(f"failed: {error}")
            return 1
    print(explanation)
    _write(args.json, msgspec.json.format(msgspec.json.encode(explanation), indent=1).decode())
    _write(args.dot, graph.to_dot(explanation))
    _write(args.picture, graph.to_svg(explanation))
    return 0


def _read(path: Path) -> Graph:
    try:
        return Graph.from_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except InvalidRequest as error:
        if path.suffix == ".onnx":
            raise UserError(f"{path} is an ONNX model; use cudnn-actor run {path} --explain") from error
        raise UserError(f"{path} cannot be read: {error.problem}; {error.fix}") from error


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    with writing(path):
        path.write_text(text, encoding="utf-8")
