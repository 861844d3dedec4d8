"""Copies of views, block by block: reshapes, transposes, slices, padding, concatenation and bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast import movement
from cudnn_actor.engines.cpu.fast.kernels import Kernel
from cudnn_actor.protocol import DType, Operation, TensorSpec
from cudnn_actor.protocol.operations import (
    BitCast,
    BorderPad,
    Concat,
    Pad,
    PadMode,
    Reshape,
    Slice,
    Transpose,
)

from ....in_one_test import cases_in_one_test
from .kernel_cases import check_any
from .kernel_runs import array_of, calls_of, run

MAKERS: dict[type, Any] = {
    BitCast: movement.bit_cast,
    BorderPad: movement.border_pad,
    Concat: movement.concat,
    Pad: movement.pad,
    Reshape: movement.reshape,
    Slice: movement.slice_,
    Transpose: movement.transpose,
}


def made(operation: Operation[Any], specs: dict[str, TensorSpec]) -> Kernel | None:
    found: Kernel | None = MAKERS[type(operation)](operation, specs)
    return found


def test_random_problems_are_exact() -> None:
    check_any("movement", made, 300, least=251, allowed=0)


LARGE = (2, 130, 40, 33)


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize(
    ("operation", "given"),
    [
        (Transpose(x="x", y="y", axes=(0, 2, 3, 1)), lambda x: x.transpose(0, 2, 3, 1)),
        (Transpose(x="x", y="y", axes=(3, 0, 2, 1)), lambda x: x.transpose(3, 0, 2, 1)),
        (Reshape(x="x", y="y", dims=(260, 1320)), lambda x: x.reshape(260, 1320)),
        (
            Slice(x="x", y="y", starts=(1, 129, 0, 3), steps=(-1, -2, 1, 1), sizes=(2, 60, 40, 30)),
            lambda x: x[::-1, 129:9:-2, :, 3:],
        ),
        (
            BorderPad(x="x", y="y", before=(0, 0, 3, 2), after=(0, 0, 1, 2), mode=PadMode.REFLECT),
            lambda x: np.pad(x, [(0, 0), (0, 0), (3, 1), (2, 2)], "reflect"),
        ),
        (
            Pad(x="x", y="y", before=(0, 0, 1, 2), after=(0, 1, 1, 0), steps=(1, 1, 1, 1), value=-1.0),
            lambda x: np.pad(x, [(0, 0), (0, 1), (1, 1), (2, 0)], constant_values=-1),
        ),
        (Concat(operands=("x", "x"), y="y", axis=1), lambda x: np.concatenate([x, x], 1)),
    ],
    ids=lambda of: of.kind if isinstance(of, Operation) else "",
)
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_large_arrays_are_copied_in_blocks_of_any_layout(operation: Any, given: Any, lanes: int) -> None:
    rng = np.random.default_rng(38)
    x = rng.normal(size=LARGE).astype(np.float32)
    names = ["operands[0]", "operands[1]"] if isinstance(operation, Concat) else ["x"]
    for order in ((0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)):
        spec = strided(LARGE, order)
        specs = dict.fromkeys(names, spec)
        wanted = given(x)
        specs["y"] = strided(wanted.shape, order[-wanted.ndim :] if wanted.ndim == 4 else (1, 0))
        y = array_of(specs["y"])
        kernel = made(operation, specs)
        assert kernel is not None
        run(kernel, {name: array_of(spec, x) for name in names}, {"y": y}, lanes)
        np.testing.assert_array_equal(y, wanted)


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("mode", PadMode)
@pytest.mark.parametrize("dims", [(1, 4), (2, 3), (5, 2)])
def test_a_border_that_is_much_longer_than_x_takes_few_calls(mode: PadMode, dims: tuple[int, ...]) -> None:
    for before, after in (((0, 0), (0, 700_000)), ((3, 200_000), (2, 1)), ((100_000, 1), (70_000, 0))):
        operation = BorderPad(x="x", y="y", before=before, after=after, mode=mode)
        x = np.arange(np.prod(dims), dtype=np.float32).reshape(dims)
        specs = {"x": TensorSpec.packed(dims, DType.FLOAT32)}
        wanted = np.pad(x, list(zip(before, after, strict=True)), mode.value)
        specs["y"] = TensorSpec.packed(wanted.shape, DType.FLOAT32)
        kernel = made(operation, specs)
        assert kernel is not None
        y = array_of(specs["y"])
        assert calls_of(kernel, {"x": array_of(specs["x"], x)}, {"y": y}) < 1000
        run(kernel, {"x": array_of(specs["x"], x)}, {"y": y}, 2)
        np.testing.assert_array_equal(y, wanted)


def strided(dims: tuple[int, ...], order: tuple[int, ...]) -> TensorSpec:
    """A spec with its axes in this order in memory, the slowest first."""
    strides, step = [0] * len(dims), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= dims[axis]
    return TensorSpec(dims=dims, strides=tuple(strides), dtype=DType.FLOAT32)


@pytest.mark.parametrize(
    ("dims", "order", "wanted", "into"),
    [
        ((8, 96, 64, 64), (0, 3, 2, 1), (8, 48, 2, 4096), (0, 3, 2, 1)),
        ((1000, 3000), (1, 0), (3000, 1000), (1, 0)),
    ],
)
def test_scratch_of_a_reshape_between_layouts_is_bounded(
    dims: tuple[int, ...], order: tuple[int, ...], wanted: tuple[int, ...], into: tuple[int, ...]
) -> None:
    specs = {"x": strided(dims, order), "y": strided(wanted, into)}
    kernel = made(Reshape(x="x", y="y", dims=wanted), specs)
    assert kernel is not None
    assert kernel.footprint(64) <= 4 << 20
    x = np.random.default_rng(1).normal(size=dims).astype(np.float32)
    for lanes in (1, 3):
        y = array_of(specs["y"])
        run(kernel, {"x": array_of(specs["x"], x)}, {"y": y}, lanes)
        np.testing.assert_array_equal(y, x.reshape(wanted))
