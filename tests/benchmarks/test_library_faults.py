"""What is asked of a cuDNN on a GPU about the faults that the engine avoids."""

from __future__ import annotations

import pytest

from benchmarks.library_faults.candidates import excluded
from benchmarks.library_faults.problems import PROBLEMS
from cudnn_actor.engines.cuda.cudnn.errata import _ERRATA, Erratum, erratum


@pytest.mark.parametrize("fault", _ERRATA, ids=[known.what[:40] for known in _ERRATA])
def test_every_erratum_has_a_problem_that_meets_it(fault: Erratum) -> None:
    assert any(fault.applies(graph) for graph in PROBLEMS.values())


def test_of_each_excluded_engine_one_candidate_is_tried() -> None:
    names = ["eng8_k1=0", "eng2", "eng8_k1=1", "eng0"]
    assert excluded(PROBLEMS["3x3, 64 channels, a number and relu, float32"], names) == [0, 3]


@pytest.mark.parametrize(
    ("engine", "dtype", "gradients"),
    [
        ("eng61", "float16", True),
        ("eng24", "bfloat16", True),
        ("eng47", "bfloat16", True),
        ("eng17", "float16", True),
        ("eng6", "float16", False),
    ],
)
def test_an_engine_that_rounds_more_than_a_sum_is_excluded_for_its_dtype_and_direction_alone(
    engine: str, dtype: str, gradients: bool
) -> None:
    in_groups = {name: graph for name, graph in PROBLEMS.items() if "filters" in name}
    wanted = {
        name
        for name in in_groups
        if name.split(", ")[1] == dtype and name.startswith("gradient of") is gradients
    }
    assert wanted
    for version in (91900, 92801):
        assert {name for name, of in in_groups.items() if erratum(of, f"{engine}_k2=0", version)} == wanted
