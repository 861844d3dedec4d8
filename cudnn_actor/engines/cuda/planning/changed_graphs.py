"""Graphs that are made of another graph's tensors, and of operations in place of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import GraphTensor, Node
from cudnn_actor.protocol.types.numerics import Numerics

__all__ = ["Changed", "graph_of", "replace_operations"]


class Changed(NamedTuple):
    """A changed graph, None if nothing is left of it, and the number that each operation had before.

    Bound tensors keep their uids. An operation that was added has the number of the one whose place it takes.
    """

    graph: OperationGraph | None
    numbers: tuple[int, ...]


def graph_of(
    operations: Iterable[Node], tensors: Mapping[int, GraphTensor], numerics: Numerics
) -> OperationGraph:
    """The graph of some operations, with those of the tensors, by uid, that they read or write."""
    operations = tuple(operations)
    touched = dict.fromkeys(uid for each in operations for uid in (*each.reads, *each.writes))
    return OperationGraph(
        tensors=tuple(tensors[uid] for uid in touched), operations=operations, numerics=numerics
    )


def replace_operations(
    graph: OperationGraph, instead: Mapping[int, Sequence[Node]], tensors: Mapping[int, GraphTensor]
) -> Changed:
    """The graph with other operations in place of some. `instead`: these, by the number of each replaced one.

    `tensors`: all tensors, by uid.
    """
    found = [
        (number, each)
        for number, operation in enumerate(graph.operations)
        for each in instead.get(number, [operation])
    ]
    changed = graph_of((each for _, each in found), tensors, graph.numerics)
    return Changed(changed, tuple(number for number, _ in found))
