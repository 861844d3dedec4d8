"""The example of Ray Serve runs on the cluster of Ray's tests."""

from __future__ import annotations

import pytest

from ..ray.outcomes import check, outcomes_of
from ..ray.scenarios import the_example_is_answered_by_serve
from .test_examples import EXAMPLES


def test_a_model_is_answered_by_the_handle_and_over_http(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert (EXAMPLES / "ray_serve_app.py").is_file()
    check(the_example_is_answered_by_serve.__name__, outcomes_of(tmp_path_factory))
