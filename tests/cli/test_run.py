"""`cudnn-actor run`: an ONNX model from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from cudnn_actor.cli import main

from ..onnx.small_models import image_model
from .terminal import cudnn_actor


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx.save(image_model(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_a_model_runs_is_timed_and_explained(path: Path, tmp_path: Path) -> None:
    image, out = tmp_path / "image.npy", tmp_path / "out.npz"
    np.save(image, np.ones((2, 3, 8, 8), np.float32))
    options = ("--device", "cpu", "--input", f"image={image}", "--time", "--explain", "--out", str(out))
    done = cudnn_actor("run", str(path), *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "scores: float32 (2, 5), from " in done.stdout
    assert "(median of 20)" in done.stdout
    assert "relu at node 'relu1' (Relu)" in done.stdout
    with np.load(out) as written:
        assert written["features"].shape == (2, 4, 2, 2)


def test_inputs_that_are_not_given_are_made_up(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(path), "--device", "cpu", "--dim", "N=3"]) == 0
    assert "features: float32 (3, 4, 2, 2)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "give the size of N in image"),
        (("--input", "picture=x.npy"), "'picture' is no input of the model: it has image"),
        (("--input", "image=gone.npy"), "gone.npy cannot be read as an array"),
        (("--dim", "N=1", "--out", "/nowhere/out.npz"), "cannot be written"),
    ],
)
def test_what_cannot_be_carried_out_is_one_line(
    options: tuple[str, ...], problem: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(path), "--device", "cpu", *options]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


def test_a_file_that_is_no_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    assert main(["run", str(tmp_path / "model.onnx"), "--device", "cpu"]) == 2
    assert "is not an ONNX model" in capsys.readouterr().err
