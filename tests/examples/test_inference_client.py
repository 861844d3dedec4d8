"""The example of a client, against a server."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import onnx

from cudnn_actor.cli import serve

from ..onnx.small_models import FLOAT, image_model, model_of, node
from ..patience import PATIENCE_S
from ..serving.servers import running
from .test_readme import printed, programs

EXAMPLE = Path(__file__).parents[2] / "examples" / "inference_client.py"
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def test_the_example_of_a_client_runs(tmp_path: Path) -> None:
    onnx.save(image_model(), tmp_path / "image.onnx")
    with running(str(tmp_path / "image.onnx"), "--http", "0", "--grpc", "0", "--batch", "4") as (_, ports):
        command = [sys.executable, str(EXAMPLE)]
        command += [*(f"127.0.0.1:{ports[face]}" for face in ("http", "grpc")), "image"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "over gRPC: 16 answers" in done.stdout


def test_the_client_of_the_page_gets_scores_from_the_server_of_its_command(tmp_path: Path) -> None:
    dims = {"image": (FLOAT, ("N", 3, 224, 224))}, {"scores": (FLOAT, ("N", 3, 1, 1))}
    onnx.save(model_of([node("GlobalAveragePool", "image", "scores")], *dims), tmp_path / "resnet50.onnx")
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    commands = re.findall(r"^cudnn-actor serve (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(commands) == 2
    for words in map(shlex.split, commands):
        parsed = parser.parse_args(words)
        assert (parsed.models, parsed.http) == ([("resnet50", Path("resnet50.onnx"))], 8000)
    [name, *options] = shlex.split(commands[0].replace("--device cuda", ""))
    [client] = programs(PAGE)
    with running(str(tmp_path / name), *options, "--http", "0", cwd=tmp_path) as (_, ports):
        assert client.count("127.0.0.1:8000") == 1
        client = client.replace(":8000", f":{ports['http']}")
        assert printed(f"{client}\nprint(scores.shape, scores.max())", tmp_path) == "(1, 3, 1, 1) 0.0\n"
