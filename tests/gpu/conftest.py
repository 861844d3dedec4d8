from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudnn_actor.engines.base import Engine

from ..engines.devices import factory, why_not
from .seeds import seed_from

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all that is in this folder."""
    for item in items:
        if str(item.path).startswith(f"{HERE}/"):  # of thousands: `is_relative_to` takes longer
            item.add_marker(pytest.mark.gpu)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip everything here where there is no GPU: in one place, so that the report has one line for it."""
    if (why := why_not("cuda")) is not None:
        pytest.skip(why)


@pytest.fixture
def whole_device() -> None:
    """Skip a test that takes all of the device's memory where tests run side by side: others would have
    none."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("it takes all of the device's memory: run it without -n")


@pytest.fixture(scope="session")
def seed() -> int:
    """The seed of all that is random in this run."""
    return seed_from(os.environ)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An open CUDA engine, shared by a module's tests."""
    engine = factory("cuda")()
    engine.open()
    yield engine
    engine.close()
