"""A plan of the CUDA engine: its recipe, and cuDNN's live graphs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.engines.cuda.running.divided import Divided, Kept, divide
from cudnn_actor.engines.cuda.running.explaining import explanation
from cudnn_actor.engines.cuda.running.recipe import GraphStep, Recipe
from cudnn_actor.protocol.graphs.explanation import Explanation
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["CudaPlan", "DividedPlan"]

_MOST_REASONS = 8


class CudaPlan:
    """A recipe, and the frontend's built graph for each of its graph steps.

    Parameters
    ----------
    recipe
        The steps to run.
    graphs
        The frontend's graphs of the `GraphStep`s, in order; built, or restored from bytes.
    runs
        The `runs` of a plan with the same steps, to share them.
    """

    def __init__(
        self, recipe: Recipe, graphs: tuple[Any, ...], runs: dict[Hashable, tuple[Any, Any]] | None = None
    ) -> None:
        self.recipe = recipe
        self.graphs = graphs
        self.runs: dict[Hashable, tuple[Any, Any]] = {} if runs is None else runs
        """The functions that enqueue steps, by thread, handle and the step's kernel, product or graph, each
        with the handle. Programs add to them: equal steps of a plan, and of its halves, share a function."""
        self.tag = recipe.tag
        self.workspace = recipe.workspace
        self.checked = recipe.checked
        self.provisional = recipe.provisional
        self.program: Any = None
        """The plan bound to the engine that runs it. Only that engine uses it."""
        self.tuning = recipe.tuning
        self._divided: dict[frozenset[int], DividedPlan | None] = {}

    def instead_of(self, refused: Sequence[str], *, provisional: bool = False) -> CudaPlan:
        """The same plan, with the reasons why preferred candidates do not run."""
        reasons = tuple(dict.fromkeys(refused))[:_MOST_REASONS]
        parts = tuple(msgspec.structs.replace(part, refused=reasons) for part in self.recipe.parts)
        recipe = msgspec.structs.replace(self.recipe, parts=parts, provisional=provisional)
        return CudaPlan(recipe, self.graphs)

    def divide(self, constant: frozenset[int]) -> DividedPlan | None:
        """The plan in two, for runs in which the buffers at these places keep their values.

        None if there is nothing to prepare of them. See `divided.divide`.
        """
        if constant not in self._divided:
            found = divide(self.recipe, constant)
            self._divided[constant] = None if found is None else self._halves(found)
        return self._divided[constant]

    def _halves(self, found: Divided) -> DividedPlan:
        """The plan in two, each with its graphs."""
        steps = enumerate(self.recipe.steps)
        numbers = (number for number, step in steps if isinstance(step, GraphStep))
        once, each = list[Any](), list[Any]()
        for number, graph in zip(numbers, self.graphs, strict=True):
            (once if number in found.numbers else each).append(graph)
        halves = (
            CudaPlan(half, tuple(graphs), self.runs)
            for half, graphs in ((found.once, once), (found.each, each))
        )
        return DividedPlan(found.kept, *halves)

    def explain(self, graph: OperationGraph) -> Explanation:
        """How the plan runs the graph; see `engines.base.Plan`."""
        return explanation(self.recipe, graph)


class DividedPlan(NamedTuple):
    """A plan in two: see `Divided`."""

    kept: Sequence[Kept]
    once: CudaPlan
    each: CudaPlan
