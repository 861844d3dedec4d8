"""Every cell of the support matrix: right beside the definition in float64, or refused as the table says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cudnn_actor.engines.base import Engine
from cudnn_actor.protocol import UnsupportedGraph

from ..engines.devices import why_not
from .families import FAMILIES, Family
from .support_record import Found, Outcome, write

CELLS = [(family, cell) for family in FAMILIES.values() for cell in family.cells()]
if why_not("cuda") is not None:
    CELLS = CELLS[:1]
"""Without a GPU one stands for all that are skipped."""


@pytest.fixture(scope="module")
def found(seed: int) -> Iterator[Found]:
    """What this run finds; kept as a file in the folder that `CUDNN_ACTOR_RECORD` names, if it names one."""
    found = Found(seed)
    yield found
    if folder := os.environ.get("CUDNN_ACTOR_RECORD"):
        write(found.record(), Path(folder), os.environ.get("PYTEST_XDIST_TESTRUNUID", "")[:8])


@pytest.mark.parametrize(("family", "cell"), CELLS, ids=[cell.name for _, cell in CELLS])
def test_a_cell_is_computed_right_or_refused_as_the_table_says(
    engine: Engine, family: Family, cell: Any, seed: int, found: Found
) -> None:
    case, again = cell.case(seed), f"CUDNN_ACTOR_SEED={seed} {os.environ.get('PYTEST_CURRENT_TEST', '')}"
    try:
        ran = family.run(engine, case)
    except UnsupportedGraph as refusal:
        found.note(cell.name, Outcome(ran=False, error=0.0, plan=refusal.detail))
        if cell.refused is None:
            pytest.fail(f"{refusal}\n{case}\nto repeat it: {again}")
        return
    error = family.error(case, ran.values, family.truth(case))
    found.note(cell.name, Outcome(ran=True, error=error, plan="/".join(ran.plan.split("/")[3:])))
    assert error <= 1.0, f"error is {error:.3g} times its bound, by {ran.plan}\n{case}\nto repeat it: {again}"
    assert cell.refused is None, f"{ran.plan} runs it: take {cell.refused!r} out of the table of refusals"
