"""The places of a model's nodes while it is imported, and the known facts about their results."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import onnx

from cudnn_actor.models.errors import InvalidModel
from cudnn_actor.models.source import Origin, Weight
from cudnn_actor.onnx.reading import Opsets, label_of
from cudnn_actor.onnx.values import Declined, Empty, Value
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.messages.model_messages import Draws

__all__ = [
    "UNDECIDED",
    "UNKNOWN",
    "Misfit",
    "Part",
    "Place",
    "Scope",
    "Trial",
    "Unknowable",
    "Unknown",
    "label_at",
    "reason_of",
]


class Unknown:
    """The result of a node that cannot be run, or that depends on values which are not known yet."""


class Misfit(Exception):
    """Raised for dims that do not fit an operator, with the error for the user. No node around catches it."""

    def __init__(self, error: InvalidModel | InvalidRequest) -> None:
        super().__init__(str(error))
        self.error = error


class Unknowable(Exception):
    """Raised when the result of a node that cannot be run is needed."""


UNKNOWN, UNDECIDED = Unknown(), Unknown()
Scope = ChainMap[str, "Value | Unknown | None"]
"""The values of names, with a layer for each enclosing subgraph."""


@dataclass(frozen=True, eq=False)
class Place:
    """The place of nodes: the values of names, the operators' versions, and the attributes of the enclosing
    function."""

    names: Scope
    opsets: Opsets
    attributes: Mapping[str, onnx.AttributeProto]
    label: str = ""
    depth: int = 0
    as_written: bool = False
    """Whether the nodes are those of ONNX's own functions, which say themselves what they compute in
    float32."""
    unrolled: int | None = None
    """How many operations the graph may have if a loop is unrolled. For more, `TooManyTurns` is raised, and
    missing values raise their error. With None, the graph's own limit holds, and both are reported
    instead."""


class Part(NamedTuple):
    """A graph, its weights, and the random numbers that a run draws: see `Specialised`."""

    graph: Graph
    weights: Mapping[str, tuple[str, Weight]]
    origins: Mapping[str, Origin]
    random: Draws | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Trial:
    """The outcome of trying one node by itself: why it cannot be run, or its results.

    `unfit`: whether its operator does not take its inputs or attributes, so that the file is at fault.
    `telling`: whether the text of `problem` contains each dim that it is about.
    """

    problem: str = ""
    unfit: bool = False
    telling: bool = False
    results: Sequence[Value | Unknown | None] = ()


def reason_of(error: Exception) -> str:
    """The reason for which a node cannot be run, from the error that it raised."""
    match error:
        case Declined():
            return str(error)
        case Empty():
            return "has a tensor without elements"
        case InvalidRequest():
            return f"{error.field}: {error.value} {error.problem}"
        case _:
            return f"does not fit its operator: {type(error).__name__}: {error}"


def label_at(node: onnx.NodeProto, place: Place) -> str:
    """A node for people, with the one that it lies in."""
    return f"{place.label}, in {label_of(node)}" if place.label else label_of(node)
