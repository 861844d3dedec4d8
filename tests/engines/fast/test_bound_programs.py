"""Which programs a plan stays bound to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast import bound_programs
from cudnn_actor.engines.cpu.fast.bound_programs import BoundPrograms
from cudnn_actor.engines.cpu.fast.plan import FastProgram


class _Bindings:
    """Counts how often a program is bound to each buffer."""

    def __init__(self) -> None:
        self.programs = BoundPrograms()
        self.counts: dict[int, int] = {}

    def run(self, buffer: np.ndarray) -> FastProgram:
        def bind() -> FastProgram:
            self.counts[id(buffer)] = self.counts.get(id(buffer), 0) + 1
            return FastProgram((buffer,), (), ())

        return self.programs.of([buffer], bind)


def test_a_program_that_every_run_uses_is_kept_while_others_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bound_programs, "_MOST_BYTES", 1024)
    bindings, used = _Bindings(), np.zeros(100, np.float32)
    others = [np.zeros(100, np.float32) for _ in range(50)]
    for other in others:
        bindings.run(used)
        bindings.run(other)
    assert bindings.counts[id(used)] == 1
    bindings.run(others[0])
    assert bindings.counts[id(others[0])] == 2, "the programs are bounded"


def test_other_arrays_on_the_same_memory_have_the_same_program() -> None:
    bindings, buffer = _Bindings(), np.zeros((4, 5), np.float32)
    programs: set[Any] = {bindings.run(each) for each in (buffer, buffer[:], buffer.reshape(4, 5))}
    assert len(programs) == 1
    assert bindings.run(buffer.reshape(5, 4)) not in programs
