"""A problem that `operations` times, its graph, and PyTorch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from cudnn_actor.protocol import BufferRef, OperationGraph, TensorSpec
from cudnn_actor.protocol.messages.lowering import lower

__all__ = ["Problem", "graph_of", "torch_module"]


class Problem(NamedTuple):
    """A graph that is timed, and PyTorch's function for the same, if it has one.

    `launches`: whether that function launches so many kernels that it is timed as a CUDA graph, too.
    """

    name: str
    graph: OperationGraph
    torch: Callable[[], object] | None
    launches: bool = False


@functools.cache
def torch_module() -> Any:
    return importlib.import_module("torch")


def graph_of(kind: Any, specs: dict[str, TensorSpec], **attributes: Any) -> OperationGraph:
    """The graph of one operation on tensors of these specs."""
    refs = {
        name: BufferRef(slot=slot, generation=0, spec=spec, device="cuda:0")
        for slot, (name, spec) in enumerate(specs.items())
    }
    return lower(kind(**refs, **attributes)).graph
