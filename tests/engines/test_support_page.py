"""The support page says what the tables and the newest recorded run say."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ..gpu.families import FAMILIES
from ..gpu.seeds import seed_from
from ..gpu.support_matrix import cells
from ..gpu.support_page import PAGE, render
from ..gpu.support_record import Outcome, Record, Setting, latest, read, write

SETTING = Setting(
    device="a GPU",
    driver="1.2.3",
    cudnn="9.19.0",
    packages={"cupy": "14.2"},
    python="3.12.1",
    date="2026-01-02T03:04:05+00:00",
    seed=7,
)


def test_the_page_is_what_its_generator_makes() -> None:
    assert PAGE.read_text() == render(latest()), "run: python -m tests.gpu.support_page"


def test_the_newest_record_knows_every_cell_of_its_operations() -> None:
    """Of a new operation, or a new dtype of one, it knows none: the page says that it was not run."""
    record = latest()
    assert record is not None
    recorded = {_of(name) for name in record.cells}
    names = {cell.name for family in FAMILIES.values() for cell in family.cells()}
    assert set(record.cells) == {name for name in names if _of(name) in recorded}


def _of(name: str) -> tuple[str, ...]:
    """The operation and the dtype of a cell."""
    return tuple(name.split("-")[:2])


def test_no_two_cells_have_one_name() -> None:
    names = [cell.name for family in FAMILIES.values() for cell in family.cells()]
    assert len(set(names)) == len(names)


def test_a_record_shows_what_was_fused_split_and_refused() -> None:
    outcomes = {cell.name: Outcome(ran=True, error=0.25, plan="eng4_k2=1") for cell in cells()}
    outcomes["forward-float32-2d-nhwc-groups-none"] = Outcome(ran=True, error=0.5, plan="eng4+pointwise")
    outcomes["backward_data-float16-3d-nchw-plain-none"] = Outcome(ran=False, error=0.0, plan="no plan")
    page = render(Record(setting=SETTING, cells=outcomes))
    forward, backward = page.split("## Convolution backward data")
    assert "| float32 | NHWC | fused | fused 1, 3; split 2 | fused |" in forward
    assert "| float16 | NCHW | fused 1, 2; refused 3 | fused |" in backward
    assert "a GPU: driver 1.2.3, cuDNN 9.19.0, cupy 14.2, Python 3.12.1, seed 7" in page
    assert "| float32 | 0.50 | 0.25 | 0.25 |" in page


def test_a_record_shows_what_became_of_other_operations() -> None:
    every = [cell for family in FAMILIES.values() for cell in family.cells()]
    outcomes = {cell.name: Outcome(ran=True, error=0.25, plan="max_pool") for cell in every}
    page = render(Record(setting=SETTING, cells=outcomes))
    alike = "| float64, float32, float16, bfloat16 | NCHW, NHWC, STRIDED |" + " fused |" * 6
    assert alike in page.split("### RMSNorm\n")[1]
    outcomes["rms_norm-float16-rank_3-nhwc-every_dim"] = Outcome(
        ran=True, error=0.5, plan="elementwise+rms_norm"
    )
    outcomes["rms_norm-bfloat16-rank_2-strided-long_rows"] = Outcome(ran=False, error=0.0, plan="no plan")
    page = render(Record(setting=SETTING, cells=outcomes))
    rows = page.split("### RMSNorm\n")[1].split("###")[0]
    assert "| float64, float32 | NCHW, NHWC, STRIDED |" in rows
    assert "| float16 | NHWC | fused | fused | split 3; fused 4 | fused |" in rows
    assert "| bfloat16 | STRIDED | fused | fused | fused | refused 2; fused 3, 4 | fused |" in rows
    assert "| float16 | 0.25 | 0.25 | 0.50 | 0.25 |" in page
    assert page.count("| not run |") == 1, "besides the explanation of the word"


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record = Record(setting=SETTING, cells={"a cell": Outcome(ran=True, error=0.5, plan="eng1")})
    path = write(record, tmp_path)
    assert read(path) == latest(tmp_path) == record
    assert path.name == "support-20260102T030405.json"
    assert len(path.read_text().splitlines()) < 20


def test_the_processes_of_a_run_share_a_record(tmp_path: Path) -> None:
    outcome = Outcome(ran=True, error=0.5, plan="eng1")
    run = tmp_path.name
    paths = {
        write(Record(setting=SETTING, cells={cell: outcome}), tmp_path, run) for cell in ("one", "other")
    }
    (path,) = paths
    assert read(path).cells == {"one": outcome, "other": outcome}
    assert write(Record(setting=SETTING, cells={}), tmp_path, "another") != path


def test_the_processes_of_one_run_draw_by_one_seed(tmp_path: Path) -> None:
    run = {"PYTEST_XDIST_TESTRUNUID": "6c1f"}
    assert seed_from(run) == seed_from(dict(run)) != seed_from({"PYTEST_XDIST_TESTRUNUID": "6c20"})
    assert seed_from(run | {"CUDNN_ACTOR_SEED": "5"}) == 5
    assert seed_from({}) != seed_from({}), "a run without a seed draws anew"
    write(Record(setting=SETTING, cells={}), tmp_path, tmp_path.name)
    with pytest.raises(ValueError, match="drew by 7 and by 8"):
        write(Record(setting=msgspec.structs.replace(SETTING, seed=8), cells={}), tmp_path, tmp_path.name)
