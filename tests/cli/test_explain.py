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
    assert "use cudnn-actor run --explain" in capsys.readouterr().err
