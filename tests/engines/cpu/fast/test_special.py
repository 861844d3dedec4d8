"""The error function and GELU of float32, beside float64."""

from __future__ import annotations

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.special import erf, erf_by_choice, erfc, erfc_by_choice
from cudnn_actor.engines.cpu.fast.pointwise import make
from cudnn_actor.protocol import DType, Pointwise, PointwiseMode, TensorSpec

from .kernel_runs import run

STEP = 26_111
"""A prime: 321 numbers of each exponent."""


def floats() -> np.ndarray:
    """Numbers of every exponent and both signs, zeros and infinities."""
    positive = np.arange(0, 0x7F800000, STEP, dtype=np.uint32).view(np.float32)
    ends = np.array([0, np.inf], np.float32)
    return np.concatenate([positive, -positive, ends, -ends])


def computed(mode: PointwiseMode, x: np.ndarray) -> np.ndarray:
    spec = TensorSpec.packed(x.shape, DType.FLOAT32)
    kernel = make(Pointwise(mode=mode, operands=(0,), result=1), {"operands[0]": spec, "result": spec})
    assert kernel is not None
    y = np.empty_like(x)
    run(kernel, {"operands[0]": x}, {"result": y})
    return y


def test_the_error_function_is_off_by_a_few_units_in_the_last_place() -> None:
    x = floats()
    wanted = erf(x.astype(np.float64))
    off = np.abs(computed(PointwiseMode.ERF, x) - wanted)
    assert (off / np.spacing(np.abs(wanted).astype(np.float32))).max() < 4
    assert off.max() < 1.8e-7


def test_gelu_is_off_by_two_unit_roundoffs_of_itself_and_1() -> None:
    x = floats()[:-1]
    with np.errstate(under="ignore"):
        wanted = x.astype(np.float64) * erfc(x.astype(np.float64) * -np.sqrt(0.5)) / 2
    off = np.abs(computed(PointwiseMode.GELU, x)[np.isfinite(wanted)] - wanted[np.isfinite(wanted)])
    assert (off / (1 + np.abs(wanted[np.isfinite(wanted)]))).max() < 1.2e-7
    assert computed(PointwiseMode.GELU, np.array([np.inf], np.float32)) == np.inf


@pytest.mark.parametrize("mode", [PointwiseMode.ERF, PointwiseMode.GELU])
def test_nan_stays_nan(mode: PointwiseMode) -> None:
    x = np.array([np.nan, 1.0, -np.nan], np.float32)
    np.testing.assert_array_equal(np.isnan(computed(mode, x)), [True, False, True])


def test_error_functions_by_choice_are_the_same_bit_for_bit() -> None:
    some = np.array([0.0, -0.0, 0.46875, -0.46875, 4.0, -4.0, 27.3, -27.3, 28.0, np.inf, -np.inf, np.nan])
    x = np.concatenate([some, np.nextafter(some, np.inf), np.linspace(-30, 30, 9999), np.logspace(-300, 3)])
    with np.errstate(all="ignore"):
        pairs = [(erf(x), erf_by_choice(x)), (erfc(x), erfc_by_choice(x))]
    for wanted, found in pairs:
        np.testing.assert_array_equal(found.view(np.int64)[~np.isnan(x)], wanted.view(np.int64)[~np.isnan(x)])
        assert np.isnan(found[np.isnan(x)]).all()
