"""Element types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cudnn_actor.protocol import DType

from ..in_one_test import cases_in_one_test


@cases_in_one_test
@pytest.mark.parametrize(
    ("member", "itemsize", "floating"),
    [
        (DType.FLOAT64, 8, True),
        (DType.FLOAT32, 4, True),
        (DType.FLOAT16, 2, True),
        (DType.BFLOAT16, 2, True),
        (DType.INT8, 1, False),
        (DType.INT16, 2, False),
        (DType.INT32, 4, False),
        (DType.INT64, 8, False),
        (DType.UINT8, 1, False),
        (DType.UINT16, 2, False),
        (DType.UINT32, 4, False),
        (DType.UINT64, 8, False),
        (DType.BOOL, 1, False),
    ],
)
def test_each_type_knows_its_size_and_kind(member: DType, itemsize: int, floating: bool) -> None:
    assert (member.itemsize, member.is_floating) == (itemsize, floating)
    assert member.numpy.itemsize == itemsize


@cases_in_one_test
@pytest.mark.parametrize("member", DType)
def test_a_type_is_found_by_member_name_and_numpy_dtype(member: DType) -> None:
    assert DType.of(member) is member
    assert DType.of(member.value) is member
    assert DType.of(member.numpy) is member
    assert DType.of(member.numpy.type) is member


def test_bfloat16_is_the_one_of_ml_dtypes() -> None:
    assert DType.of(ml_dtypes.bfloat16) is DType.BFLOAT16
    assert DType.BFLOAT16.numpy == np.dtype(ml_dtypes.bfloat16)


@cases_in_one_test
@pytest.mark.parametrize("member", DType)
def test_a_type_is_compared_with_members_names_and_numpy_dtypes_but_not_with_scalar_classes(
    member: DType,
) -> None:
    other: object = member.numpy.type
    assert member == member.value == member.numpy
    assert member != other
    assert member.numpy == other
    assert DType.of(other) is member


@cases_in_one_test
@pytest.mark.parametrize(
    "other",
    [
        "complex64",
        object,
        "U3",
        np.dtype(">f4"),
        np.dtype([("a", "f4")]),
        None,
        "no such type",
        "f4,,f4",
        "99999999999f4",
        3,
        [],
    ],
)
def test_other_types_have_no_member(other: object) -> None:
    assert DType.of(other) is None
