"""The frontend's engines written in Python are never taken for cuDNN's."""

from __future__ import annotations

import sys

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.candidates import build_candidate, candidates
from cudnn_actor.protocol import DType

from .child import Child
from .claims import attention
from .device import h200


def imported_for_an_attention() -> list[str]:
    """Which of the frontend's modules with engines of its own a process has imported for an attention."""
    candidates(attention(DType.BFLOAT16, backward=False, head=64), h200(), None)
    folders = ("cudnn.sdpa", "cudnn.gemm", "cudnn.norm", "cudnn.frost", "cutlass")
    return [name for name in sys.modules if name.startswith(folders)]


def test_the_frontend_does_not_import_its_python_engines(child: Child) -> None:
    alone = Child()  # the other has perhaps imported them
    try:
        assert alone.call(imported_for_an_attention) == []
    finally:
        alone.close()


def build_past_a_python_engine() -> tuple[list[bool], str, str]:
    """Which candidates are the frontend's, what becomes of the first, and the second's name."""
    from cudnn.engines import is_python_engine, manifest
    from cudnn.frost import buffers
    from cudnn.sdpa import graph_analyzer

    # The frontend looks for a device and for its compiler before it offers an engine: let it find both.
    assert libraries().cudnn.backend_version()
    manifest._ANCHOR_NODE_TO_FAMILY.update(SDPA="frost_sdpa_fwd")  # as if it had not been removed
    graph_analyzer._device_props = lambda: {"deviceVer": 900, "multiProcessorCount": 132}
    buffers._DSL_STATE = (True, None)
    graph = attention(DType.BFLOAT16, backward=False, head=512)
    lowered = candidates(graph, h200(), None)
    of_python = [is_python_engine(plan.engine_id) for plan in lowered.plans]
    try:
        build_candidate(graph, lowered, 0)
        refusal = ""
    except Refused as error:
        refusal = str(error)
    build_candidate(graph, lowered, 1)
    return of_python, refusal, lowered.get_plan_name_at_index(1)


def test_a_python_engine_that_is_ranked_first_is_passed_over(child: Child) -> None:
    alone = Child()  # it changes the frontend
    try:
        of_python, refusal, built = alone.call(build_past_a_python_engine)
    finally:
        alone.close()
    assert of_python[:2] == [True, False], "the frontend ranks none first: find another graph for this test"
    assert "is an engine of the frontend, not of cuDNN" in refusal
    assert built.startswith("eng")
