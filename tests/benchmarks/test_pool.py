"""The benchmark of pools, measured for a moment on the CPU."""

from __future__ import annotations

import gc
import io
from pathlib import Path

import onnx
from rich.console import Console

from benchmarks.pool import Asked, rows, sheet
from tests.onnx.small_models import image_model

ASKED = Asked(
    devices=["cpu", "cpu"],
    model=None,
    dtype=None,
    batched=False,
    batch=2,
    in_flight=2,
    callers=[2],
    processes=[1],
    seconds=0.02,
    rounds=1,
    kills=1,
)


def test_one_member_and_two_are_measured_and_a_kill() -> None:
    found = list(rows(ASKED))
    assert [row["what"] for row in found] == [
        *("one member, its handle", "one member", "2 members"),
        *("one member, 80 % load", "2 members, 80 % load"),
        *("one member, 1 process", "2 members, 1 process"),
        *("killed", "target", "target", "target"),
    ]
    assert all(row["per_s"] > 0 for row in found[:7])
    killed = found[7]
    assert killed["slowest_ms"][0] >= killed["others_ms"][0] > 0
    assert killed["kills"] == len(killed["down_ms"]) - 1 == 1
    assert [row["limit"] for row in found[8:]] == [1.5, 1.3, 300.0]
    printed = io.StringIO()
    Console(file=printed, width=250).print(sheet(found))
    assert "one member, its handle" in printed.getvalue()


def test_batches_of_a_model_are_measured(tmp_path: Path) -> None:
    onnx.save(image_model(), tmp_path / "small.onnx")
    asked = ASKED._replace(model=tmp_path / "small.onnx", batched=True, processes=[], kills=0, freeze=True)
    found = list(rows(asked))
    assert [row["what"] for row in found[:5]] == [
        *("one member", "2 members", "one member, 80 % load", "2 members, 80 % load"),
        "swapped",
    ]
    assert all(row["collected_ms"] >= 0 for row in found[:4])
    assert not gc.get_freeze_count()
    assert [(row["of"], row["limit"]) for row in found[5:]] == [
        ("rate beside one member's", 1.9),
        ("p99 at 80 % load beside one's", 1.3),
    ]
