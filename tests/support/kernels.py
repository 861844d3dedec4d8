"""Plans with kernels of similar graphs, taken apart. Used in a child."""

from __future__ import annotations

import base64
import json
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.cudnn.kernel_caches import KernelCaches
from cudnn_actor.engines.cuda.planning.compiler import WORKSPACE_BYTES, possible_plans
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import GraphStep
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

from .device import h200

__all__ = ["Built", "built"]


class Built(NamedTuple):
    """The first plan of a graph, with the caches of the graphs before it, beside that with empty caches.

    Parameters
    ----------
    kept
        Whether the plan is one with a cache.
    same_kernels
        Whether both have the same machine code.
    stale
        Places of the kernels' arguments, in bytes, that differ and that cuDNN does not say it updates.
    """

    kept: bool
    same_kernels: bool
    stale: tuple[int, ...]


def built(graphs: list[OperationGraph]) -> list[Built]:
    """Build graphs one after the other with the same caches."""
    kernels = KernelCaches()
    return [_compared(_first(graph, kernels), _first(graph, KernelCaches())) for graph in graphs]


def _first(graph: OperationGraph, kernels: KernelCaches) -> CudaPlan:
    return next(possible_plans(graph, h200(), WORKSPACE_BYTES, None, kernels))


def _compared(plan: CudaPlan, own: CudaPlan) -> Built:
    (step,) = plan.recipe.steps
    assert isinstance(step, GraphStep)
    pairs = list(zip(_kernels(plan), _kernels(own), strict=True))
    same = all(ours.get("cubin") == theirs.get("cubin") for ours, theirs in pairs)
    stale = tuple(place for ours, theirs in pairs for place in _stale(ours, theirs))
    return Built(bool(step.plan), same, stale)


def _kernels(plan: CudaPlan) -> list[Any]:
    """cuDNN's own description of a plan's kernels: JSON within the frontend's bytes."""
    data = bytes(plan.graphs[0].serialize(as_bytes=True))
    found, _ = json.JSONDecoder().raw_decode(data[data.index(b'{"cudnnVersion"') :].decode("latin1"))
    kernels: list[Any] = found["engine"].get("payload", {}).get("kernels", [])
    return kernels


def _stale(ours: Any, theirs: Any) -> list[int]:
    if "cubin" not in ours:
        return []
    arguments, wanted = (base64.b64decode(kernel["kernelParams"]["rawData"]) for kernel in (ours, theirs))
    updated: set[int] = set()
    for field in ours["kernelParams"]["offsets"]:
        if "update_as" in field:
            updated.update(range(field["value"], field["value"] + field.get("size", 8)))
    different = (n for n, (one, other) in enumerate(zip(arguments, wanted, strict=True)) if one != other)
    return [place for place in different if place not in updated]
