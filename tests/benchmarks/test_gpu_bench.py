"""The GPU's benchmarks without a GPU: a dry run on the CPU engine, and the tables of a run made up."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.cold import STORES
from benchmarks.gpu.page import BEGIN, END, named_in, section
from benchmarks.gpu.problems import RESNET50, Direction, Problem
from benchmarks.gpu.report import PARTS, Report, sheets, write
from benchmarks.gpu.sheet import as_text
from benchmarks.gpu.stalls import Stalls

from ..once import once
from ..patience import PATIENCE_S
from .synthetic_gpu_run import gpu_run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "measurements.md"
WIDTH = 100


def python(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words]
    one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # more would fight for the cores that there are
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT, env=one_thread, check=False
    )


def run(*words: str, device: str = "cpu") -> subprocess.CompletedProcess[str]:
    return python("benchmarks.gpu", "--device", device, "--quick", *words)


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Report]:
    def make(folder: Path) -> None:
        done = run("--profile", "--out", str(folder))
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "printed").write_text(done.stdout)

    folder = once(tmp_path_factory, "gpu-bench", make)
    (path,) = folder.glob("gpu-*.json")
    return (folder / "printed").read_text(), msgspec.json.decode(path.read_bytes(), type=Report)


def test_a_dry_run_measures_every_part(dry: tuple[str, Report]) -> None:
    _, report = dry
    assert report.errors == {}
    assert [name for name in PARTS if getattr(report, name) is None] == []
    assert report.platform is not None
    assert {"python", "numpy", "cudnn-actor"} <= set(report.platform.versions)


def test_a_dry_run_goes_through_the_actor_and_the_engine(dry: tuple[str, Report]) -> None:
    _, report = dry
    assert report.small is not None
    assert all(row.one[0].count and row.submit_per_s[64][0] > 0 for row in report.small.requests)
    assert set(report.small.profiles) == {"loop", "actor"}
    assert [row.isolation for row in report.small.requests[:2]] == ["thread", "process"]
    assert all(row.actor_cpu_us[0] > 0 for row in report.small.requests)
    assert report.resnet is not None
    assert {way for series in report.resnet.series for row in series.rows for way in row.us} == {
        "actor",
        "heuristic",
    }
    assert [row.errors for series in report.resnet.series for row in series.rows if row.errors] == []
    assert report.cold is not None
    assert set(report.cold.runs) == {*STORES, "steps"}


def test_a_dry_run_ends_workers_in_every_way(dry: tuple[str, Report]) -> None:
    _, report = dry
    assert report.recovery is not None
    assert report.recovery.errors == {}
    harms = ("SIGKILL", "illegal access", "illegal access reported", "hang")
    ends = itertools.product(harms, ("with standby", "without"))
    assert set(report.recovery.ms) == {", ".join(end) for end in ends}
    assert all(ms > 0 for taken in report.recovery.ms.values() for ms in taken)
    assert all(len(took) == 1 for took in report.recovery.start_s.values())


def test_a_dry_run_prints_its_tables(dry: tuple[str, Report]) -> None:
    printed, report = dry
    assert [sheet.title for sheet in sheets(report) if sheet.title not in printed] == []


def test_sums_behind_kills_are_what_was_acknowledged(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--seconds", "3", "--seed", "4", "--out", str(tmp_path))
    done = python("benchmarks.gpu.stalls", *words)
    assert done.returncode == 0, done.stderr
    assert "longest waits" in done.stdout
    found = msgspec.json.decode((tmp_path / "stalls-without-standby-4.json").read_bytes(), type=Stalls)
    assert found.accumulated >= 1
    assert found.wrong == 0


def test_a_part_that_fails_does_not_lose_the_others(tmp_path: Path) -> None:
    done = run("--only", "cold", "--out", str(tmp_path), device="cuda:77")
    (path,) = tmp_path.glob("gpu-*.json")
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert done.returncode == 1
    assert set(report.errors) == {"platform"}
    assert report.cold is not None
    assert set(report.cold.errors) == {*STORES, "steps"}


def test_a_folder_that_cannot_be_written_is_noticed_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--out", str(tmp_path / "file" / "folder")])
    with pytest.raises(SystemExit, match="cannot write to"):
        main()
    assert capsys.readouterr().out == ""


def test_an_unknown_part_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", "small,large"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "'large' is not a part" in capsys.readouterr().err


def test_the_tables_of_a_full_run_fit_in_100_columns() -> None:
    out = io.StringIO()
    console = Console(file=out, width=WIDTH)
    for sheet in sheets(gpu_run()):
        console.print(as_text(sheet))
    lines = out.getvalue().splitlines()
    assert [line for line in lines if len(line) > WIDTH or "…" in line] == []


def test_every_table_of_a_run_is_rectangular() -> None:
    ragged = [s.title for s in sheets(gpu_run()) if any(len(cells) != len(s.columns) for cells in s.rows)]
    assert ragged == []


def test_a_section_is_put_at_the_end_of_a_page_and_then_exchanged(tmp_path: Path) -> None:
    page = tmp_path / "measurements.md"
    page.write_text("# Performance\n\nProse.\n")
    for name, more in (("gpu-first.json", "\nMore prose.\n"), ("gpu-second.json", "")):
        write(gpu_run(), tmp_path / name)
        done = python("benchmarks.gpu.page", str(tmp_path / name), "--page", str(page))
        assert done.returncode == 0, done.stderr
        page.write_text(page.read_text() + more)
    text = page.read_text()
    assert text.startswith("# Performance\n\nProse.\n")
    assert text.endswith(f"{END}\n\nMore prose.\n")
    assert (text.count(BEGIN), text.count(END), text.count("gpu-first.json")) == (1, 1, 0)
    assert named_in(text) == "gpu-second.json"
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_shows_the_tables_of_the_run_that_it_names() -> None:
    text = PAGE.read_text(encoding="utf-8")
    name = named_in(text)
    if name is None:
        assert BEGIN not in text
        return
    recorded = msgspec.json.decode((ROOT / "benchmarks" / "results" / name).read_bytes(), type=Report)
    shown = text.partition(f"{BEGIN}\n")[2].partition(END)[0]
    assert shown == section(recorded, name)


def test_resnet_50_has_23_distinct_convolutions_of_a_known_cost() -> None:
    assert len(set(RESNET50)) == len({str(conv) for conv in RESNET50}) == 23
    flops = [Problem(conv, 1, Direction.FWD, "bfloat16", "NHWC").flops for conv in RESNET50]
    assert flops[0] == 2 * 112 * 112 * 64 * 3 * 7 * 7
    assert sum(flops) == pytest.approx(3.935e9, rel=1e-3)


@pytest.mark.parametrize("direction", Direction)
def test_a_problem_costs_each_of_its_tensors_once(direction: Direction) -> None:
    problem = Problem(RESNET50[1], 2, direction, "bfloat16", "NHWC")
    assert problem.nbytes == 2 * (2 * 2 * 64 * 56 * 56 + 64 * 64)
