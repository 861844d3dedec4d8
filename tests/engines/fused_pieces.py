"""A graph as one kernel of our own, and whether that computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from cudnn_actor.engines.cuda.kernels.line_kernels import Lined
from cudnn_actor.engines.cuda.operations.fused_norms import Normed
from cudnn_actor.engines.cuda.planning.fusing import compile_fused
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.running.recipe import Buffer, KernelStep
from cudnn_actor.protocol import DType, Graph

from .cuda.planning.test_partition import array_in, evaluated, filled

__all__ = ["check_results", "only_kernel"]

K = TypeVar("K", Lined, Normed)


def only_kernel(graph: Graph, kind: type[K]) -> tuple[K, list[int]]:
    """The kernel of the only piece of a graph that is not a view, and the numbers of its buffers."""
    parts = cut(graph.body)
    body, uids = graph.body, graph.body.bound
    if parts is not None:  # what updates do is left out
        ((body, tensors, _),) = parts.pieces
        uids = tuple(parts.stored[uid].root for uid in tensors)
    (step,) = compile_fused(body, None).recipe.steps
    assert isinstance(step, KernelStep)
    assert isinstance(step.kernel, kind)
    places = (place for place in step.sources if isinstance(place, Buffer))
    return step.kernel, [graph.body.bound.index(uids[place.number]) for place in places]


def check_results(
    graph: Graph,
    numbers: Sequence[int],
    run: Callable[[list[int]], None],
    tolerances: Mapping[DType, float] = MappingProxyType({DType.BFLOAT16: 2**-7}),
) -> None:
    """Compare what a kernel computes with the graph: to within 1e-5, or the tolerance of the dtype.

    `run` gets the addresses of the buffers with these numbers.
    """
    tensors = [graph.body.tensor(uid) for uid in graph.body.bound]
    wanted, found = filled(graph), filled(graph)
    arrays = [array_in(memory, tensor) for memory, tensor in zip(wanted, tensors, strict=True)]
    evaluated(graph.body, arrays)
    run([found[number].ctypes.data for number in numbers])
    for memory, tensor, expected in zip(found, tensors, arrays, strict=True):
        got = np.asarray(array_in(memory, tensor), np.float64)
        tolerance = tolerances.get(tensor.dtype, 1e-5)
        np.testing.assert_allclose(got, np.asarray(expected, np.float64), rtol=tolerance, atol=tolerance)
