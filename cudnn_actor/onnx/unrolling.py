"""Watches the unrolling of recurrences and loops: after the second turn it is known whether all turns fit
into a graph, and into an import."""

from __future__ import annotations

from cudnn_actor.onnx.budget import Budget
from cudnn_actor.onnx.values import Refused
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder

__all__ = ["TooManyTurns", "Unrolling"]


class TooManyTurns(Refused):
    """Raised where all turns together are more operations than a graph may have, or more nodes than an
    import may have."""


class Unrolling:
    """The turns of one recurrence or loop.

    Parameters
    ----------
    g
        The builder of the graph.
    budget
        The remaining budget of the import.
    most
        How many operations the graph may have.
    turns
        How many turns there are; None if that is known only when they have ended.
    stacked
        How many results of each turn are stacked at the end. Each costs an operation.
    parts
        How many parts the turns have, with equal numbers of turns. Each part begins as the first one does.
    behind
        How many operations follow after all turns.
    """

    def __init__(
        self,
        g: GraphBuilder,
        budget: Budget,
        most: int,
        turns: int | None,
        stacked: int,
        *,
        parts: int = 1,
        behind: int = 0,
    ) -> None:
        self._g, self._budget, self._most, self._turns, self._stacked = g, budget, most, turns, stacked
        self._parts, self._behind = parts, behind
        self._done, self._began = 0, g.added
        self._before, self._walked = self._began, budget.walked

    def note_turn(self) -> None:
        """Note that a turn was added. Raises `TooManyTurns` if all of them are too many operations or
        nodes."""
        self._done += 1
        needed = added = self._g.added
        if self._turns is None:
            needed += self._stacked * self._done + self._behind
        elif self._done == 2 and self._turns > self._parts:
            each = added - self._before  # later turns will add as many each
            beginning = self._before - each - self._began
            needed += each * (self._turns - 2) + beginning * (self._parts - 1)
            needed += self._stacked * self._turns + self._behind
        self._before = added
        if needed > self._most:
            count = "many" if self._turns is None else f"{self._turns:,}"
            raise TooManyTurns(
                f"has {count} turns, which are {needed:,} operations of the graph or more, where the limit "
                f"is {self._most:,}; raise it: spawn(graph_limits=GraphLimits(operations={_roundly(needed)}))"
            )
        self._check_nodes()

    def _check_nodes(self) -> None:
        """Check that all turns fit into the import's nodes. Otherwise a body that adds no operation would be
        refused only when the last node is used up, which takes seconds."""
        walked = self._budget.walked
        each, self._walked = walked - self._walked, walked
        if self._done == 2 and self._turns is not None and not self._budget.fits(each * (self._turns - 2)):
            raise TooManyTurns(
                f"has {self._turns:,} turns, which expand the model to {walked + each * (self._turns - 2):,} "
                "nodes; raise the limit ModelLimits.nodes"
            )


def _roundly(count: int) -> int:
    """A tenth more, in thousands."""
    return -(-count * 11 // 10_000) * 1000
