"""What bad input gets: the field, the value, the fix, before anything reaches an engine."""

from __future__ import annotations

import fractions

import numpy as np
import pytest

from cudnn_actor.protocol import BufferRef, Compute, ConvSpec, InvalidRequest
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.operations import Attention, LayerNorm

from ..in_one_test import cases_in_one_test
from .lowering_fixtures import CONV, backward_data, backward_filter, forward, ref

ARRAY: np.ndarray = np.zeros((2, 4, 8, 8), np.float32)
GROUPS_3 = ConvSpec.symmetric(2, pad=1, groups=3)
SQUARE = ref((1, 1, 3, 3))
SPECLESS = BufferRef(slot=0, generation=1, spec=None, device="cpu")  # type: ignore[arg-type]

BAD: dict[str, tuple[Compute, str, str, str]] = {
    "groups that do not divide": (forward(conv=GROUPS_3), "groups", "3", "common divisor"),
    "channels that do not match": (forward(w=ref((6, 3, 3, 3))), "w", "(6, 3, 3, 3)", "give w 4 channels"),
    "wrong output dims": (forward(y=ref((2, 6, 7, 8))), "y", "(2, 6, 7, 8)", "give it dims (2, 6, 8, 8)"),
    "wrong output batch": (forward(y=ref((1, 6, 8, 8))), "y", "(1, 6, 8, 8)", "give it dims (2, 6, 8, 8)"),
    "wrong output rank": (forward(y=ref((2, 6, 8))), "y", "(2, 6, 8)", "give it dims (2, 6, 8, 8)"),
    "wrong rank of x": (forward(x=ref((2, 4, 8))), "x", "(2, 4, 8)", "N, C, spatial"),
    "wrong rank of w": (forward(w=ref((6, 4, 3))), "w", "(6, 4, 3)", "N, C, spatial"),
    "wrong rank of conv": (forward(conv=ConvSpec.symmetric(1)), "x", "(2, 4, 8, 8)", "N, C, spatial"),
    "a filter past the input": (forward(w=ref((6, 4, 11, 3))), "w", "(6, 4, 11, 3)", "pad more"),
    "operands of two dtypes": (
        forward(w=ref((6, 4, 3, 3), "float16")),
        "w",
        "float16",
        "upload(array, dtype=",
    ),
    "a result that is too narrow": (forward(y=ref((2, 6, 8, 8), "float16")), "y", "float16", "use float32"),
    "a result that is too wide": (forward(y=ref((2, 6, 8, 8), "float64")), "y", "float64", "use float32"),
    "a bias of another length": (forward(bias=ref((5,))), "bias", "(5,)", "give it dims (6,)"),
    "a bias of another shape": (forward(bias=ref((6, 1, 1, 1))), "bias", "(6, 1, 1, 1)", "(1, 6, 1, 1)"),
    "operands of int16": (
        forward(x=ref((2, 4, 8, 8), "int16"), w=ref((6, 4, 3, 3), "int16")),
        "x",
        "int16",
        "convert both operands to one of float64",
    ),
    "operands of bool": (
        forward(x=ref((2, 4, 8, 8), "bool"), w=ref((6, 4, 3, 3), "bool")),
        "x",
        "bool",
        "convert both operands to one of float64",
    ),
    "no taps": (forward(w=ref((6, 4, 0, 3))), "w", "(6, 4, 0, 3)", "at least 1"),
    "no dims": (forward(x=ref(())), "x", "()", "give both dims N, C, spatial"),
    "a bias of another dtype": (forward(bias=ref((6,), "int8")), "bias", "int8", "use float32"),
    "alpha nan": (forward(alpha=float("nan")), "alpha", "nan", "as in alpha=1.0"),
    "alpha inf": (forward(alpha=float("inf")), "alpha", "inf", "as in alpha=1.0"),
    "beta -inf": (forward(beta=float("-inf")), "beta", "-inf", "as in beta=1.0"),
    "beta past float64": (forward(beta=10**309), "beta", "1" + 199 * "0" + "...", "as in beta=1.0"),
    "alpha as text": (forward(alpha="1"), "alpha", "'1'", "as in alpha=1.0"),
    "alpha as a bool": (forward(alpha=True), "alpha", "True", "as in alpha=1.0"),
    "alpha of more than 64 bits": (forward(alpha=10**30), "alpha", str(10**30), "as in alpha=1.0"),
    "alpha complex": (forward(alpha=1j), "alpha", "1j", "as in alpha=1.0"),
    "an array as x": (forward(x=ARRAY), "x", "ndarray of float32 (2,", "upload arrays first"),
    "an array as bias": (
        forward(bias=ARRAY),
        "bias",
        "ndarray of float32 (2,",
        "upload arrays first",
    ),
    "None as y": (forward(y=None), "y", "None", "allocate it: await gpu.empty(dims)"),
    "None as x": (forward(x=None), "x", "None", "await gpu.upload(array)"),
    "None as conv": (forward(conv=None), "conv", "None", "ConvSpec.symmetric(2)"),
    "a conv as epilogue": (forward(epilogue=CONV), "epilogue", "ConvSpec(", "Epilogue(activation="),
    "None as numerics": (forward(numerics=None), "numerics", "None", "Numerics(tf32="),
    "a reference without a spec": (forward(x=SPECLESS), "x", "None", "references unchanged"),
    "data: wrong dy": (
        backward_data(dy=ref((2, 6, 9, 8))),
        "dy",
        "(2, 6, 9, 8)",
        "give it dims (2, 6, 8, 8)",
    ),
    "data: wrong dx": (backward_data(dx=ref((2, 4, 9, 8))), "dy", "(2, 6, 8, 8)", "or give dx other dims"),
    "data: None as dx": (backward_data(dx=None), "dx", "None", "allocate it: await gpu.empty(dims)"),
    "data: wrong channels": (backward_data(dx=ref((2, 5, 8, 8))), "w", "(6, 4, 3, 3)", "give w 5 channels"),
    "data: groups": (backward_data(conv=GROUPS_3), "groups", "3", "common divisor"),
    "data: dtypes": (backward_data(w=ref((6, 4, 3, 3), "int8")), "w", "int8", "upload(array, dtype="),
    "data: an array": (
        backward_data(dy=ARRAY),
        "dy",
        "ndarray of float32 (2,",
        "upload arrays first",
    ),
    "data: beta nan": (backward_data(beta=float("nan")), "beta", "nan", "as in beta=1.0"),
    "filter: wrong dy": (
        backward_filter(dy=ref((2, 6, 8, 7))),
        "dy",
        "(2, 6, 8, 7)",
        "give it dims (2, 6, 8, 8)",
    ),
    "filter: wrong channels": (
        backward_filter(dw=ref((6, 2, 3, 3))),
        "w",
        "(6, 2, 3, 3)",
        "give w 4 channels",
    ),
    "filter: rank": (backward_filter(x=ref((2, 4, 8))), "x", "(2, 4, 8)", "N, C, spatial"),
    "filter: dtypes": (
        backward_filter(dy=ref((2, 6, 8, 8), "float64")),
        "dy",
        "float64",
        "upload(array, dtype=",
    ),
    "filter: an array": (
        backward_filter(dw=ARRAY),
        "dw",
        "ndarray of float32 (2,",
        "upload arrays first",
    ),
}


@cases_in_one_test
@pytest.mark.parametrize(("message", "field", "value", "fix"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_with_field_value_and_fix(
    message: Compute, field: str, value: str, fix: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        lower(message)
    error = caught.value
    assert error.field == field
    assert error.value.startswith(value)
    assert fix in error.fix
    assert str(error) == f"{error.field}={error.value}: {error.problem}; {error.fix}"
    assert (error.ran, error.retry_safe) == (False, False)


@pytest.mark.parametrize(
    "message",
    [
        LayerNorm(x=ref((2, 3)), scale=ref((3,), "float16"), y=ref((2, 3))),
        Attention(q=SQUARE, k=SQUARE, v=SQUARE, y=SQUARE, bias=ref((1, 1, 3, 3), "uint8")),
    ],
    ids=lambda message: message.kind,
)
def test_a_dtype_is_proposed_once(message: Compute) -> None:
    with pytest.raises(InvalidRequest, match=r"have here; use float32$"):
        lower(message)


@pytest.mark.parametrize("alpha", [2, np.float32(2), np.float64(2), fractions.Fraction(1, 2)])
def test_any_finite_real_number_is_a_scalar(alpha: float) -> None:
    assert lower(forward(alpha=alpha)).scalars == ("alpha",)
