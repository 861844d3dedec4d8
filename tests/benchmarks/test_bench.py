"""The benchmark runs and writes what it says; how fast is its own business."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from benchmarks import markdown
from benchmarks.markdown import BEGIN, END, exchange, isolation_section
from cudnn_actor.cli import main
from cudnn_actor.trials.bench import PARTS
from cudnn_actor.trials.bench.cpu_time import process_cpu_s
from cudnn_actor.trials.bench.isolation_sheets import sheets
from cudnn_actor.trials.bench.record import ISOLATIONS, LOADS, SIDE_SUBJECTS, SUBJECTS, Report, write
from cudnn_actor.trials.bench.tables import tables
from cudnn_actor.trials.placement import PLACEMENTS

from ..once import once
from .synthetic_cpu_run import cpu_run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    def make(folder: Path) -> None:
        assert main(["bench", "--quick", "--out", str(folder)]) == 0

    (path,) = once(tmp_path_factory, "bench", make).glob("*.json")
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


def test_both_isolations_were_measured_in_turns(report: Any) -> None:
    rows = {(row["loop"], row["isolation"], row["subject"]): row for row in report["sides"]}
    assert rows.keys() >= set(itertools.product(["asyncio"], ISOLATIONS, SIDE_SUBJECTS))
    for row in rows.values():
        assert set(row["per_s"]) == {"8", "64", "256"}
        assert row["loop_cpu_us"][0] > 0
        assert row["worker_cpu_us"][0] > 0


def test_transfers_stand_beside_a_plain_copy(report: Any) -> None:
    moves = report["moves"]
    assert moves["nbytes"] == 64 << 20
    assert min(moves["copy_s"]) > 0
    assert set(moves["up_s"]) == set(moves["down_s"]) == set(ISOLATIONS)


def test_workers_were_ended_in_every_way(report: Any) -> None:
    ends = itertools.product(("SIGKILL", "sticky error"), ("with standby", "without"))
    assert set(report["recovery_ms"]) == {"sticky error, thread", *(", ".join(end) for end in ends)}
    assert all(ms > 0 for taken in report["recovery_ms"].values() for ms in taken)
    assert set(report["idle"]) == {"thread: this process", "process: this process", "process: the worker"}


def test_a_part_can_be_measured_alone(tmp_path: Path) -> None:
    assert main(["bench", "--quick", "--only", "transfers,work", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("cpu-*.json")
    found = msgspec.json.decode(path.read_bytes(), type=Report)
    assert found.moves is not None
    assert found.convolutions_ms
    assert (found.hops, found.sides, found.recovery_ms, found.starvation) == ([], [], {}, [])


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--only", "transfers,everything"])
    assert f"choose from {', '.join(PARTS)}" in capsys.readouterr().err


def test_a_process_s_clock_is_its_own() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        before, mine = process_cpu_s(os.getpid()), process_cpu_s(child.pid)
        while process_cpu_s(os.getpid()) < before + 0.1:
            pass
        assert process_cpu_s(child.pid) < mine + 0.1
        assert process_cpu_s(os.getpid()) == pytest.approx(time.process_time(), abs=0.05)


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


PAGE = Path(__file__).parents[2] / "docs" / "measurements.md"


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


def test_the_tables_of_both_isolations_fit_in_100_columns() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(*tables(cpu_run()))
    assert [line for line in out.getvalue().splitlines() if len(line) > 100 or "…" in line] == []


def test_every_table_of_both_isolations_is_rectangular() -> None:
    found = list(sheets(cpu_run()))
    assert len(found) == 6
    assert [s.title for s in found if any(len(cells) != len(s.columns) for cells in s.rows)] == []


def test_what_was_aimed_at_is_met_or_missed_by_the_rounds_own_ratios() -> None:
    (aims,) = (s for s in sheets(cpu_run()) if s.title.startswith("What was aimed at"))
    found = {name: cells for name, *cells in aims.rows}
    assert found["ping, 64 in flight: at least 0.9 × thread's"] == ["1.00 met", "0.80 missed"]
    assert found["ping, one at a time: p50 at most 2.0 ×"] == ["2.50 missed", "1.50 met"]
    (recovery,) = (s for s in sheets(cpu_run()) if s.title.startswith("From a worker's end"))
    assert [cells[-1] for cells in recovery.rows] == ["< 10 met", "< 10 missed", "< 60 met", "< 60 met", "–"]


def test_a_section_takes_its_place_before_the_gpu_s_and_is_then_exchanged() -> None:
    page = "# Performance\n\nProse.\n\n<!-- gpu: begin -->\n## On a GPU\n"
    once = exchange(page, BEGIN, END, "first\n", before="<!-- gpu: begin -->")
    twice = exchange(once, BEGIN, END, "second\n", before="<!-- gpu: begin -->")
    assert twice == once.replace("first", "second")
    assert twice.index("Prose") < twice.index("second") < twice.index("On a GPU")


def test_a_page_gets_the_tables_of_another_run_and_the_section_of_both_isolations(tmp_path: Path) -> None:
    old, profile = recorded()
    run = msgspec.json.decode(old.read_bytes(), type=Report)
    new = cpu_run()
    for name in ("hops", "convolutions_ms", "crash_to_next_reply_ms", "starvation"):
        setattr(new, name, getattr(run, name))
    new.others_cpu |= dict.fromkeys(run.others_cpu, 0.123)
    path, page = tmp_path / "cpu-20260102T030405.json", tmp_path / "measurements.md"
    write(new, path)
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    markdown.update(page, path, profile)
    text = page.read_text(encoding="utf-8")
    assert path.name in text
    assert old.name not in text
    assert [line for line in markdown.of_files(path, profile) if line not in text.splitlines()] == []
    assert text.partition(f"{BEGIN}\n")[2].partition(END)[0] == isolation_section(new)
    assert f"| {SIDE_SUBJECTS[0]}, ratio |" in text


def test_the_page_on_performance_shows_both_isolations_of_the_run_that_it_names() -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = isolation_section(msgspec.json.decode(recorded()[0].read_bytes(), type=Report))
    if not section:
        assert BEGIN not in text
        return
    assert text.partition(f"{BEGIN}\n")[2].partition(END)[0] == section
