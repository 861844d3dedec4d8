"""The candidates that tuning measures: all plans that may run a graph that is a single piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.planning.aligned_products import aligned_product
from cudnn_actor.engines.cuda.planning.candidates import candidates, check_whole, names_of
from cudnn_actor.engines.cuda.planning.compiler import compile_aligned, compile_rearranged, compile_whole
from cudnn_actor.engines.cuda.planning.depthwise import compile_depthwise, ways_of_depthwise
from cudnn_actor.engines.cuda.planning.product_halves import compile_halves, halves_of
from cudnn_actor.engines.cuda.planning.products import compile_product, product_of
from cudnn_actor.engines.cuda.planning.rearranging import rearrangements
from cudnn_actor.engines.cuda.planning.splitting import compile_split, ways
from cudnn_actor.engines.cuda.planning.widening import compile_widened, is_widened
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Convolution

__all__ = ["OF_CUDNN", "Candidate", "all_candidates", "other_candidates"]

OF_CUDNN = "cuDNN's"
"""The kind of cuDNN's plans for the whole graph."""

_WIDENED, _REARRANGED, _PRODUCTS, _ALIGNED = 8, 4, 8, 4
"""The number of candidates of each kind: with channels of zeros, on rearranged copies, by cuBLASLt, and by
products of whole vectors."""


class Candidate(NamedTuple):
    """A plan that may be built: its kind, its number within that kind, and the function that builds it.

    `configuration`: cuDNN's name for it, if it is one of cuDNN's plans for the whole graph; else empty.
    """

    kind: str
    number: int
    build: Callable[[], CudaPlan]
    configuration: str = ""

    @property
    def name(self) -> str:
        """cuDNN's name for the candidate, or else its kind and number."""
        return self.configuration or self.what

    @property
    def what(self) -> str:
        """The candidate's kind and number."""
        return f"{self.kind}, {self.number}"


def all_candidates(
    graph: OperationGraph, handle: Any, limit: int, *, fallbacks: bool = True
) -> list[Candidate]:
    """All candidates: cuDNN's, products by cuBLASLt or of whole vectors, those on rearranged copies or with
    channels of zeros, our kernels of depthwise convolutions, and the ways to run the graph in steps unless it
    is a convolution alone.

    Candidates of one kind come in the order in which they are expected to be fast. `fallbacks`: whether
    cuDNN's fallbacks are among them where it has others.
    """
    of_cudnn = _of_cudnn(graph, handle, limit, fallbacks=fallbacks)
    return of_cudnn + other_candidates(graph, handle, limit)


def other_candidates(graph: OperationGraph, handle: Any, limit: int) -> list[Candidate]:
    """All candidates except cuDNN's for the whole graph."""
    return [
        Candidate(kind, number, build)
        for kind, builds in _other_kinds(graph, handle, limit)
        for number, build in enumerate(builds, start=1)
    ]


def _other_kinds(
    graph: OperationGraph, handle: Any, limit: int
) -> Iterator[tuple[str, list[Callable[[], CudaPlan]]]]:
    """Yields the kinds of candidates that are not cuDNN's for the whole graph, each with functions that build
    them."""
    given = graph, handle, limit
    if (product := product_of(graph)) is not None:
        yield (
            "by cuBLASLt",
            [partial(compile_product, graph, product, handle, limit, n) for n in range(_PRODUCTS)],
        )
    elif (halves := halves_of(graph)) is not None:
        yield (
            "by cuBLASLt and a kernel",
            [partial(compile_halves, graph, halves, handle, limit, n) for n in range(_PRODUCTS)],
        )
    if (aligned := aligned_product(graph, every=True)) is not None:
        yield (
            "of whole vectors",
            [partial(compile_aligned, graph, aligned, handle, limit, n) for n in range(_ALIGNED)],
        )
    for way in rearrangements(graph, every=True):
        yield (
            way.what,
            [partial(compile_rearranged, graph, way, handle, limit, n) for n in range(_REARRANGED)],
        )
    if is_widened(graph):
        yield "with channels of zeros", [partial(compile_widened, *given, n) for n in range(_WIDENED)]
    depthwise = range(ways_of_depthwise(graph))
    yield "depthwise", [partial(compile_depthwise, graph, limit, n) for n in depthwise]
    convolves = any(isinstance(operation, Convolution) for operation in graph.operations)
    choices = (len(graph.operations) > 1) if convolves else ways(graph)
    yield "in steps", [partial(compile_split, *given, choice=choice) for choice in range(choices)]


def _of_cudnn(graph: OperationGraph, handle: Any, limit: int, *, fallbacks: bool) -> list[Candidate]:
    """cuDNN's candidates for the whole graph."""
    try:
        check_whole(graph)
        names = names_of(candidates(graph, handle, limit, fallbacks=fallbacks))
    except Refused:
        return [] if fallbacks else _of_cudnn(graph, handle, limit, fallbacks=True)
    return [
        Candidate(
            OF_CUDNN,
            number,
            partial(compile_whole, graph, handle, limit, number - 1, fallbacks=fallbacks),
            name,
        )
        for number, name in enumerate(names, start=1)
    ]
