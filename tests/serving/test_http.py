"""The server over HTTP, as `tritonclient` uses it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from ..patience import PATIENCE_S
from .servers import PLAIN, running, write_square

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = write_square(tmp_path_factory.mktemp("models"))
    with running(str(path), "--http", "0", "--grpc", "0", "--batch", "4") as (process, ports):
        yield ports["http"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


@pytest.fixture
def client(port: int) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        yield client


def squares(values: np.ndarray = ROWS, *, binary: bool = True) -> list[triton.InferInput]:
    given = triton.InferInput("x", values.shape, "FP32")
    given.set_data_from_numpy(values, binary_data=binary)
    return [given]


@pytest.mark.parametrize("binary", [True, False])
def test_an_inference_is_answered_as_it_was_sent(client: triton.InferenceServerClient, binary: bool) -> None:
    wanted = [triton.InferRequestedOutput("y", binary_data=binary)]
    answer = client.infer("square", squares(binary=binary), outputs=wanted, request_id="one")
    np.testing.assert_array_equal(answer.as_numpy("y"), ROWS**2)
    assert answer.get_response()["id"] == "one"
    assert ("data" in answer.get_output("y")) == (not binary)


def test_all_outputs_are_answered_if_none_are_named(client: triton.InferenceServerClient) -> None:
    answer = client.infer("square", squares(), model_version="1")
    np.testing.assert_array_equal(answer.as_numpy("y"), ROWS**2)


def test_a_request_larger_than_a_batch_runs_by_itself(client: triton.InferenceServerClient) -> None:
    many = np.ones((7, 3), np.float32)
    np.testing.assert_array_equal(client.infer("square", squares(many)).as_numpy("y"), many)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_bodies_may_be_compressed(client: triton.InferenceServerClient, algorithm: str) -> None:
    answer = client.infer(
        "square",
        squares(),
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    np.testing.assert_array_equal(answer.as_numpy("y"), ROWS**2)


def test_it_says_what_it_serves(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("square")
    assert not client.is_model_ready("round")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("square")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    config = client.get_model_config("square")
    assert (config["max_batch_size"], config["input"][0]["dims"]) == (4, [3])
    before = client.get_inference_statistics("square")["model_stats"][0]
    client.infer("square", squares())
    after = client.get_inference_statistics("square")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == len(ROWS)


@pytest.mark.parametrize(
    ("model", "values", "status", "text"),
    [
        ("round", ROWS, "404", "is unknown"),
        ("square", np.ones((2, 4), np.float32), "400", "does not fit"),
    ],
)
def test_errors_have_the_status_of_their_kind(
    client: triton.InferenceServerClient, model: str, values: np.ndarray, status: str, text: str
) -> None:
    with pytest.raises(InferenceServerException, match=text) as refused:
        client.infer(model, squares(values))
    assert refused.value.status() == status


def test_what_is_not_offered_is_said(port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", **PLAIN) as http:
        assert http.get("/v2/trace/setting").status_code == 501
        assert http.get("/v2/nothing").status_code == 404
        assert "cudnn_actor_state" in http.get("/metrics").text


def test_a_server_without_its_packages_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from cudnn_actor.cli import main, serve

    monkeypatch.setattr(serve, "_NEEDED", ("no_such_package_here",))
    assert main(["serve", str(tmp_path / "x.onnx")]) == 2
    assert "[serve]" in capsys.readouterr().err


@pytest.mark.parametrize("path", [".", "/"])
def test_a_folder_in_the_place_of_a_model_is_one_line(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    from cudnn_actor.cli import main

    assert main(["serve", path, "--http", "0", "--grpc", "0", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "is a folder, not a file" in error
    assert "Traceback" not in error


def test_how_often_a_worker_is_replaced_is_said_on_the_command_line(tmp_path: Path) -> None:
    words = ("--http", "0", "--grpc", "0", "--max-restarts", "7", "--period", "30")
    with running(str(write_square(tmp_path)), *words) as (_, ports):
        found = httpx.get(f"http://127.0.0.1:{ports['http']}/metrics", **PLAIN)
        assert 'cudnn_actor_restarts_left{service="cudnn"} 7.0' in found.text.splitlines()
