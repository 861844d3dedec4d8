"""A fixed part of the fuzzer's cases, and the fuzzer itself: `python -m tests.onnx.fuzzing` runs all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from onnx import defs

from cudnn_actor.onnx import backend

from .fuzzing.cases import drawn
from .fuzzing.comparing import difference
from .fuzzing.differences_page import PAGE, render
from .fuzzing.hints import HINTS
from .fuzzing.known import KNOWN
from .fuzzing.others import Others
from .fuzzing.verdicts import Verdict, judged
from .fuzzing.versions import Version, every_version

SEED = 1
NAN, INF = np.nan, np.inf


@pytest.fixture(autouse=True)
def the_shared_service_ends() -> Iterator[None]:
    yield
    backend.close()


def newest() -> list[Version]:
    """The newest version of each operator."""
    return list({(each.domain, each.operator): each for each in every_version()}.values())


def test_no_difference_of_an_operator_is_ours() -> None:
    with Others() as others:
        found = [judged(drawn(version, SEED, 0), others) for version in newest()]
    assert [each for each in found if each.verdict is Verdict.OURS] == [], (
        "python -m tests.onnx.fuzzing --case NAME"
    )
    assert sum(each.verdict is Verdict.RIGHT for each in found) > 130


def test_every_version_of_every_operator_is_drawn() -> None:
    schemas = [each for each in defs.get_all_schemas_with_history() if not each.deprecated]
    wanted = sorted((each.domain, each.name, each.since_version) for each in schemas)
    assert sorted((each.domain, each.operator, each.since) for each in every_version()) == wanted
    for version in every_version():
        for opset in (min(version.opsets), max(version.opsets)):
            found = defs.get_schema(version.operator, opset, version.domain)
            assert found.since_version == version.since


def test_a_case_is_the_same_each_time_it_is_drawn() -> None:
    for version in every_version()[::40]:
        one, other = (drawn(version, SEED, 3) for _ in range(2))
        assert one.model.SerializeToString() == other.model.SerializeToString()
        assert all(
            np.array_equal(one.given[name], other.given[name], equal_nan=True)
            for name in one.given
            if one.given[name].dtype.kind in "fiub"
        )


def test_hints_and_known_differences_are_of_operators_that_there_are() -> None:
    names = {each.operator for each in every_version()} | {"Scatter"}
    assert set(HINTS) <= names
    assert {name for each in KNOWN for name in each.operators.split()} <= names


@pytest.mark.parametrize(
    ("mine", "theirs", "kind"),
    [
        ([1.0, 2.0], [1.0, 2.1], "values"),
        ([1.0, 2.0], [1.0, NAN], "infinities"),
        ([1.0, INF], [1.0, -INF], "infinities"),
        ([1.0, INF], [1.0, 3.0], "infinities"),
        ([1.0], [1.0, 1.0], "dims"),
    ],
)
def test_what_differs_is_told(mine: list[float], theirs: list[float], kind: str) -> None:
    found = difference([np.array(mine, np.float32)], [np.array(theirs, np.float32)], ["y"])
    assert found is not None
    assert found.kind == kind


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rounding_errors_are_no_difference(dtype: str) -> None:
    x = np.array([1, 1e-3, 1000, -0.5, NAN, INF], dtype)
    near = x - np.spacing(np.where(np.isfinite(x), x, 0))
    assert difference([x], [near.astype(dtype)], ["y"]) is None


def test_whole_numbers_have_to_be_the_same() -> None:
    assert difference([np.array([1 << 60])], [np.array([(1 << 60) + 1])], ["y"]) is not None


def test_the_page_says_what_is_known() -> None:
    assert PAGE.read_text() == render(), "run: python -m tests.onnx.fuzzing --page"
