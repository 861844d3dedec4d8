"""Marks what is in this folder, and skips it where cuDNN's packages are missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudnn_actor.engines.cuda.diagnosis.gpus import Driver
from cudnn_actor.engines.cuda.diagnosis.inventory import take_inventory

from .child import Child

HERE = Path(__file__).parent
PLAN = "plan"
"""The property in which a test notes the plan that it has built."""


def why_not() -> str | None:
    """Why nothing here can run; None if it can."""
    if importlib.util.find_spec("cudnn") is None:
        return "cuDNN's packages are not installed here: `make test-support` installs and uses them"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all that is in this folder."""
    for item in items:
        if str(item.path).startswith(f"{HERE}/"):  # of thousands: `is_relative_to` takes longer
            item.add_marker(pytest.mark.support)


@pytest.fixture(scope="session", autouse=True)
def child() -> Iterator[Child]:
    """The process that loads cuDNN, for all tests."""
    if (why := why_not()) is not None:
        pytest.skip(why)
    child = Child()
    yield child
    child.close()


def pytest_report_header() -> str:
    """The versions that the claims are held against."""
    found = take_inventory(Driver(found=False, detail="")).packages
    return "packages of cuDNN: " + (", ".join(f"{each.name} {each.version}" for each in found) or "none")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many plans were built."""
    reports = [r for r in terminalreporter.getreports("passed") if PLAN in dict(r.user_properties)]
    if reports:
        plans = [str(dict(report.user_properties)[PLAN]) for report in reports]
        whole = sum("+" not in plan for plan in plans)
        seconds = sum(report.duration for report in reports)
        terminalreporter.write_line(
            f"{len(plans)} graphs have plans, {whole} of them of one step: {seconds:.0f} s of all processes"
        )
