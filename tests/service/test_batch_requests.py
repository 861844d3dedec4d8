"""Requests of a batched model that are known by an earlier one, and those that have to be checked in full."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from cudnn_actor.models.batch_requests import Kinds, comparison, kinds_of

ROWS = np.zeros((2, 3), np.float32)
FITS = ("group", 2)


class Own(np.ndarray):
    """An array of a class of somebody else."""


def accepted(*arrays: np.ndarray) -> dict[Kinds, Any]:
    """What was accepted, if these arrays were."""
    return {kinds_of(arrays): FITS}


@pytest.mark.parametrize(
    "inputs",
    [{"x": np.ones((2, 3), np.float32)}, {"x": ROWS.T.copy().T}, MappingProxyType({"x": ROWS})],
    ids=["alike", "other strides", "another mapping"],
)
def test_an_input_like_an_earlier_one_is_known(inputs: Mapping[str, np.ndarray]) -> None:
    found = comparison(["x"], accepted(ROWS))(inputs)
    assert found is not None
    ((view,), fits) = found
    assert type(view) is np.ndarray
    assert np.shares_memory(view, inputs["x"])
    assert fits == FITS


def test_inputs_of_several_names_are_known_in_any_order() -> None:
    compare, other = comparison(["x", "y"], accepted(ROWS, ROWS[0])), np.ones(3, np.float32)
    for inputs in ({"x": ROWS, "y": other}, {"y": other, "x": ROWS}):
        found = compare(inputs)
        assert found is not None
        assert [np.shares_memory(*pair) for pair in zip(found[0], (ROWS, other), strict=True)] == [True, True]
        assert found[1] == FITS
    assert compare({"x": other, "y": ROWS}) is None


@pytest.mark.parametrize("names", [["x"], ["x", "y"]], ids=len)
def test_a_view_keeps_its_shape(names: list[str]) -> None:
    arrays = {name: np.zeros((2, 3), np.float32) for name in names}
    found = comparison(names, accepted(*arrays.values()))(arrays)
    assert found is not None
    for array in arrays.values():
        array.shape = 6
    assert [view.shape for view in found[0]] == [(2, 3)] * len(names)


@pytest.mark.parametrize(
    "value",
    [
        ROWS.astype(np.float64),
        ROWS.astype(">f4"),
        ROWS[:1],
        ROWS.reshape(3, 2),
        ROWS.view(Own),
        ROWS.tolist(),
        np.float32(1),
        0.0,
        None,
        "x",
        {"x": ROWS},
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')} {getattr(value, 'shape', '')}",
)
def test_another_input_is_checked_in_full(value: Any) -> None:
    assert comparison(["x"], accepted(ROWS))({"x": value}) is None
    assert comparison(["x", "y"], accepted(ROWS, ROWS))({"x": ROWS, "y": value}) is None


@pytest.mark.parametrize("error", [AttributeError, TypeError, ValueError, RuntimeError, ReferenceError])
@pytest.mark.parametrize("field", ["dtype", "shape"])
def test_an_object_that_fails_to_say_what_it_is_is_checked_in_full(
    field: str, error: type[Exception]
) -> None:
    """A closed dataset of HDF5 has no dtype any more, for example."""

    class Closed:
        dtype, shape = ROWS.dtype, ROWS.shape

        def __getattribute__(self, name: str) -> Any:
            if name == field:
                raise error
            return super().__getattribute__(name)

    assert comparison(["x"], accepted(ROWS))({"x": Closed()}) is None
    assert comparison(["x", "y"], accepted(ROWS, ROWS))({"x": ROWS, "y": Closed()}) is None


@pytest.mark.parametrize(
    "inputs", [{}, {"z": ROWS}, {"x": ROWS, "y": ROWS, "z": ROWS}, None, [ROWS], 7], ids=repr
)
def test_other_names_are_checked_in_full(inputs: Any) -> None:
    assert comparison(["x"], accepted(ROWS))(inputs) is None
    assert comparison(["x", "y"], accepted(ROWS, ROWS))(inputs) is None


def test_what_stands_for_an_array_gives_a_view_of_it() -> None:
    found = comparison(["x"], accepted(ROWS))({"x": weakref.proxy(ROWS)})
    assert found is not None
    assert type(found[0][0]) is np.ndarray
