"""NVTX ranges around launches, with a stand-in for `cupy.cuda.nvtx`: there is no GPU here."""

from __future__ import annotations

import types
from typing import Any

import pytest

from cudnn_actor.engines.cuda.device.launch_ranges import with_ranges


class Nvtx:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def RangePush(self, name: str) -> None:  # noqa: N802 - as in CuPy
        self.seen.append(name)

    def RangePop(self) -> None:  # noqa: N802
        self.seen.append("pop")


def test_a_launch_is_in_a_range_that_its_plan_names_also_when_it_fails() -> None:
    nvtx = Nvtx()

    def execute(plan: Any, *arguments: Any) -> None:
        nvtx.seen.append(f"run {arguments}")
        if plan.tag == "bad":
            raise ValueError("failed")

    ranged = with_ranges(execute, nvtx)
    ranged(types.SimpleNamespace(tag="cuda/conv"), 1, 2)
    with pytest.raises(ValueError, match="failed"):
        ranged(types.SimpleNamespace(tag="bad"))
    assert nvtx.seen == ["cuda/conv", "run (1, 2)", "pop", "bad", "run ()", "pop"]
