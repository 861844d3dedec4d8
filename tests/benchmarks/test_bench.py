"""The benchmark runs and writes what it says; how fast is its own business."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from benchmarks import markdown
from cudnn_actor.cli import main
from cudnn_actor.cli.bench.record import LOADS, SUBJECTS, Report
from cudnn_actor.cli.bench.tables import tables
from cudnn_actor.cli.placement import PLACEMENTS


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder: Path = tmp_path_factory.mktemp("bench")
    assert main(["bench", "--quick", "--out", str(folder)]) == 0
    (path,) = folder.glob("*.json")
    return path.read_bytes()


@pytest.fixture(scope="module")
def report(written: bytes) -> Any:
    return json.loads(written)


def test_the_json_is_a_report(written: bytes) -> None:
    assert msgspec.json.decode(written, type=Report).quick


def test_it_says_when_and_on_what_it_ran(report: Any) -> None:
    assert report["date"].startswith("20")
    assert report["machine"]["cpu"]
    assert report["machine"]["cores"] >= 1
    assert all(0 <= share <= 1 for share in report["others_cpu"].values())
    assert {"python", "numpy", "pykka", "cudnn-actor"} <= set(report["versions"])


def test_every_round_trip_has_its_row(report: Any) -> None:
    rows = {(row["loop"], row["placement"], row["subject"]) for row in report["hops"]}
    assert rows >= set(itertools.product(["asyncio"], PLACEMENTS, SUBJECTS))
    for row in report["hops"]:
        assert all(timing["count"] > 0 for timing in row["one"])
        assert set(row["per_s"]) == {"8", "64", "512"}


def test_the_work_is_there(report: Any) -> None:
    assert set(report["convolutions_ms"]) == {"forward", "gradient by input", "gradient by filter"}
    assert all(ms > 0 for ms in report["crash_to_next_reply_ms"])


def test_every_load_was_measured_with_and_without_letting_go(report: Any) -> None:
    rows = {(row["load"], row["in_flight"], row["lets_go"]) for row in report["starvation"]}
    assert rows == set(itertools.product(LOADS, (1, 64), (False, True)))


def test_a_folder_that_cannot_be_written_is_noticed_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", "--out", str(tmp_path / "file" / "folder")]) == 2
    printed = capsys.readouterr()
    assert "choose another --out" in printed.err
    assert printed.out == ""


PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def recorded() -> tuple[Path, Path]:
    """The run and the profile that the page on performance names."""
    run, profile = markdown.named_in(PAGE.read_text(encoding="utf-8"))
    return run, profile


def test_the_tables_of_the_page_on_performance_are_the_recorded_runs_own() -> None:
    shown = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in markdown.of_files(*recorded()) if line not in shown] == []


def test_the_tables_of_a_full_run_fit_in_80_columns() -> None:
    report = msgspec.json.decode(recorded()[0].read_bytes(), type=Report)
    out = io.StringIO()
    Console(file=out, width=80).print(*tables(report))
    assert [line for line in out.getvalue().splitlines() if len(line) > 80 or "…" in line] == []
