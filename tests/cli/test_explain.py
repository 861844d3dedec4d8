"""`cudnn-actor explain`: what an engine does with a graph from a file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cudnn_actor import Explanation, GraphBuilder
from cudnn_actor.cli import main

from .terminal import cudnn_actor_here


def test_a_graph_is_explained_and_drawn(tmp_path: Path) -> None:
    g = GraphBuilder()
    path, dot, picture = (tmp_path / name for name in ("graph.json", "graph.dot", "graph.svg"))
    path.write_bytes(g.build(y=g.softmax(g.input("x", (4, 8)) * 2.0)).to_json())
    options = ("--device", "cpu", "--dot", str(dot), "--picture", str(picture))
    done = cudnn_actor_here("explain", str(path), *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 operations in 2 pieces" in done.stdout
    assert "softmax at test_explain.py:" in done.stdout
    assert "cluster1" in dot.read_text(encoding="utf-8")
    assert "1: NumPy" in picture.read_text(encoding="utf-8")


def test_the_pieces_of_a_graph_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    g, path, written = GraphBuilder(), tmp_path / "graph.json", tmp_path / "explained.json"
    path.write_bytes(g.build(y=g.softmax(g.input("x", (4, 8)) * 2.0)).to_json())
    assert main(["explain", str(path), "--device", "cpu", "--profile", "--json", str(written)]) == 0
    assert "us a run; the slowest pieces first" in capsys.readouterr().out
    found = msgspec.json.decode(written.read_bytes(), type=Explanation)
    assert found.run_us
    assert [piece.time is None for piece in found.pieces] == [False, False]


def test_the_plans_of_each_piece_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    g, path = GraphBuilder(), tmp_path / "graph.json"
    path.write_bytes(g.build(y=g.softmax(g.input("x", (4, 8)) * 2.0)).to_json())
    for options, count in (((), 0), (("--plans",), 2)):
        assert main(["explain", str(path), "--device", "cpu", *options]) == 0
        assert capsys.readouterr().out.count("candidate cpu/") == count


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        (("--exact",), "NumPy"),
        (("--threads", "1", "--onnx-runtime", "no"), "NumPy, block by block"),
        (("--onnx-runtime", "yes"), "ONNX Runtime"),
    ],
)
def test_options_of_the_cpu_are_those_of_spawn(
    options: tuple[str, ...], runs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    g, path, written = GraphBuilder(), tmp_path / "graph.json", tmp_path / "explained.json"
    path.write_bytes(g.build(y=g.input("x", (4, 8)) @ g.input("w", (8, 4))).to_json())
    assert main(["explain", str(path), "--device", "cpu", "--json", str(written), *options]) == 0
    found = msgspec.json.decode(written.read_bytes(), type=Explanation)
    assert [piece.steps for piece in found.pieces] == [(runs,)]


def test_options_that_contradict_each_other_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    g, path = GraphBuilder(), tmp_path / "graph.json"
    path.write_bytes(g.build(y=g.input("x", (3,)) + 1.0).to_json())
    assert main(["explain", str(path), "--device", "cpu", "--exact", "--onnx-runtime", "yes"]) == 2
    assert "onnx_runtime=True: is not exact" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", str(path), "--threads", "257"])
    assert "257 must be a whole number from 1 to 256" in capsys.readouterr().err


def test_a_graph_that_the_engine_cannot_run_is_an_error_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    g = GraphBuilder()
    x, w = g.input("x", (1, 131_072, 1, 1), "int8"), g.input("w", (4, 131_072, 1, 1), "int8")
    path = tmp_path / "graph.json"
    path.write_bytes(g.build(y=g.conv(x, w)).to_json())
    assert main(["explain", str(path), "--device", "cpu"]) == 1
    assert "conv_fwd at test_explain.py:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "options", "problem"),
    [
        (None, (), "cannot be read"),
        ("{}", (), "cannot be read: is not a graph: Object missing required field `format`"),
        ("graph", ("--device", "cuda:77"), "device='cuda:77'"),
        ("graph", ("--device", "cpu", "--picture", "/nowhere/at/all.svg"), "cannot be written"),
        ("graph", ("--device", "cpu", "--picture", "a.png"), "--picture writes SVG, not .png; use a.svg"),
    ],
)
def test_what_cannot_be_carried_out_is_one_line(
    text: str | None,
    options: tuple[str, ...],
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "graph.json"
    if text == "graph":
        g = GraphBuilder()
        path.write_bytes(g.build(y=g.input("x", (3,)) + 1.0).to_json())
    elif text is not None:
        path.write_text(text)
    assert main(["explain", str(path), *options]) == 2
    told = capsys.readouterr().err
    assert problem in told
    assert told.count("\n") == 1
    assert told.count("is not a graph") <= 1


def test_a_model_is_explained_by_another_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\x08\x08")
    assert main(["explain", str(tmp_path / "model.onnx"), "--device", "cpu"]) == 2
    path = tmp_path / "model.onnx"
    told = f"cudnn-actor: {path} is an ONNX model; use cudnn-actor run {path} --explain\n"
    assert capsys.readouterr().err == told
