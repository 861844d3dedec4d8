"""Runs a program's graph on an engine."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cudnn_actor.engines.base import Builder, Engine
from cudnn_actor.protocol import RunGraph
from cudnn_actor.protocol.messages.lowering import lower

from ...engines.workbench import workbench
from ..operations.cases import place, untouchable
from .programs import Built

__all__ = ["Ran", "run"]


class Ran(NamedTuple):
    """What an engine made of a graph: outputs and updated inputs, by name; and the plan's tag."""

    values: dict[str, np.ndarray]
    plan: str


def run(engine: Engine, built: Built, builder: Builder | None = None) -> Ran:
    """Run a graph on an open engine, into outputs full of NaN, and a workspace too if it has a hook for that.

    Raises what engine and builder raise, and `ValueError` if anything was written but the elements of outputs
    and of updated inputs.
    """
    graph = built.graph
    written = {graph.names_of[uid] for uid in graph.body.written if uid in graph.names_of}
    with workbench(engine) as bench:
        refs = {port.name: place(bench, port.spec, built.values.get(port.name)) for port in graph.ports}
        asked = RunGraph.bind(graph, refs)
        plan = (builder or engine).build(lower(asked).graph, workspace_limit=None)
        engine.prepare(plan)
        getattr(engine, "poison_workspace", lambda: None)()
        before = {name: untouchable(bench, ref, written=name in written) for name, ref in refs.items()}
        bench.execute(plan, asked)
        for name, ref in refs.items():
            if not np.array_equal(untouchable(bench, ref, written=name in written), before[name]):
                raise ValueError(f"{plan.tag} wrote to {name} where it must not")
        return Ran({name: bench.read(refs[name]) for name in written}, plan.tag)
