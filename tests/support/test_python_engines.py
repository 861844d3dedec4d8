"""The frontend's engines written in Python are never taken for cuDNN's."""

from __future__ import annotations

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans.graphs import Refused, build_candidate
from cudnn_actor.protocol import DType

from .child import Child
from .claims import rows
from .frontend_claims import planned, sdpa


def build_past_a_python_engine() -> tuple[list[bool], str, str]:
    """Which candidates are the frontend's, what becomes of the first, and the second's name."""
    from cudnn.engines import is_python_engine
    from cudnn.frost import buffers
    from cudnn.sdpa import graph_analyzer

    libraries().cudnn  # noqa: B018 - loads it
    # The frontend looks for a device and for its compiler before it offers an engine: let it find both.
    graph_analyzer._device_props = lambda: {"deviceVer": 900, "multiProcessorCount": 132}
    buffers._DSL_STATE = (True, None)
    graph = sdpa(dtype=DType.BFLOAT16, head=512)
    planned(graph)
    of_python = [is_python_engine(plan.engine_id) for plan in graph.plans]
    stand_in = next(rows()).graph  # for the errata: no row is an attention yet
    try:
        build_candidate(stand_in, graph, 0)
        refusal = ""
    except Refused as error:
        refusal = str(error)
    build_candidate(stand_in, graph, 1)
    return of_python, refusal, graph.get_plan_name_at_index(1)


def test_a_python_engine_that_is_ranked_first_is_passed_over(child: Child) -> None:
    alone = Child()  # it changes the frontend
    try:
        of_python, refusal, built = alone.call(build_past_a_python_engine)
    finally:
        alone.close()
    assert of_python[:2] == [True, False], "the frontend offers none: find another graph for this test"
    assert "is an engine of the frontend, not of cuDNN" in refusal
    assert built.startswith("eng")
