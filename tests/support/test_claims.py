"""What is claimed to run has plans for an H200, and the sources of all kernels compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cudnn_actor.engines.cuda.planning.rearranging import rearrangements
from cudnn_actor.engines.cuda.planning.widening import is_widened

from ..whole import WHOLE
from .building import first_plan
from .child import Child
from .claims import Row, every_row, rows
from .conftest import PLAN, why_not
from .nvrtc import compile_cuda
from .sources import every_source, sources

AVAILABLE = why_not() is None
ROWS = rows() if AVAILABLE else [next(every_row())]
"""Without cuDNN, one stands for all that are skipped. So it does of kernels."""
NAMES, TEXTS = zip(*(sources() if AVAILABLE else [next(every_source())]), strict=True)
FIRSTS = {*{name.split("-")[0]: text for name, text in zip(NAMES[::-1], TEXTS[::-1], strict=True)}.values()}
"""The first source of each kind of kernel."""
Note = Callable[[str, object], None]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_claimed_graph_has_a_plan(child: Child, row: Row, record_property: Note) -> None:
    plan = child.call(first_plan, row.graph)
    record_property(PLAN, plan)
    copied = is_widened(row.graph) or any(each.copies for each in rearrangements(row.graph))
    several = "+" in plan and not copied
    assert not (row.whole and several), f"it takes several steps: {plan}, instead of {row.recorded}"


@pytest.mark.parametrize("source", TEXTS, ids=NAMES)
def test_a_kernel_compiles(child: Child, source: str) -> None:
    """Each as far as PTX, and one of each kind to machine code; all of them with `TEST_ALL=1`."""
    assert child.call(compile_cuda, source, WHOLE or source in FIRSTS) > 0
