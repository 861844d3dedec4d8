"""The GPU's benchmarks without a GPU: a dry run on the CPU engine, and the tables of a run made up."""

from __future__ import annotations

import io
import itertools
import sys
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.cold import STORES
from benchmarks.gpu.page import BEGIN, END, named_in, section
from benchmarks.gpu.problems import RESNET50, Direction, Problem
from benchmarks.gpu.report import PARTS, Report, new_report, platform_of, sheets, write
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.sheet import as_text
from benchmarks.gpu.stalls import Stalls
from cudnn_actor.cli.logbook import LogBook

from .. import forked_programs
from ..once import once
from ..patience import PATIENCE_S
from .running import ROOT, forked_processes, measured
from .synthetic_gpu_run import gpu_run

PAGE = ROOT / "docs" / "measurements.md"
WIDTH = 100


TWO_SECTIONS = """
import pathlib, sys
from benchmarks.gpu.page import main
page = pathlib.Path(sys.argv[1])
for name, more in (("gpu-first.json", "\\nMore prose.\\n"), ("gpu-second.json", "")):
    sys.argv[1:] = [str(page.with_name(name)), "--page", str(page)]
    main()
    page.write_text(page.read_text() + more)
"""


def run(words: str, out: Path) -> tuple[int, str, Report]:
    """The status, what is printed, and the report."""
    status, printed = measured("gpu.__main__", f"--quick {words}", out)
    (path,) = out.glob("gpu-*.json")
    return status, printed, msgspec.json.decode(path.read_bytes(), type=Report)


def setting_of(*, budget_s: float) -> Setting:
    return Setting("cpu", True, True, budget_s, time.monotonic(), lambda text: None)


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Every part, one after another in this process: how one is run in its own is tested below."""

    def make(folder: Path) -> None:
        report = new_report(quick=True)
        report.platform = platform_of(setting_of(budget_s=1.0))
        for name, part in PARTS.items():
            with LogBook(), forked_processes():
                setattr(report, name, part.measure(setting_of(budget_s=part.budget_s)))
        write(report, folder / "report.json")

    path = once(tmp_path_factory, "gpu-bench", make) / "report.json"
    return msgspec.json.decode(path.read_bytes(), type=Report)


def test_a_dry_run_measures_every_part(dry: Report) -> None:
    assert [name for name in PARTS if getattr(dry, name) is None] == []
    assert dry.platform is not None
    assert {"python", "numpy", "cudnn-actor"} <= set(dry.platform.versions)


def test_a_dry_run_goes_through_the_actor_and_the_engine(dry: Report) -> None:
    assert dry.small is not None
    assert all(row.one[0].count and row.submit_per_s[64][0] > 0 for row in dry.small.requests)
    assert set(dry.small.profiles) == {"loop", "actor"}
    assert [row.isolation for row in dry.small.requests[:2]] == ["thread", "process"]
    assert all(row.actor_cpu_us[0] > 0 for row in dry.small.requests)
    assert dry.resnet is not None
    assert {way for series in dry.resnet.series for row in series.rows for way in row.us} == {
        "actor",
        "heuristic",
    }
    assert [row.errors for series in dry.resnet.series for row in series.rows if row.errors] == []
    assert dry.cold is not None
    assert set(dry.cold.runs) == {*STORES, "steps"}


def test_a_dry_run_ends_workers_in_every_way(dry: Report) -> None:
    assert dry.recovery is not None
    assert dry.recovery.errors == {}
    harms = ("SIGKILL", "illegal access", "illegal access reported", "hang")
    ends = itertools.product(harms, ("with standby", "without"))
    assert set(dry.recovery.ms) == {", ".join(end) for end in ends}
    assert all(ms > 0 for taken in dry.recovery.ms.values() for ms in taken)
    assert all(len(took) == 1 for took in dry.recovery.start_s.values())


def test_a_part_is_run_in_a_process_of_its_own_and_its_tables_are_printed(tmp_path: Path) -> None:
    status, printed, report = run("--device cpu --only polling --profile", tmp_path)
    assert (status, report.errors) == (0, {})
    assert report.platform is not None
    assert report.polling is not None
    assert {each for each in PARTS if getattr(report, each) is not None} == {"polling"}
    assert set(report.took_s) == {"platform", "polling"}
    assert [sheet.title for sheet in sheets(report) if sheet.title not in printed] == []


def test_sums_behind_kills_are_what_was_acknowledged(tmp_path: Path) -> None:
    _, printed = measured("gpu.stalls", "--device cpu --seconds 3 --seed 4", tmp_path)
    assert "longest waits" in printed
    found = msgspec.json.decode((tmp_path / "stalls-without-standby-4.json").read_bytes(), type=Stalls)
    assert found.accumulated >= 1
    assert found.wrong == 0


def test_a_part_that_fails_does_not_lose_the_others(tmp_path: Path) -> None:
    status, _, report = run("--device cuda:77 --only cold", tmp_path)
    assert status == 1
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
    for name in ("gpu-first.json", "gpu-second.json"):
        write(gpu_run(), tmp_path / name)
    # In a process of its own: Matplotlib keeps fonts open.
    forked_programs.run(["-c", TWO_SECTIONS, str(page)], cwd=ROOT, check=True, timeout=PATIENCE_S)
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
