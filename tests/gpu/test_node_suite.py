"""ONNX's own node suite on a GPU: what is right on the CPU engine is right there, and nothing is wrong.

    python -m pytest -m gpu tests/gpu/test_node_suite.py

Every case is a plan of its own, so that it takes some minutes. The same cases are run and recorded, in as
many processes as `--jobs` says, by `python -m tests.onnx.node_suite --device CUDA --out DIR`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("onnx")

from cudnn_actor.onnx import backend

from ..onnx.node_suite import Verdict, cases, judged

_PARTS = 24


@pytest.fixture(scope="module")
def every_case() -> list[Any]:
    return cases()


@pytest.fixture(autouse=True)
def the_shared_services_end() -> Iterator[None]:
    yield
    backend.close()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(_PARTS))
def test_every_case_is_as_on_the_cpu_engine(every_case: list[Any], part: int) -> None:
    chosen = every_case[part::_PARTS]
    pairs = zip(judged(chosen, "CPU"), judged(chosen, "CUDA"), strict=True)
    differing = [on_gpu for on_cpu, on_gpu in pairs if on_gpu.verdict is not on_cpu.verdict]
    assert [each for each in differing if each.verdict is not Verdict.RIGHT] == []
