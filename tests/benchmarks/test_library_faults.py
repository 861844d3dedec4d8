"""What is asked of a cuDNN on a GPU about the faults that the engine avoids."""

from __future__ import annotations

import pytest

from benchmarks.library_faults import PROBLEMS, excluded
from cudnn_actor.engines.cuda.plans.errata import _ERRATA, _Erratum


@pytest.mark.parametrize("fault", _ERRATA, ids=[known.what[:40] for known in _ERRATA])
def test_every_erratum_has_a_problem_that_meets_it(fault: _Erratum) -> None:
    assert any(fault.applies(graph) for graph in PROBLEMS.values())


def test_of_each_excluded_engine_one_candidate_is_tried() -> None:
    names = ["eng8_k1=0", "eng2", "eng8_k1=1", "eng0"]
    assert excluded(PROBLEMS["3x3, 64 channels, a number and relu, float32"], names) == [0, 3]
