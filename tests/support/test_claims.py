"""What is claimed to run has plans for an H200, and the sources of all kernels compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from cudnn_actor.engines.cuda.planning.rearranging import rearrangements
from cudnn_actor.engines.cuda.planning.widening import is_widened

from .building import first_plan
from .child import Child
from .claims import EVERY, Row, rows
from .conftest import PLAN, why_not
from .nvrtc import compile_cuda
from .sources import sources

MOST = None if why_not() is None else 1
"""Without cuDNN, one stands for all that are skipped."""
ROWS = list(itertools.islice(rows(), MOST))
NAMES, TEXTS = zip(*itertools.islice(sources(), MOST), strict=True)
Note = Callable[[str, object], None]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_claimed_graph_has_a_plan(child: Child, row: Row, record_property: Note) -> None:
    plan = child.call(first_plan, row.graph)
    record_property(PLAN, plan)
    copied = is_widened(row.graph) or any(each.copies for each in rearrangements(row.graph))
    several = "+" in plan and not copied
    assert not (row.whole and several), f"it takes several steps: {plan}, instead of {row.recorded}"


@pytest.mark.parametrize(("number", "source"), list(enumerate(TEXTS)), ids=NAMES)
def test_a_kernel_compiles(child: Child, number: int, source: str) -> None:
    """Each as far as PTX, and each `EVERY`th to machine code."""
    assert child.call(compile_cuda, source, number % EVERY == 0) > 0
