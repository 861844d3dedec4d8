"""The page of GPUs, drivers and memory is what the records say."""

from __future__ import annotations

import pytest

from benchmarks.hardware_page import PAGE, Run, render, runs_of

RUN = Run("NVIDIA H200", "580.1", "13.0", "9.19.0")


def test_the_page_is_made_from_the_records() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `python -m benchmarks.hardware_page`"


@pytest.mark.parametrize(
    ("record", "runs"),
    [
        (
            {"versions": {"GPU": "NVIDIA H200", "driver": "580.1", "CUDA driver": "13000", "cuDNN": "91900"}},
            [RUN],
        ),
        (
            {
                "device": "cuda:0",
                "platform": {
                    "name": "NVIDIA H200",
                    "driver": "580.1",
                    "versions": {"CUDA driver": "13.0", "cuDNN": "9.19.0"},
                },
            },
            [RUN],
        ),
        (
            {"setting": {"device": "NVIDIA H100 80GB HBM3", "driver": "580.1", "cudnn": "9.28.1"}},
            [Run("NVIDIA H100", "580.1", "–", "9.28.1")],
        ),
        ({"device": "NVIDIA H200", "driver": "580.1"}, []),  # without cuDNN's version
        ({"versions": {"python": "3.11.7"}}, []),
        (["a list"], []),
    ],
)
def test_a_record_s_runs_are_found_wherever_it_names_them(record: object, runs: list[Run]) -> None:
    assert list(runs_of(record)) == runs
