"""Recurrent layers, and their gradients, in the fast CPU engine."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast.recurrent import recurrent
from cudnn_actor.engines.cpu.fast.recurrent_gradients import (
    recurrent_backward_data,
    recurrent_backward_weights,
)
from cudnn_actor.engines.cpu.fast.recurrent_walks import Sizes
from cudnn_actor.engines.cpu.scratch import Scratch, aligned_bytes
from cudnn_actor.protocol import (
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    RecurrentMode,
    TensorSpec,
)

from .kernel_cases import Make, check

MAKES: dict[Any, Make] = {
    Recurrent: recurrent,
    RecurrentBackwardData: recurrent_backward_data,
    RecurrentBackwardWeights: recurrent_backward_weights,
}
LSTM: Any = Recurrent(x="x", w_ih="w", w_hh="r", mode=RecurrentMode.LSTM)


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("recurrent", MAKES, 60)


def test_a_step_and_a_sequence_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is a turn, and each sequence a task of its own."""
    monkeypatch.setattr("cudnn_actor.engines.cpu.fast.recurrent_walks._MOST_BYTES", 1)
    monkeypatch.setattr("cudnn_actor.engines.cpu.fast.recurrent_walks._LEAST_WORK", 1)
    monkeypatch.setattr("cudnn_actor.engines.cpu.fast.recurrent_walks._LEAST_ROWS", 1)
    assert len(Sizes.of(LSTM, (2, 24, 6), 64).tasks) == 2 * 8
    check("recurrent", MAKES, 40)


def test_sequences_are_dealt_to_tasks_where_steps_are_large() -> None:
    assert [task.rows for task in Sizes.of(LSTM, (1, 512, 128), 31).tasks] == [slice(0, 31)]
    halves = [slice(0, 16), slice(16, 32)]
    assert [task.rows for task in Sizes.of(LSTM, (1, 512, 128), 32).tasks] == halves
    assert [task.way for task in Sizes.of(LSTM, (2, 512, 128), 32).tasks] == [0, 0, 1, 1]
    assert len(Sizes.of(LSTM, (1, 64, 16), 32).tasks) == 1
    assert [len(Sizes.of(LSTM, (1, 4096, 1024), batch).tasks) for batch in (127, 128, 511, 512)] == [
        2,
        4,
        4,
        8,
    ]


def test_memory_for_the_input_s_part_does_not_grow_with_the_steps() -> None:
    assert kept_bytes(2000) == kept_bytes(4000)


def test_long_sequences_take_several_turns_between_which_progress_is_noted() -> None:
    dims: dict[str, tuple[int, ...]] = {
        "x": (9000, 1, 1),
        "w_ih": (1, 4, 1),
        "w_hh": (1, 4, 1),
        "y": (9000, 1, 1),
    }
    dims |= {"reserve": (1, 9000, 1, 5, 1)}
    given: Any = {name: name for name in dims}
    back: Any = RecurrentBackwardData(**given, dy="y", mode=RecurrentMode.LSTM)
    layer: Any = Recurrent(**given, mode=RecurrentMode.LSTM)
    arrays = {name: np.zeros(each, np.float32) for name, each in dims.items()}
    specs = {name: TensorSpec.packed(each) for name, each in dims.items()}
    alone: Any = msgspec.structs.replace(back, reserve=None)
    makes = (recurrent, layer, 3), (recurrent_backward_data, back, 3), (recurrent_backward_data, alone, 6)
    for make, node, turns in makes:
        kernel: Any = make(node, {name: specs[name] for name, _ in node.named() if name in specs})
        lane = Scratch(aligned_bytes(kernel.footprint(1)))
        steps = kernel.bind(arrays, {**arrays, "dx": arrays["x"].copy()}, [lane])
        walks = [call for step in steps for call in step if type(call).__name__.startswith("_Walk")]
        assert len(walks) == turns


def kept_bytes(steps: int) -> int:
    """Bytes that a kernel keeps of a layer with so many steps."""
    dims = {"x": (steps, 8, 16), "w_ih": (1, 256, 16), "w_hh": (1, 256, 64)}
    node: Any = Recurrent(x="x", w_ih="w_ih", w_hh="w_hh", y="y", mode=RecurrentMode.LSTM)
    kernel: Any = recurrent(node, {name: TensorSpec.packed(each) for name, each in dims.items()})
    arrays = {name: np.zeros(each, np.float32) for name, each in dims.items()}
    lane = Scratch(aligned_bytes(kernel.footprint(1)))
    kernel.bind(arrays, {"y": np.zeros((steps, 8, 64), np.float32)}, [lane])
    return lane.kept_bytes
