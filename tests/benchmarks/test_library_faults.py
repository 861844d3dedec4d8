"""What is asked of a cuDNN on a GPU about the faults that the engine avoids."""

from __future__ import annotations

import pytest

from benchmarks.library_faults import PROBLEMS, excluded
from cudnn_actor.engines.cuda.plans.errata import _ERRATA, _Erratum, erratum


@pytest.mark.parametrize("fault", _ERRATA, ids=[known.what[:40] for known in _ERRATA])
def test_every_erratum_has_a_problem_that_meets_it(fault: _Erratum) -> None:
    assert any(fault.applies(graph) for graph in PROBLEMS.values())


def test_of_each_excluded_engine_one_candidate_is_tried() -> None:
    names = ["eng8_k1=0", "eng2", "eng8_k1=1", "eng0"]
    assert excluded(PROBLEMS["3x3, 64 channels, a number and relu, float32"], names) == [0, 3]


@pytest.mark.parametrize(
    ("problem", "engine"),
    [
        ("gradient of 2x1 depthwise filters, float16", "eng61"),
        ("gradient of 4x2 depthwise filters, bfloat16", "eng47"),
        ("gradient of 5x5 depthwise filters, float32", "eng17"),
    ],
)
def test_an_engine_that_rounds_parts_of_sums_is_excluded_for_its_dtype_alone(
    problem: str, engine: str
) -> None:
    others = {name: graph for name, graph in PROBLEMS.items() if "depthwise filters" in name}
    of_dtype = {name for name in others if name.split(", ")[1] == problem.split(", ")[1]}
    for version in (91900, 92801):
        found = {name for name, graph in others.items() if erratum(graph, f"{engine}_k2=0", version)}
        assert found == of_dtype
