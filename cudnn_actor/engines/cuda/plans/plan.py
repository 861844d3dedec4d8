"""A plan of the CUDA engine: its recipe, and cuDNN's live graphs."""

from __future__ import annotations

from typing import Any

from cudnn_actor.engines.cuda.plans.recipe import Recipe

__all__ = ["CudaPlan"]


class CudaPlan:
    """A recipe, and the frontend's built graph for each of its graph steps.

    Parameters
    ----------
    recipe
        What to run.
    graphs
        The frontend's graphs of the `GraphStep`s, in order; built, or restored from bytes.
    """

    def __init__(self, recipe: Recipe, graphs: tuple[Any, ...]) -> None:
        self.recipe = recipe
        self.graphs = graphs
        self.tag = recipe.tag
        self.workspace = recipe.workspace
        self.tried = recipe.tried
        self.program: Any = None
        """The plan bound to the engine that runs it. Only that engine uses it."""
        self.tuning = recipe.tuning
