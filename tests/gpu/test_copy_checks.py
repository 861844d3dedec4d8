"""The self-check of copies on a GPU: they pass, and what copies something else does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cudnn_actor.engines.cuda import CudaEngine
from cudnn_actor.engines.cuda.checking.self_check import BuildContext

from ..engines.cuda.checking.test_copy_checks import CASES, GRAPHS, fault


@pytest.fixture
def context() -> Iterator[BuildContext]:
    engine = CudaEngine()
    engine.open()
    yield BuildContext(engine.handle, engine.stream)
    engine.close()


@pytest.mark.parametrize("name", GRAPHS)
def test_copies_pass(context: BuildContext, name: str) -> None:
    assert fault(GRAPHS[name], None, context) is None


@pytest.mark.parametrize(("name", "change"), CASES, ids=lambda one: getattr(one, "__name__", one))
def test_what_copies_something_else_does_not(context: BuildContext, name: str, change: Any) -> None:
    assert fault(GRAPHS[name], change, context) is not None
    assert fault(GRAPHS[name], None, context) is None, "the next plan was blamed"
