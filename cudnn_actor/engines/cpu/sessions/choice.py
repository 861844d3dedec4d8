"""Decides whether ONNX Runtime runs a graph."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.cpu.sessions.draft import Unsupported
from cudnn_actor.engines.cpu.sessions.export import export
from cudnn_actor.engines.cpu.sessions.plan import SessionPlan, SessionRun, session_plan
from cudnn_actor.engines.cpu.sessions.runtime import is_installed
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.timing import multiplications
from cudnn_actor.protocol.operations import ConvolutionBackwardFilter

__all__ = ["Sessions", "fixed_or_none", "session_or_reason", "wants_session"]

log = Log("cudnn_actor")

Sessions = Literal["never", "where it pays", "wherever it can"]
"""The graphs that ONNX Runtime runs, if it has all of their operations."""
_MANY_OPERATIONS = 16
_MANY_MULTIPLICATIONS = 1 << 20
"""The fewest operations, or multiplications, for which a session pays. A graph of that size takes NumPy a
tenth of a millisecond: 5 us for each operation. A session takes some milliseconds to be made, and each of its
runs some 10 us beside its work."""


def wants_session(graph: OperationGraph, sessions: Sessions) -> bool:
    """Whether ONNX Runtime is to run a graph, if it can."""
    if sessions == "where it pays":
        return _pays(graph) and is_installed()
    return sessions == "wherever it can"


def session_or_reason(graph: OperationGraph, threads: int) -> SessionPlan | str:
    """A session for a graph that `check_graph` takes, or why there is none. Blocks."""
    try:
        return session_plan(export(graph), threads)
    except Unsupported as refusal:
        return f"ONNX Runtime does not run {refusal}"
    except Exception as error:  # noqa: BLE001 - the package raises classes of its own
        log.warning("session.not_made", graph=graph.digest(), error=str(error))
        return f"ONNX Runtime made no session: {error}"


def fixed_or_none(
    plan: SessionPlan, buffers: Sequence[np.ndarray], constant: Collection[int]
) -> SessionRun | None:
    """A session for these buffers: see `SessionPlan.bind_constant`.

    None if there is none, say for want of memory.
    """
    try:
        return plan.bind_constant(buffers, constant)
    except Exception as error:  # noqa: BLE001 - the package raises classes of its own
        log.warning("session.not_fixed", plan=plan.tag, error=str(error))
        return None


def _pays(graph: OperationGraph) -> bool:
    if any(isinstance(operation, ConvolutionBackwardFilter) for operation in graph.operations):
        return False  # as a convolution with filters as large as images, it takes 1.6 times as long as NumPy
    if len(graph.operations) >= _MANY_OPERATIONS:
        return True
    counts = (multiplications(graph, operation) for operation in graph.operations)
    return sum(counts) >= _MANY_MULTIPLICATIONS
