"""`cudnn-actor run`: an ONNX model from a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import onnx
import pytest

from cudnn_actor import Explanation
from cudnn_actor.cli import main
from cudnn_actor.cli.throughput import MOST_IN_FLIGHT, Throughput, in_flight
from cudnn_actor.cli.throughput_plot import plot

from ..onnx.small_models import FLOAT, INT64, image_model, model_of, node
from .terminal import cudnn_actor_here


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx.save(image_model(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_a_model_runs_is_timed_and_explained(path: Path, tmp_path: Path) -> None:
    image, out = tmp_path / "image.npy", tmp_path / "out.npz"
    np.save(image, np.ones((2, 3, 8, 8), np.float32))
    options = ("--device", "cpu", "--input", f"image={image}", "--time", "--explain", "--out", str(out))
    done = cudnn_actor_here("run", str(path), *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "scores: float32 (2, 5), from " in done.stdout
    assert "(median of 20)" in done.stdout
    assert "relu at node 'relu1' (Relu)" in done.stdout
    with np.load(out) as written:
        assert written["features"].shape == (2, 4, 2, 2)


def test_options_of_the_cpu_are_those_of_spawn(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", str(path), "--device", "cpu", "--dim", "N=1", "--explain"]
    assert main([*command, "--exact", "--threads", "1"]) == 0
    steps = capsys.readouterr().out
    assert "  NumPy  " in steps
    assert "block by block" not in steps


def test_a_model_is_computed_in_another_dtype(path: Path, tmp_path: Path) -> None:
    image = tmp_path / "image.npy"
    np.save(image, np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32))
    scores = []
    for dtype in ("float32", "float16"):
        out = str(tmp_path / f"{dtype}.npz")
        options = ("--device", "cpu", "--input", f"image={image}", "--dtype", dtype, "--out", out)
        assert main(["run", str(path), *options]) == 0
        with np.load(out) as written:
            scores.append(written["scores"])
    assert scores[0].dtype == scores[1].dtype == np.float32
    difference = np.abs(scores[1] - scores[0]).max() / np.abs(scores[0]).max()
    assert 0 < difference < 5e-3


def test_tuning_on_the_cpu_says_that_there_was_nothing_to_tune(path: Path, tmp_path: Path) -> None:
    options = ("--device", "cpu", "--dim", "N=2", "--tune", "--store", str(tmp_path / "plans"))
    done = cudnn_actor_here("run", str(path), *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing was tuned" in done.stdout
    assert "scores: float32 (2, 5)" in done.stdout


def test_the_pieces_of_a_model_are_timed(path: Path, tmp_path: Path) -> None:
    written = tmp_path / "profile.json"
    options = ("--device", "cpu", "--dim", "N=2", "--profile", "--json", str(written))
    done = cudnn_actor_here("run", str(path), *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "us a run; the slowest pieces first" in done.stdout
    (words,) = msgspec.json.decode(written.read_bytes(), type=dict[str, msgspec.Raw]).items()
    assert words[0] == "explanation"
    found = msgspec.json.decode(words[1], type=Explanation)
    assert found.run_us
    assert all(piece.time for piece in found.pieces)


def test_runs_in_flight_are_measured_for_each_number_of_tasks(path: Path, tmp_path: Path) -> None:
    written = tmp_path / "load.json"
    load = ("--concurrency", "1:3", "--seconds", "0.05", "--json", str(written))
    done = cudnn_actor_here("run", str(path), "--device", "cpu", "--dim", "N=2", *load)
    assert (done.returncode, done.stderr) == (0, "")
    assert "per second" in done.stdout
    found = msgspec.json.decode(written.read_bytes(), type=dict[str, list[Throughput]])["throughput"]
    assert [each.in_flight for each in found] == [1, 2, 3]
    for each in found:
        assert each.runs >= each.in_flight
        assert each.per_s > 0
        assert 0 < each.p50_ms <= each.p90_ms <= each.p99_ms


def test_batched_requests_are_measured_beside_single_runs(path: Path, tmp_path: Path) -> None:
    written = tmp_path / "load.json"
    load = ("--concurrency", "1:4", "--seconds", "0.05", "--batched", "--json", str(written))
    done = cudnn_actor_here("run", str(path), "--device", "cpu", "--dim", "N=1", *load)
    assert (done.returncode, done.stderr) == (0, "")
    assert "samples a batch" in done.stdout
    found = msgspec.json.decode(written.read_bytes(), type=dict[str, list[Throughput]])["throughput"]
    assert [each.in_flight for each in found] == [1, 2, 4, 1, 2, 4]
    single, batched = found[:3], found[3:]
    assert all(each.mean_batch is None for each in single)
    assert batched[0].mean_batch == 1
    assert all(each.mean_batch and each.mean_batch >= 1 and each.per_s > 0 for each in batched)


def test_what_is_measured_of_runs_in_flight_is_drawn(path: Path, tmp_path: Path) -> None:
    drawn, written = tmp_path / "load.svg", tmp_path / "load.json"
    load = ("--concurrency", "1:2", "--seconds", "0.05", "--batched", "--plot", str(drawn))
    command = ("run", str(path), "--device", "cpu", "--dim", "N=1")
    done = cudnn_actor_here(*command, *load, "--json", str(written))
    assert (done.returncode, done.stderr) == (0, "")
    picture = ElementTree.parse(drawn).getroot()
    found = msgspec.json.decode(written.read_bytes(), type=dict[str, list[Throughput]])["throughput"]
    told = [each.text or "" for each in picture.iter() if each.tag.endswith("title")]
    assert len(told) == 4 * len(found)  # runs a second, and three percentiles
    for each in found:
        assert sum(f"{each.in_flight} in flight: {each.per_s:,.1f} a second" in words for words in told) == 4


@pytest.mark.parametrize("tasks", [[5], [1, 1024]])
@pytest.mark.parametrize("per_s", [0.013, 1.0, 1e6])
def test_a_plot_of_any_numbers_lies_within_its_page(tasks: list[int], per_s: float) -> None:
    found = [
        Throughput(in_flight=each, runs=3, per_s=per_s, p50_ms=1e3 / per_s, p90_ms=1e3 / per_s, p99_ms=1e6)
        for each in tasks
    ]
    picture = ElementTree.fromstring(plot("any <model>", found))
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    circles = [each for each in picture.iter() if each.tag.endswith("circle")]
    assert len(circles) == 4 * len(tasks)
    for each in circles:
        assert 0 < float(each.attrib["cx"]) < width
        assert 60 < float(each.attrib["cy"]) < height - 40


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--plot", "load.svg"], "give --concurrency 1:64, too"),
        (["--plot", "load.png", "--concurrency", "1"], "give a name that ends in .svg"),
    ],
)
def test_a_plot_needs_a_load_and_is_an_svg(
    words: list[str], problem: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(path), "--device", "cpu", *words]) == 2
    assert problem in capsys.readouterr().err


def test_batched_needs_a_load_and_a_batch_dim(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", str(path), "--device", "cpu", "--dim", "N=33", "--batched"]
    assert main(command) == 2
    assert "--batched needs a number of tasks; give --concurrency" in capsys.readouterr().err
    assert main([*command, "--concurrency", "1", "--seconds", "0.01"]) == 2
    told = capsys.readouterr()
    assert "1 to 32 samples, and N is 33; give fewer: --dim N=1" in told.err
    assert told.out == ""  # nothing has run


def test_what_cannot_be_batched_is_told_before_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sum.onnx"
    given: dict[str, Any] = {"x": (FLOAT, ["N", 2])}
    made: dict[str, Any] = {"y": (FLOAT, [None, 2])}
    onnx.save(model_of([node("ReduceSum", "x axes", "y", keepdims=1)], given, made, AXES), file)
    load = ("--concurrency", "1", "--seconds", "60", "--batched")
    assert main(["run", str(file), "--device", "cpu", "--dim", "N=2", *load]) == 2
    told = capsys.readouterr()
    assert "y=(1, 2): is an output that does not follow the batch" in told.err
    assert told.out == ""
    onnx.save(image_model(2), file)
    assert main(["run", str(file), "--device", "cpu", *load]) == 2
    told = capsys.readouterr()
    assert "has no leading dim with a name" in told.err
    assert told.out == ""


AXES = {"axes": np.array([0])}


@pytest.mark.parametrize("option", ["--plot", "--timeline", "--json", "--out"])
def test_a_path_that_cannot_be_written_is_told_before_the_model_is_read(
    option: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--dim", "N=1", "--profile", "--concurrency", "1", "--seconds", "60", option)
    assert main(["run", str(path), "--device", "cpu", *words, "/nowhere/it.svg"]) == 2
    told = capsys.readouterr()
    assert f"{option} /nowhere/it.svg: there is no directory /nowhere; create it first" in told.err
    assert told.out == ""


def test_the_seed_of_nodes_without_one_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "drawing.onnx"
    onnx.save(model_of([node("RandomUniformLike", "x", "y")], {"x": (FLOAT, [4])}, {"y": (FLOAT, [4])}), file)
    drawn = []
    for seed in ("1", "1", "2"):
        assert main(["run", str(file), "--device", "cpu", "--random", seed]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]
    assert main(["run", str(file), "--device", "cpu"]) == 2
    assert "or `cudnn-actor run --random 1`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--concurrency", "0", "'0' must be a number from 1 to 1024, or a range of two, such as 1:64"),
        ("--concurrency", "8:1", "'8:1' must be a number from 1 to 1024"),
        ("--concurrency", "1:9999", "'1:9999' must be a number from 1 to 1024"),
        ("--concurrency", "two", "'two' must be a number from 1 to 1024"),
        ("--seconds", "0", "0 must be seconds above 0, at most 3600"),
        ("--seconds", "nan", "nan must be seconds above 0"),
        ("--seconds", "soon", "soon must be seconds above 0"),
    ],
)
def test_loads_that_cannot_be_are_told(
    path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, told: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["run", str(path), "--device", "cpu", option, value])
    assert exit_.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("1", (1,)), ("8", (8,)), ("1:64", (1, 2, 4, 8, 16, 32, 64)), ("3:10", (3, 6, 10)), ("1:1024", 11)],
)
def test_a_range_of_tasks_doubles_to_its_end(text: str, tasks: tuple[int, ...] | int) -> None:
    found = in_flight(text)
    assert found == tasks if isinstance(tasks, tuple) else len(found) == tasks


def test_json_that_cannot_be_written_or_has_nothing_to_say_is_an_error(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(path), "--device", "cpu", "--dim", "N=2", "--json", "/nowhere/p.json"]
    assert main([*command, "--profile"]) == 2
    assert "--json /nowhere/p.json: there is no directory /nowhere" in capsys.readouterr().err
    assert main(command) == 2
    assert "--json has nothing to write; ask for --explain" in capsys.readouterr().err


def test_the_most_tasks_are_all_served(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--concurrency", str(MOST_IN_FLIGHT), "--seconds", "0.01")
    assert main(["run", str(path), "--device", "cpu", "--dim", "N=1", *load]) == 0
    assert "1024" in capsys.readouterr().out


def test_inputs_that_are_not_given_are_made_up(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(path), "--device", "cpu", "--dim", "N=3"]) == 0
    assert "features: float32 (3, 4, 2, 2)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "give the size of N in image: float32 (N, 3, 8, 8): --dim N=1; or files: --input image="),
        (("--input", "picture=x.npy"), "'picture' is no input of the model: it has image"),
        (("--input", "image=gone.npy"), "gone.npy cannot be read: No such file or directory"),
        (
            ("--dim", "N=1", "--out", "/nowhere/out.npz"),
            "--out /nowhere/out.npz: there is no directory /nowhere",
        ),
        (("--dim", "N=1", "--out", "/"), "--out / is a directory; give a file name in it"),
        (("--dim", "M=1"), "'M' is no named dim of the model: it has N"),
        (("--dim", "N=1", "--dim", "N=2"), "--dim is given twice for one name"),
        (
            ("--dim", "N=99999999999"),
            "image: float32 (N, 3, 8, 8) is too large with the dims (99999999999, 3, 8, 8)",
        ),
        (
            ("--input", f"image={__file__}"),
            "test_run.py cannot be read as one array; write it with numpy.save",
        ),
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
    assert main(["run", str(tmp_path / "gone.onnx"), "--device", "cpu"]) == 2
    assert re.search(
        "gone.onnx': is no file in /.*; give the path of a file that there is", capsys.readouterr().err
    )


def test_a_size_that_is_no_number_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "model.onnx", "--dim", "N=-1"])
    assert "argument --dim: -1 must be a whole number from 0" in capsys.readouterr().err


def test_sizes_follow_from_the_inputs_that_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And an output may have any name."""
    port: Any = (FLOAT, ["N", 3])
    proto = model_of([node("Add", "a b", "file")], {"a": port, "b": port}, {"file": port})
    onnx.save(proto, tmp_path / "add.onnx")
    np.save(tmp_path / "b.npy", np.ones((4, 3), np.float32))
    options = ("--device", "cpu", "--input", f"b={tmp_path / 'b.npy'}", "--out", str(tmp_path / "out"))
    assert main(["run", str(tmp_path / "add.onnx"), *options]) == 0
    assert "file: float32 (4, 3)" in capsys.readouterr().out
    with np.load(tmp_path / "out") as written:
        assert written["file"].shape == (4, 3)


def test_an_input_that_no_tensor_holds_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port: Any = (onnx.TensorProto.STRING, [2])
    onnx.save(model_of([node("Identity", "x", "y")], {"x": port}, {"y": port}), tmp_path / "text.onnx")
    assert main(["run", str(tmp_path / "text.onnx"), "--device", "cpu"]) == 2
    assert "the model has 1 part that cannot be run: input 'x': is of type string" in capsys.readouterr().err


def test_all_dims_without_a_size_are_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port: Any = (FLOAT, ["N", "L"])
    onnx.save(model_of([node("Add", "a b", "c")], {"a": port, "b": port}, {"c": port}), tmp_path / "add.onnx")
    assert main(["run", str(tmp_path / "add.onnx"), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "give the size of N, L in a: float32 (N, L), b: float32 (N, L): --dim N=1 --dim L=1; or " in error
    assert "files: --input a=FILE.npy --input b=FILE.npy" in error


def test_a_size_that_differs_from_the_file_is_refused(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "image.npy"
    np.save(image, np.ones((2, 3, 8, 8), np.float32))
    options = ["--device", "cpu", "--input", f"image={image}"]
    assert main(["run", str(path), *options, "--dim", "N=3"]) == 2
    assert f"--dim N=3: {image} has N=2; leave --dim N out" in capsys.readouterr().err
    assert main(["run", str(path), *options, "--dim", "N=2"]) == 0


def test_random_values_that_decide_over_shapes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proto = model_of(
        [node("Reshape", "x sizes", "y")], {"x": (FLOAT, [6]), "sizes": (INT64, [2])}, {"y": (FLOAT, None)}
    )
    onnx.save(proto, tmp_path / "model.onnx")
    assert main(["run", str(tmp_path / "model.onnx"), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "The values of sizes are random: give files if they decide over shapes" in error
    assert error.count("\n") == 1
