"""Every cell of the support matrix: right beside the float64 CPU engine, or refused as the table says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudnn_actor.engines.base import Engine
from cudnn_actor.protocol import UnsupportedGraph

from ..engines.devices import why_not
from .bounds import error_over_bound
from .cases import run
from .oracle import truth
from .support_matrix import Cell, cells
from .support_record import Found, Outcome, write

CELLS = cells() if why_not("cuda") is None else cells()[:1]
"""Without a GPU one stands for all that are skipped."""


@pytest.fixture(scope="module")
def found(seed: int) -> Iterator[Found]:
    """What this run finds; kept as a file in the folder that `CUDNN_ACTOR_RECORD` names, if it names one."""
    found = Found(seed)
    yield found
    if folder := os.environ.get("CUDNN_ACTOR_RECORD"):
        write(found.record(), Path(folder))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_cell_is_computed_right_or_refused_as_the_table_says(
    engine: Engine, cell: Cell, seed: int, found: Found
) -> None:
    case, again = cell.case(seed), f"CUDNN_ACTOR_SEED={seed} {os.environ.get('PYTEST_CURRENT_TEST', '')}"
    try:
        ran = run(engine, case)
    except UnsupportedGraph as refusal:
        found.note(cell.name, Outcome(ran=False, error=0.0, plan=refusal.detail))
        if cell.refused is None:
            pytest.fail(f"{refusal}\n{case}\nto repeat it: {again}")
        return
    error = error_over_bound(case, ran.values, truth(case))
    found.note(cell.name, Outcome(ran=True, error=error, plan="/".join(ran.plan.split("/")[3:])))
    assert error <= 1.0, f"error is {error:.3g} times its bound, by {ran.plan}\n{case}\nto repeat it: {again}"
    assert cell.refused is None, f"{ran.plan} runs it: take {cell.refused!r} out of the table of refusals"
