"""The support page says what the tables and the newest recorded run say."""

from __future__ import annotations

from pathlib import Path

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


def test_the_newest_record_knows_every_cell_of_the_table() -> None:
    record = latest()
    assert record is None or set(record.cells) == {cell.name for cell in cells()}


def test_a_record_shows_what_was_fused_split_and_refused() -> None:
    outcomes = {cell.name: Outcome(ran=True, error=0.25, plan="eng4_k2=1") for cell in cells()}
    outcomes["forward-float32-2d-nhwc-groups-none"] = Outcome(ran=True, error=0.5, plan="eng4+pointwise")
    outcomes["backward_data-float16-3d-nchw-plain-none"] = Outcome(ran=False, error=0.0, plan="no plan")
    page = render(Record(setting=SETTING, cells=outcomes))
    forward, backward = page.split("## Backward data")
    assert "| float32 | NHWC | fused | fused 1, 3; split 2 | fused |" in forward
    assert "| float16 | NCHW | fused 1, 2; refused 3 | fused |" in backward
    assert "a GPU: driver 1.2.3, cuDNN 9.19.0, cupy 14.2, Python 3.12.1, seed 7" in page
    assert "| float32 | 0.50 | 0.25 | 0.25 |" in page


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record = Record(setting=SETTING, cells={"a cell": Outcome(ran=True, error=0.5, plan="eng1")})
    path = write(record, tmp_path)
    assert read(path) == latest(tmp_path) == record
    assert path.name == "support-20260102T030405.json"
    assert len(path.read_text().splitlines()) < 20
