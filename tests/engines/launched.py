"""A product that an engine of the CPU expects to compute often, on its buffers or on other arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cudnn_actor.engines.base import Engine, RunAnywhere
from cudnn_actor.protocol import GraphBuilder

__all__ = ["SQUARE", "Launched", "launched_product"]

SQUARE = (256, 256)
"""Large enough that a run is in place, and that a session is bound to it for one run."""


class Launched(NamedTuple):
    """A product of x with a constant w, expected on buffers, and the places of x and y among them."""

    launch: RunAnywhere
    buffers: list[np.ndarray]
    x: int
    y: int
    w: np.ndarray

    def run(self, x: np.ndarray) -> tuple[np.ndarray, set[int]]:
        """The result, and what was in place. Other arrays are copied, as in runs of models."""
        found = self.launch.instead([(self.x, x)], [(self.y, None)])
        if self.x not in found:
            self.buffers[self.x][...] = x
        if found:
            self.launch.run_on(found)
        else:
            self.launch()
        return (found[self.y] if self.y in found else self.buffers[self.y].copy()), {*found}


def launched_product(engine: Engine, constant: Sequence[str] = ()) -> Launched:
    """The product, expected by this engine. `constant`: inputs that it is told are the same in all runs."""
    g = GraphBuilder()
    graph = g.build(y=g.matmul(g.input("x", SQUARE), g.input("w", SQUARE)))
    names = [graph.names_of[uid] for uid in graph.body.bound]
    w = np.random.default_rng(38).standard_normal(SQUARE).astype(np.float32)
    buffers = [w.copy() if name == "w" else np.full(SQUARE, np.nan, np.float32) for name in names]
    plan = engine.build(graph.body, workspace_limit=None)
    launch = engine.expect(plan, buffers, (), [*map(names.index, constant)])
    assert isinstance(launch, RunAnywhere)
    return Launched(launch, buffers, names.index("x"), names.index("y"), w)
